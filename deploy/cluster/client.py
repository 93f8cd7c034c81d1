"""The command line's side of a controller: finds or starts it, calls it in bounded time, and follows it until it is done."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

from ray.exceptions import RayActorError

import kvferry
from deploy.cluster.actors import why_dead
from deploy.cluster.connection import import_ray
from deploy.cluster.controller import NAME, Controller
from deploy.cluster.kinship import check_is_of
from deploy.cluster.plan import ClusterPlan
from kvferry.errors import ConfigurationError, KvferryError, LaterError, NoWorker
from kvferry.racing import until_first

CALL_TIMEOUT_S = 30.0
PATIENCE_S = 300.0
"""Without news of any program. Weights may take hours, as long as they come."""
LOST_PAUSE_S = 0.5
ROLES = ("router", "prefill", "decode")
SAME_EVERYWHERE = f"Install kvferry {kvferry.__version__}, as it is here, on all nodes"

Status = dict[str, Any]


class DeploymentEnded(ConfigurationError):
    """By somebody else."""


class ClusterClient:
    """Of a Ray that this process is connected to. `on_status` is called whenever something has changed."""

    def __init__(self, namespace: str, on_status: Callable[[Status], None] = lambda status: None):
        self._namespace, self._on_status = namespace, on_status
        self._controller: Any = None

    async def find(self) -> None:
        """Raises ConfigurationError if no deployment is there."""
        ray = import_ray()
        try:
            self._controller = await _bounded(asyncio.to_thread(ray.get_actor, NAME, self._namespace))
        except ValueError as error:
            raise ConfigurationError(
                f"no deployment in namespace {self._namespace} of this Ray cluster: start one with `kvferry up --on ray`"
            ) from error
        await _bounded(asyncio.to_thread(check_is_of, self._controller, Controller, NAME, self._namespace))

    async def find_or_start(self) -> None:
        ray = import_ray()

        def create() -> Any:
            options = {"name": NAME, "namespace": self._namespace, "lifetime": "detached", "get_if_exists": True}
            remote: Any = ray.remote(Controller).options(num_cpus=0, max_restarts=-1, **options)
            return remote.remote(self._namespace)

        self._controller = await _bounded(asyncio.to_thread(create))
        check_is_of(self._controller, Controller, NAME, self._namespace)
        try:
            version = await self._call("version")
        except NoWorker as error:
            lost = error.__cause__
            if isinstance(lost, RayActorError) and lost.actor_init_failed:
                raise ConfigurationError(
                    f"the controller could not begin: {why_dead(lost)}. {SAME_EVERYWHERE}"
                ) from lost
            raise
        if version != kvferry.__version__:
            await self._refuse(version)

    async def _refuse(self, version: str) -> None:
        """A controller of another version: if nothing is wanted there, it is also ended. It may know no more calls than these."""
        status = await self.status()
        if not status["is_wanted"]:
            await _bounded(asyncio.to_thread(import_ray().kill, self._controller))
        raise ConfigurationError(
            f"the controller, on node {status['controller']['address']}, runs kvferry {version}. {SAME_EVERYWHERE}"
        )

    async def up(self, plan: ClusterPlan) -> Status:
        """All programs are ready. What this call began, it ends if it cannot be. Raises ConfigurationError."""
        applying = asyncio.ensure_future(self._call("apply", plan.model_dump()))
        try:
            await asyncio.shield(applying)
            return await self.until(is_ready)
        except DeploymentEnded:
            raise
        except BaseException:
            await asyncio.shield(self._take_back(applying))
            raise

    async def _take_back(self, applying: "asyncio.Future[bool]") -> None:
        """What it began: of two at once, one does; the other must not end it."""
        has_begun = False
        with contextlib.suppress(KvferryError):
            has_begun = await applying
        await (self.down() if has_begun else self._retire())

    async def scale(self, num_prefill: int | None, num_decode: int | None) -> Status:
        await self._call("scale", num_prefill, num_decode)
        counts = {"prefill": num_prefill, "decode": num_decode}
        asked = [role for role, count in counts.items() if count is not None] or ROLES
        return await self.until(lambda status: is_ready(status, asked), lambda one: one["role"] in asked)

    async def drain(self, name: str) -> Status:
        await self._call("drain", name)
        return await self.until(
            lambda status: name not in {one["name"] for one in status["programs"]}, lambda one: False
        )

    async def change_role(self, name: str, role: str) -> Status:
        await self._call("change_role", name, role)
        return await self.until(
            lambda status: any(
                one["name"] == name and one["role"] == role and one["is_ready"] for one in status["programs"]
            ),
            lambda one: one["name"] == name,
        )

    async def down(self) -> None:
        """Ends the deployment, and the controller."""
        await until_first(self._call("down"), self._show())
        with contextlib.suppress(LaterError):
            self._on_status(await self.status())
        await self._retire()

    async def _show(self) -> None:
        """What changes, for as long as anybody wants to know."""
        status = Status()
        while True:
            status = await self._next_status(status)

    async def _next_status(self, known: Status) -> Status:
        """Once it is another one, or after a while; the known one while the controller is away."""
        try:
            status = await self.status(known.get("version", 0))
        except LaterError:
            await asyncio.sleep(LOST_PAUSE_S)
            return known
        self._on_status(status)
        return status

    async def _retire(self) -> None:
        """Ends the controller, unless something is wanted there."""
        with contextlib.suppress(NoWorker):  # that is its end
            await self._call("retire")

    async def status(self, known_version: int = 0) -> Status:
        return await self._call("status", known_version)

    async def until(
        self, is_reached: Callable[[Status], bool], concerns: Callable[[Status], bool] = lambda one: True
    ) -> Status:
        """Raises ConfigurationError as soon as a program that it `concerns` could not begin, or if there is no news of any for long;
        and DeploymentEnded."""
        status, news = Status(), _News()
        while not news.are_overdue(status):
            status = await self._next_status(status)
            if not status:
                continue
            if not status["is_wanted"]:
                raise DeploymentEnded("the deployment was ended meanwhile: `kvferry up` begins another one")
            if is_reached(status):
                return status
            for one in status["programs"]:
                if one["has_failed"] and not one["is_leaving"] and concerns(one):
                    raise ConfigurationError(f"{one['name']}: {one['previous_end'] or one['reason']}")
        late = "; ".join(
            f"{one['name']} is {one['state']}{': ' if one['reason'] else ''}{one['reason']}"
            for one in status.get("programs", ())
            if not one["is_ready"]
        )
        raise ConfigurationError(f"no news for {news.patience_s:g} s: {late}")

    async def _call(self, method: str, *arguments: Any) -> Any:
        ray = import_ray()

        def begin() -> Any:
            """A Ray Client asks the cluster before there is anything to wait for."""
            return getattr(self._controller, method).remote(*arguments).future()

        async def answer() -> Any:
            return await asyncio.wrap_future(await asyncio.to_thread(begin))

        try:
            return await _bounded(answer())
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, KvferryError):
                raise cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise NoWorker(f"the controller was lost: {error}; it comes back by itself: try again") from error


class _News:
    """States and shares that are seen for the first time: of one that begins again and again there is none in the end."""

    def __init__(self) -> None:
        self._seen, self._came_at = set[tuple[Any, ...]](), self._now
        self.patience_s = PATIENCE_S

    def are_overdue(self, status: Status) -> bool:
        """A program that drains says nothing for as long as it may."""
        self.patience_s = PATIENCE_S + status.get("grace_s", 0.0)
        found = {(one["name"], one["role"], one["state"], one["share"]) for one in status.get("programs", ())}
        if found - self._seen:
            self._seen |= found
            self._came_at = self._now
        return self._now > self._came_at + self.patience_s

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def is_ready(status: Status, roles: Collection[str] = ROLES) -> bool:
    """As many of these kinds as are wanted run, and no more."""
    programs = [one for one in status["programs"] if one["role"] in roles]
    are_enough = all(
        sum(one["role"] == role for one in programs) == count
        for role, count in status["wanted"].items()
        if role in roles
    )
    return are_enough and all(one["is_ready"] for one in programs)


def urls(status: Status) -> list[str]:
    return [f"http://{one['details']['http']}" for one in status["programs"] if one["details"].get("http")]


async def _bounded(awaitable: Any) -> Any:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await awaitable
    except TimeoutError:
        raise ConfigurationError(
            f"the cluster's control store does not answer within {CALL_TIMEOUT_S:g} s. What runs goes on; try again once it is back"
        ) from None
    except ConnectionError as error:
        raise ConfigurationError(
            f"the connection to the Ray cluster was lost: {error}. What was asked for goes on there; connect again"
        ) from error

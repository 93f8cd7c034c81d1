"""The command line's side of a controller: finds or starts it, calls it in bounded time, and follows it until it is done."""

import asyncio
from collections.abc import Callable
from typing import Any

import kvferry
from deploy.cluster.connection import import_ray
from deploy.cluster.controller import NAME, Controller
from deploy.cluster.kinship import check_is_of
from deploy.cluster.plan import ClusterPlan
from kvferry.errors import ConfigurationError, KvferryError, LaterError, NoWorker

CALL_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 300.0
LOST_PAUSE_S = 0.5

Status = dict[str, Any]


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
        version = await self._call("version")
        if version != kvferry.__version__:
            raise ConfigurationError(
                f"the controller there runs kvferry {version}, this is {kvferry.__version__}: install the same on all nodes"
            )

    async def up(self, plan: ClusterPlan, timeout_s: float = READY_TIMEOUT_S) -> Status:
        """All programs are ready. What this call began, it ends if it cannot be. Raises ConfigurationError."""
        is_there = (await self.status())["is_wanted"]
        try:
            await self._call("apply", plan.model_dump())
            return await self.until(is_ready, timeout_s)
        except BaseException:
            if not is_there:
                await asyncio.shield(self.down())
            raise

    async def scale(self, num_prefill: int | None, num_decode: int | None) -> Status:
        await self._call("scale", num_prefill, num_decode)
        return await self.until(is_ready)

    async def drain(self, name: str) -> Status:
        await self._call("drain", name)
        return await self.until(lambda status: name not in {one["name"] for one in status["programs"]})

    async def change_role(self, name: str, role: str) -> Status:
        await self._call("change_role", name, role)
        return await self.until(
            lambda status: (
                any(one["name"] == name and one["role"] == role for one in status["programs"]) and is_ready(status)
            )
        )

    async def down(self) -> None:
        """Ends the deployment, and the controller."""
        ray = import_ray()
        await self._call("down")
        await _bounded(asyncio.to_thread(ray.kill, self._controller))

    async def status(self, known_version: int = 0) -> Status:
        return await self._call("status", known_version)

    async def until(self, is_reached: Callable[[Status], bool], timeout_s: float = READY_TIMEOUT_S) -> Status:
        """Raises ConfigurationError as soon as a program could not begin, or when the time is over."""
        version, status = 0, Status()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        status = await self.status(version)
                    except LaterError:
                        await asyncio.sleep(LOST_PAUSE_S)
                        continue
                    version = status["version"]
                    self._on_status(status)
                    if is_reached(status):
                        return status
                    for one in status["programs"]:
                        if one["has_failed"]:
                            raise ConfigurationError(f"{one['name']}: {one['previous_end'] or one['reason']}")
        except TimeoutError:
            late = "; ".join(
                f"{one['name']} is {one['state']}{': ' if one['reason'] else ''}{one['reason']}"
                for one in status.get("programs", ())
                if not one["is_ready"]
            )
            raise ConfigurationError(f"not done after {timeout_s:g} s: {late}") from None

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


def is_ready(status: Status) -> bool:
    """As many of each kind as are wanted run, and nothing else."""
    programs = status["programs"]
    counts = {role: sum(one["role"] == role for one in programs) for role in ("prefill", "decode")}
    return counts == status["wanted"] and bool(programs) and all(one["is_ready"] for one in programs)


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

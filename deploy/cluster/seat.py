"""One program's place in the deployment, through all of its lives: the controller's side of an actor.

It finds the actor of its name or creates it, tells it what to run, follows what it says, and begins anew after a pause that grows when
it is lost. Told to leave, it lets the program drain, ends the actor, and is done.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

import kvferry
from deploy.cluster.actors import SILENCE_S, end, prompt_result, result, stop_and_end, why_dead
from deploy.cluster.kinship import check_is_of
from deploy.cluster.program import ProgramActor, digest_of
from deploy.cluster.reservations import Reservation
from deploy.local import FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S
from kvferry.bell import Bell
from kvferry.errors import ConfigurationError
from kvferry.racing import until_first

logger = logging.getLogger(__name__)

RUNNING = ("listening", "ready", "draining")
"""In another state an actor may be silent for long: what it loads first, it loads before it hears anything."""
PLACING_S = 2.0
"""An actor that is not there by then may wait on a node that was lost."""
UNREACHABLE_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    role: str
    arguments: list[str]


@dataclass(slots=True)
class SeatStatus:
    """For people and machines: what `kvferry status` shows."""

    name: str
    role: str
    state: str = "placing"
    reason: str = ""
    """Why it is not running, if it is not."""
    share: float = 0.0
    details: dict[str, str] = field(default_factory=dict[str, str])
    node: dict[str, Any] = field(default_factory=dict[str, Any])
    runs: str = ""
    """The role of the program that its state is of: of the one before, as long as that drains."""
    num_starts: int = 0
    previous_end: str = ""
    private_bytes: int = 0
    has_failed: bool = False
    """It could not even begin: by itself it will hardly mend."""

    @property
    def is_ready(self) -> bool:
        return self.runs == self.role and self.state == ("listening" if self.role == "router" else "ready")


@dataclass(slots=True)
class Surroundings:
    """What a seat asks the controller."""

    namespace: str
    secret: str
    room: Callable[["Seat"], Awaitable[Reservation | None]]
    """Once it has some; None: it leaves."""
    has_room: Callable[["Seat"], Awaitable[bool]]
    """Still."""
    ask: Callable[["Seat"], Asked | None]
    """What shall run there now, on the node that it has got; None: not known yet, `change` follows."""
    on_change: Callable[["Seat"], None]


class Seat:
    def __init__(self, name: str, role: str, around: Surroundings):
        self.name, self.role = name, role
        self.status = SeatStatus(name, role)
        self._around, self._bell = around, Bell()
        self._actor: Any = None
        self.is_leaving = False
        self._is_hurried = False
        self._ordered: int | None = None
        """The number of what it was told to run; None: it has to be told anew."""
        self._runs = 0

    @property
    def is_settled(self) -> bool:
        """It runs what it shall."""
        return self._ordered == self._runs and self.status.is_ready

    def change(self, role: str) -> None:
        """What it shall run has changed."""
        self.role = self.status.role = role
        self._ordered = None
        self._bell.ring()

    def lacks_room(self, why: str) -> None:
        if self.status.reason != why:
            self._say("placing", why)

    def leave(self, is_hurried: bool = False) -> None:
        self.is_leaving, self._is_hurried = True, self._is_hurried or is_hurried
        self._bell.ring()

    async def run(self) -> None:
        """Until it has left."""
        pause_s = FIRST_PAUSE_S
        now = asyncio.get_running_loop().time
        while not self.is_leaving:
            began = now()
            self.status.previous_end = end = await self._live()
            await self._end_actor()
            if self.is_leaving:
                break
            pause_s = FIRST_PAUSE_S if now() - began > STEADY_S else pause_s
            self._say("waiting", f"{end}; begins again in {pause_s:g} s")
            logger.warning("%s: %s", self.name, self.status.reason)
            await self._bell.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        await self._end_actor()
        self._say("gone")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self.status), "is_ready": self.status.is_ready, "is_leaving": self.is_leaving}

    # -------------------------------------------------------------------------------------------------------- one life

    async def _live(self) -> str:
        """How it ended."""
        self.status.num_starts += 1
        self._ordered = None
        self.status.node, self.status.details = {}, {}
        self._say("placing")
        try:
            await until_first(self._begin_and_follow(), self._until_hurried())
            return "ended"
        except _Ended as ended:
            self.status.has_failed = not ended.has_run
            return ended.how
        except RayError as error:
            words = "" if self.status.details else f": {why_dead(error)}"
            self.status.has_failed = bool(words) and self.status.num_starts == 1
            return f"actor lost: {type(error).__name__}{words}"
        except ConfigurationError as error:
            self.status.has_failed = True
            return error.message
        except Exception as error:  # whatever Ray raises while its control store is away: the actor is looked for again
            logger.exception("%s", self.name)
            return f"cannot be placed: {error!r}"

    async def _until_hurried(self) -> None:
        while not self._is_hurried:
            await self._bell.wait()

    async def _begin_and_follow(self) -> None:
        room = await self._around.room(self)
        if room is None or self.is_leaving:
            return
        self._say("placing")
        self._actor = await asyncio.to_thread(self._find_or_create, room)
        node = await self._until_placed(self._actor.where.remote())
        digest = node.pop("secret_digest", "")
        self.status.node = node
        if node["version"] != kvferry.__version__:
            raise _Ended(f"node {self.node_words} has kvferry {node['version']}, not {kvferry.__version__}", False)
        if digest != digest_of(self._around.secret):
            raise _Ended("of that name there was a program of an earlier deployment", True)
        await until_first(self._follow(), self._give_orders())

    def _find_or_create(self, room: Reservation) -> Any:
        resources = dict(room.resources)
        named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        actor: Any = (
            ray.remote(ProgramActor)
            .options(
                name=self.name,
                namespace=self._around.namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                scheduling_strategy=room.strategy,
                **{option: resources.pop(name, 0) for option, name in named.items()},
                resources=resources,
            )
            .remote(self.name, self._around.secret)
        )
        check_is_of(actor, ProgramActor, self.name, self._around.namespace)
        return actor

    async def _until_placed(self, reference: Any) -> dict[str, Any]:
        placed = asyncio.ensure_future(result(reference))
        try:
            while not placed.done():
                await asyncio.wait((placed,), timeout=PLACING_S)
                if self.is_leaving and not placed.done():
                    raise _Ended("it left before it had a place", True)
                if not placed.done() and not await self._around.has_room(self):
                    raise _Ended("its node was lost", True)
            return placed.result()
        finally:
            placed.cancel()

    async def _give_orders(self) -> None:
        """Whenever what shall run there has changed, also while it was told; a router's orders stand for its life."""
        given: Asked | None = None
        number = 0
        while not self.is_leaving:
            if given is None or self.role != "router":
                asked = self._around.ask(self)
                if asked is not None and asked != given:
                    number = await self._told("begin", asked.role, asked.arguments, self.status.previous_end)
                    given = asked
                    continue
            self._ordered = number if given is not None else None
            await self._bell.wait()
        if not await self._told("drain"):
            raise _Ended("it had not begun", True)
        await asyncio.Event().wait()  # until its end is heard of

    async def _told(self, method: str, *arguments: Any) -> Any:
        """An actor that cannot be reached for the moment is not lost. One that can, and runs, answers: else it raises _Ended."""
        ask = functools.partial(getattr(self._actor, method).remote, *arguments)
        while True:
            try:
                return await (prompt_result(ask) if self.status.state in RUNNING else result(ask()))
            except ActorUnavailableError:
                await asyncio.sleep(UNREACHABLE_PAUSE_S)
            except TimeoutError:
                raise _Ended(f"it hangs: no answer for {2 * SILENCE_S:g} s", True) from None

    async def _follow(self) -> None:
        """Raises _Ended."""
        version, has_run = 0, False
        while True:
            report = await self._told("report", version)
            status = self.status
            status.private_bytes = report["private_bytes"]
            if report["version"] == version:
                continue
            version = report["version"]
            status.share, status.details, status.runs = report["share"], report["details"], report["role"]
            self._runs = report["order"]
            runs = ("ready", "draining", *(("listening",) if self.role == "router" else ()))
            has_run = has_run or report["state"] in runs
            if report["state"] != "idle":
                self._say(report["state"], status.details.get("reason", "") if report["state"] == "failed" else "")
            code = report["code"]
            if code is not None and (code != 0 or self.is_leaving):
                raise _Ended(self._how(code), has_run)
            status.has_failed = status.has_failed and not has_run

    def _how(self, code: int) -> str:
        reason = self.status.details.get("reason", "")
        return f"code {code}: {reason} (on node {self.node_words})" if reason else f"code {code}"

    @property
    def node_words(self) -> str:
        node = self.status.node
        return f"{node.get('address')} ({node.get('host')})"

    async def _end_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            await (stop_and_end if self._is_hurried else end)(actor)

    def _say(self, state: str, reason: str = "") -> None:
        self.status.state, self.status.reason = state, reason
        self._around.on_change(self)


class _Ended(Exception):
    """The program has ended, and no other was ordered."""

    def __init__(self, how: str, has_run: bool):
        super().__init__(how)
        self.how, self.has_run = how, has_run

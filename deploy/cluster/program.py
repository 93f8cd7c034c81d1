"""One of the three programs as an actor: the very same that `python -m` starts, with the same flags.

The actor outlives its program: told to begin another one, it lets the present one drain, and what was loaded stays loaded. It knows
its node and its orders, and neither Ray's cluster nor the deployment.
"""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

import kvferry
from deploy.cluster.life import MemoryInUse, as_long_as_the_actor
from deploy.local import MODULES
from deploy.within import run_within
from kvferry import process
from kvferry.bell import Bell
from kvferry.config import home
from kvferry.engine.unpack import make_model
from kvferry.errors import ConfigurationError, KvferryError
from kvferry.kv.roads.object_store import Shipment, shipments
from kvferry.worker import process as worker_process

COALESCE_S = 0.05
REPORT_S = 5.0
"""A report is sent at least so often: it carries the memory in use."""


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    role: str
    arguments: tuple[str, ...]
    """Equal ones are the same order, whoever gives it."""
    previous_end: str


@dataclass(slots=True)
class Told:
    """What the program has said of itself, and how it ended."""

    version: int = 1
    order: int = 0
    role: str = ""
    state: str = "idle"
    share: float = 0.0
    details: dict[str, str] = field(default_factory=dict[str, str])
    code: int | None = None


class ProgramActor:
    """To be created with a name: readers of the object store find it by that."""

    def __init__(self, name: str, secret: str):
        process.set_up_logs("info", name)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._secret_file, self._secret_digest = _hold_secret(secret), digest_of(secret)
        self._name, self._order, self._told, self._bell = name, Order(0, "", (), ""), Told(), Bell()
        self._memory = MemoryInUse()
        self._host = worker_process.WorkerHost()
        self._running: asyncio.Future[int] | None = None
        self._is_ending, self._is_draining = False, False
        self._serving = as_long_as_the_actor(self._serve())

    def where(self) -> dict[str, Any]:
        """The node, in words for people; and of which secret this actor is."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return {
            "node_id": context.get_node_id(),
            "address": address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": kvferry.__version__,
            "code": str(Path(kvferry.__file__).parents[1]),
            "secret_digest": self._secret_digest,
        }

    async def begin(self, role: str, arguments: list[str], previous_end: str) -> int:
        """From now on this is what shall run here. Returns the order's number.

        What runs like that already goes on; so does a router, whatever its arguments: clients hang on it.
        """
        order = self._order
        is_same = order.role == role and (role == "router" or order.arguments == tuple(arguments))
        if self._is_ending or not is_same or self._told.code is not None:
            self._order = Order(order.number + 1, role, tuple(arguments), previous_end)
            self._is_ending = False
            self._end_in_order()
            self._bell.ring()
        return self._order.number

    async def drain(self) -> bool:
        """No new work; what runs may finish. The program then ends with code 0, and no other begins. False: there is none."""
        self._is_ending = True
        self._end_in_order()
        return self._order.number > 0

    async def stop(self) -> bool:
        """At once: what runs goes on elsewhere, or is told so. False: no program has begun."""
        self._is_ending = True
        if self._running is not None:
            self._running.cancel()
        return self._order.number > 0

    async def report(self, known_version: int) -> dict[str, Any]:
        """What has changed since, or after a while the same once more."""
        if self._told.version <= known_version:
            await self._bell.wait(REPORT_S)
            await asyncio.sleep(COALESCE_S)
        told = self._told
        return {
            "version": told.version,
            "order": told.order,
            "role": told.role,
            "state": told.state,
            "share": told.share,
            "details": dict(told.details),
            "code": told.code,
            "private_bytes": self._memory.private_bytes,
        }

    async def _serve(self) -> None:
        """One program after the other, as ordered."""
        last = 0
        while True:
            while self._order.number == last:
                await self._bell.wait()
            order, last = self._order, self._order.number
            self._told = Told(self._told.version, order.number, order.role)
            self._heard({"state": "starting"})
            try:
                await asyncio.to_thread(_make_model, order.arguments)
                code = await self._run(order)
            except KvferryError as error:
                self._heard({"state": "failed", "reason": error.message})
                code = 2
            if code == process.ENGINE_LOST_EXIT_CODE:
                os._exit(code)  # no other program of this process would fare better: the actor begins anew
            self._told.code = code
            self._changed()

    async def ship_blocks(self, ticket: bytes) -> AsyncIterator[Shipment]:
        """Frames of one fetch, for the worker whose ticket it is."""
        async for shipment in shipments(ticket):
            yield shipment

    # ----------------------------------------------------------------------------------------------------- the program

    async def _run(self, order: Order) -> int:
        """Its exit code. A program that is ended while it cannot drain is cancelled: code 0."""
        loop = asyncio.get_running_loop()
        worker_process.host.set(self._host)
        arguments = [*order.arguments, f"--secret-file={self._secret_file}"]
        if order.role != "router" and order.previous_end:
            arguments.append(f"--previous-end={order.previous_end}")
        self._running = asyncio.ensure_future(
            run_within(MODULES[order.role], arguments, lambda said: loop.call_soon_threadsafe(self._heard, said))
        )
        if order.number != self._order.number or self._is_ending:
            self._end_in_order()
        try:
            return await self._running
        except asyncio.CancelledError:
            if not self._running.cancelled():
                raise
            return 0
        finally:
            self._running, self._is_draining, self._host.draining = None, False, None

    def _end_in_order(self) -> None:
        if self._is_draining:
            return
        if self._host.draining is not None:
            self._is_draining = True
            self._host.draining.begin()
            self._heard({"state": "draining"})
        elif self._running is not None:
            self._running.cancel()

    def _heard(self, said: dict[str, Any]) -> None:
        told = self._told
        if self._is_draining:
            said["state"] = "draining"  # whatever it joins meanwhile
        told.share = float(said.pop("share", told.share))
        told.state = str(said.pop("state", told.state))
        told.details.update({name: str(value) for name, value in said.items()})
        if told.state in ("listening", "ready"):
            self._memory.forget()
        self._changed()

    def _changed(self) -> None:
        self._told.version += 1
        self._bell.ring()


def _make_model(arguments: tuple[str, ...]) -> None:
    """Raises ConfigurationError if it is not on this node."""
    given = next((one.partition("=")[2] for one in arguments if one.startswith("--model=")), "")
    if given and not Path(given).exists():
        raise ConfigurationError(f"model {given} is not there: put it at that path on every node, or name another")
    make_model(Path(given) if given else None, home())


def digest_of(secret: str) -> str:
    """Tells secrets apart, and tells nobody what they are: they are random, and long."""
    return hashlib.blake2b(secret.encode(), digest_size=16).hexdigest()


def _hold_secret(secret: str) -> Path:
    """A file that programs of this process can read, and that is on no disk: it is gone with the process, however that ends."""
    descriptor = os.memfd_create("kvferry-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return Path(f"/proc/self/fd/{descriptor}")

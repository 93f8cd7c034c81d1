"""The controller: a named, detached actor that holds what is wanted and brings the cluster to it.

It starts, follows, restarts and ends the programs' actors, and carries no request: while it is away, everything that runs goes on.
One that comes back reads what was wanted from the cluster's store and adopts what runs. Its methods take and return plain values and
raise ConfigurationError.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

import kvferry
from deploy.cluster.actors import drain_and_end, find_program, program_names, stop_and_end, why_dead
from deploy.cluster.life import MemoryInUse, as_long_as_the_actor
from deploy.cluster.nodes import ClusterNode, are_one_machine, cluster_nodes
from deploy.cluster.plan import ClusterPlan, difference, plan_of
from deploy.cluster.reservations import Reservation, Reservations
from deploy.cluster.room import Bundle, why_not
from deploy.cluster.seat import Asked, Seat, Surroundings
from deploy.cluster.wanted import KEY, Wanted, bundles_of, first_wanted, wanted_of
from kvferry import process
from kvferry.bell import Bell
from kvferry.errors import ConfigurationError, NoWorker
from kvferry.racing import until_first

logger = logging.getLogger(__name__)

NAME = "controller"
STATUS_S = 5.0
SEEK_S = 2.0
"""Room is sought so often, for all seats that have none."""
SETTLED_S = 1.0
"""Not every seat that settles rings."""
JOIN_S = 30.0
"""For a worker to join routers elsewhere, once it has drained."""


class Controller:
    def __init__(self, namespace: str):
        process.set_up_logs("info", "controller")
        self._namespace = namespace
        self._wanted: Wanted | None = None
        self._seats: dict[str, Seat] = {}
        self._starting: list[Seat] = []
        self._reservations = Reservations(namespace)
        self._seeking, self._sought_at, self._lacking = asyncio.Lock(), -SEEK_S, ""
        self._version, self._bell, self._seats_bell, self._moved = 1, Bell(), Bell(), Bell()
        self._changing = asyncio.Lock()
        self._adopted, self._memory = asyncio.Event(), MemoryInUse()
        self._serving = as_long_as_the_actor(self._serve())

    async def _serve(self) -> None:
        """Every seat has a task here."""
        stored = await asyncio.to_thread(_internal_kv_get, KEY, namespace=self._namespace.encode())
        await self._reservations.adopt()
        if stored is not None:
            self._wanted = wanted_of(stored)
            logger.info("adopting %s", ", ".join([*self._wanted.routers, *self._wanted.workers]))
            self._fill_seats()
        self._adopted.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_places())
            group.create_task(self._join_routers())
            group.create_task(self._end_strangers())
            while True:
                for seat in self._starting:
                    group.create_task(self._occupy(seat))
                self._starting.clear()
                await self._seats_bell.wait()

    async def _occupy(self, seat: Seat) -> None:
        await seat.run()
        if seat.name not in self._roles:
            await self._reservations.give_up([seat.name])
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]
        self._fill_seats()  # of that name another one may be wanted by now
        self._changed()

    async def _keep_places(self) -> None:
        """Where routers are, whenever that has changed."""
        kept = self._wanted
        while True:
            while self._wanted is kept:
                await self._moved.wait()
            async with self._changing:
                kept = self._wanted
                if kept is not None:
                    await self._keep(kept)

    async def _join_routers(self) -> None:
        """Workers join them where they are now: of those that serve, half of each kind at a time, so that others go on serving."""
        known = self._routers
        while True:
            while self._routers == known:
                await self._moved.wait()
            known = self._routers
            of_kind = [[seat for seat in self._seats.values() if seat.role == role] for role in ("prefill", "decode")]
            serving = [[seat for seat in seats if seat.status.is_ready] for seats in of_kind]
            idle = [seat for seats in of_kind for seat in seats if not seat.status.is_ready]
            for part in (idle, *([seat for seats in serving for seat in seats[half::2]] for half in (0, 1))):
                for seat in part:
                    seat.change(seat.role)
                if part is not idle:
                    await self._until_settled(part)

    async def _until_settled(self, seats: list[Seat]) -> None:
        """Or until what they drain must have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((self._wanted.plan.grace_s if self._wanted else 0) + JOIN_S):
                while not all(seat.is_settled or seat.is_leaving for seat in seats):
                    await self._bell.wait(SETTLED_S)

    async def _end_strangers(self) -> None:
        """Programs that were leaving when the last controller was lost, and what room they have."""
        names = {*await program_names(self._namespace), *self._reservations.names} - self._seats.keys()
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(self._end_stranger(name))

    async def _end_stranger(self, name: str) -> None:
        """Unless a seat takes that name: the program is the seat's then."""
        actor = await find_program(name, self._namespace)
        if actor is not None and name not in self._seats:
            logger.info("%s is wanted no more", name)
            await until_first(drain_and_end(actor), self._until_taken(name))
        async with self._changing:
            await self._reservations.give_up({name} - self._seats.keys())

    async def _until_taken(self, name: str) -> None:
        while name not in self._seats:
            await self._bell.wait()

    # --------------------------------------------------------------------------------------------------- what is asked

    async def version(self) -> str:
        """Of kvferry on this controller's node."""
        await self._adopted.wait()
        return kvferry.__version__

    async def apply(self, plan: dict[str, Any]) -> bool:
        """Brings the cluster to this plan, and what runs there to its counts. True: nothing was wanted before, this began it."""
        wanted = plan_of(plan)
        async with self._change():
            if self._wanted is None:
                nodes = await asyncio.to_thread(cluster_nodes)
                await self._want(first_wanted(with_routers(wanted, nodes), _machine_of(wanted, nodes)))
                return True
            different = difference(self._wanted.plan, wanted)
            if different:
                raise ConfigurationError(
                    f"a deployment with other settings runs in namespace {self._namespace}: {different}. "
                    "`kvferry down` ends it; `kvferry scale` changes its counts"
                )
            await self._want(self._scaled(wanted.prefill.count, wanted.decode.count))
            return False

    async def scale(self, num_prefill: int | None, num_decode: int | None) -> None:
        async with self._change():
            wanted = self._running
            num_prefill = wanted.count("prefill") if num_prefill is None else num_prefill
            num_decode = wanted.count("decode") if num_decode is None else num_decode
            if num_prefill < 0 or num_decode < 1:
                raise ConfigurationError("a deployment needs a decode worker: --decode must be at least 1")
            await self._want(self._scaled(num_prefill, num_decode))

    async def drain(self, name: str) -> None:
        """That worker finishes what it has, and is wanted no more."""
        async with self._change():
            wanted = self._running
            self._check_worker(name)
            if wanted.workers[name] == "decode" and wanted.count("decode") == 1:
                raise ConfigurationError(
                    f"{name} is the only decode worker: add one first (`kvferry scale --decode 2`)"
                )
            await self._want(wanted.without(name))

    async def change_role(self, name: str, role: str) -> None:
        async with self._change():
            wanted = self._running
            self._check_worker(name)
            if role not in ("prefill", "decode"):
                raise ConfigurationError(f"{role!r} is no role of a worker: prefill or decode")
            if role != "decode" and wanted.workers[name] == "decode" and wanted.count("decode") == 1:
                raise ConfigurationError(
                    f"{name} is the only decode worker: add one first (`kvferry scale --decode 2`)"
                )
            await self._want(wanted.with_role(name, role))

    async def down(self) -> None:
        """Ends everything, and forgets it. What runs is told so at once, also what a controller that was lost has left behind.

        Raises NoWorker if that cannot be known.
        """
        async with self._change():
            self._wanted = None
            await asyncio.to_thread(_internal_kv_del, KEY, namespace=self._namespace.encode())
            for seat in self._seats.values():
                seat.leave(is_hurried=True)
            while self._seats:
                await self._bell.wait()
            try:
                left = [await find_program(name, self._namespace) for name in await program_names(self._namespace)]
            except RayError as error:
                raise NoWorker(f"Ray does not say what still runs: {why_dead(error)}; try again") from error
            async with asyncio.TaskGroup() as group:
                for actor in left:
                    if actor is not None:
                        group.create_task(stop_and_end(actor))
            await self._reservations.give_up_all()

    async def retire(self) -> None:
        """Ends this controller if nothing is wanted: what anybody wants from now on, he hears in time that it was lost."""
        async with self._change():
            if self._wanted is None:
                await asyncio.to_thread(ray.kill, ray.get_runtime_context().current_actor)
                await asyncio.Event().wait()

    async def status(self, known_version: int = 0) -> dict[str, Any]:
        """Once it is another than that, or after a while."""
        await self._adopted.wait()
        if self._version <= known_version:
            await self._bell.wait(STATUS_S)
        wanted = self._wanted
        context = ray.get_runtime_context()
        return {
            "version": self._version,
            "namespace": self._namespace,
            "is_wanted": wanted is not None,
            "model": wanted.plan.model if wanted else "",
            "grace_s": wanted.plan.grace_s if wanted else 0.0,
            "wanted": {role: wanted.count(role) if wanted else 0 for role in ("prefill", "decode")},
            "controller": {
                "node_id": context.get_node_id(),
                "address": ray.util.get_node_ip_address(),
                "pid": os.getpid(),
                "private_bytes": self._memory.private_bytes,
            },
            "programs": [seat.as_dict() for seat in self._seats.values()],
        }

    # ------------------------------------------------------------------------------------------------------ what wants

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """One after the other, and none before what runs is known."""
        await self._adopted.wait()
        async with self._changing:
            yield

    @property
    def _running(self) -> Wanted:
        if self._wanted is None:
            raise ConfigurationError("no deployment runs here: start one with `kvferry up --on ray`")
        return self._wanted

    @property
    def _routers(self) -> dict[str, str]:
        """Where they are, by name."""
        return self._wanted.routers if self._wanted else {}

    @property
    def _roles(self) -> dict[str, str]:
        """Of all that is wanted, by name."""
        return self._wanted.roles if self._wanted else {}

    def _check_worker(self, name: str) -> None:
        if name not in self._running.workers:
            raise ConfigurationError(f"no worker {name!r}; there are {', '.join(self._running.workers)}")

    def _scaled(self, num_prefill: int, num_decode: int) -> Wanted:
        homeless = self._roles.keys() - self._reservations.names
        return self._running.scaled("prefill", num_prefill, homeless).scaled("decode", num_decode, homeless)

    async def _want(self, wanted: Wanted) -> None:
        """Raises ConfigurationError if the cluster has not the room; then nothing has changed. To want less is always granted."""
        if wanted.roles.keys() - self._roles.keys():
            lacking = await self._reservations.reserve(bundles_of(wanted))
            if lacking:
                raise ConfigurationError(lacking)
        await self._keep(wanted)
        self._fill_seats()

    async def _keep(self, wanted: Wanted) -> None:
        self._wanted = wanted
        await asyncio.to_thread(_internal_kv_put, KEY, wanted.to_json(), True, namespace=self._namespace.encode())

    def _fill_seats(self) -> None:
        """A seat for every name, none for any other."""
        roles = self._roles
        for name, seat in self._seats.items():
            if name not in roles:
                seat.leave()
            elif not seat.is_leaving and seat.role != roles[name]:
                seat.change(roles[name])
        for name, role in roles.items():
            if name not in self._seats:
                assert self._wanted is not None
                seat = self._seats[name] = Seat(name, role, self._surroundings(self._wanted))
                self._starting.append(seat)
        self._seats_bell.ring()
        self._changed()

    def _surroundings(self, wanted: Wanted) -> Surroundings:
        return Surroundings(self._namespace, wanted.secret, self._room, self._has_room, self._ask, self._seat_changed)

    def _changed(self) -> None:
        self._version += 1
        self._bell.ring()

    # ---------------------------------------------------------------------------------------------------- what seats ask

    def _seat_changed(self, seat: Seat) -> None:
        self._changed()
        details = seat.status.details
        wanted = self._wanted
        if (
            seat.role != "router"
            or seat.status.state != "listening"
            or wanted is None
            or seat.name not in wanted.routers
        ):
            return
        if wanted.routers[seat.name] != details["registry"]:
            ports = [int(details[name].rpartition(":")[2]) for name in ("http", "grpc", "registry")]
            self._wanted = wanted.with_router(seat.name, details["registry"], ports)
            self._moved.ring()

    async def _room(self, seat: Seat) -> Reservation | None:
        """Sought again and again: nodes come, and what leaves has left in the end."""
        now = asyncio.get_running_loop().time
        while not seat.is_leaving:
            reservation = await self._reservations.standing(seat.name)
            if reservation is not None:
                return reservation
            async with self._seeking:
                if now() >= self._sought_at + SEEK_S:
                    self._lacking = await self._reservations.reserve_some(bundles_of(self._running))
                    self._sought_at = now()
            if seat.name not in self._reservations.names:
                seat.lacks_room(self._lacking or "its room is that of a program that has not left yet")
                await self._bell.wait(self._sought_at + SEEK_S - now())
        return None

    async def _has_room(self, seat: Seat) -> bool:
        return await self._reservations.standing(seat.name) is not None

    def _ask(self, seat: Seat) -> Asked | None:
        """A worker begins when it is known where routers are; they need not be there yet."""
        wanted = self._running
        host = "127.0.0.1" if wanted.is_loopback else seat.status.node["address"]
        own = [f"--name={seat.name}", f"--host={host}"]
        if seat.role == "router":
            ports = zip(("port", "grpc-port", "registry-port"), wanted.ports_of(seat.name), strict=True)
            return Asked("router", [*wanted.plan.flags("router"), *own, *(f"--{name}={port}" for name, port in ports)])
        if not all(wanted.routers.values()):
            return None
        routers = [f"--router={address}" for address in wanted.routers.values()]
        return Asked(seat.role, [*wanted.plan.flags(seat.role), *own, *routers])


def with_routers(plan: ClusterPlan, nodes: list[ClusterNode]) -> ClusterPlan:
    """As many as there are addresses for them, if one shall be on each. Raises ConfigurationError."""
    if not plan.router.each:
        return plan
    labels = Bundle("a router", {}, plan.router.labels)
    addresses = {node.address for node in nodes if not why_not(labels, node.room({}), {})}
    if not addresses:
        raise ConfigurationError(
            f"router.each: no node has the labels {plan.router.labels}: mend them in the deployment file"
        )
    return plan.model_copy(update={"router": plan.router.model_copy(update={"count": len(addresses)})})


def _machine_of(plan: ClusterPlan, nodes: list[ClusterNode]) -> str:
    """The only one that it may use; empty: any. Raises ConfigurationError if there are more and nothing to tell them apart by."""
    if plan.tls is not None:
        return ""
    if are_one_machine(nodes):
        return nodes[0].machine
    raise ConfigurationError(
        f"the cluster has nodes on {len({node.address for node in nodes})} addresses: what listens beyond loopback needs TLS. "
        "Name each node's files in the deployment file: tls: {certificate: PATH, key: PATH, authority: PATH}"
    )

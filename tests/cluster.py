"""Several routers over the same workers in one event loop, over a network that can be slow or lose a message.

What is checked while it runs (a token of an attempt that is over is never taken, an opening has exactly what was emitted, a draining
worker gets nothing new) is checked at the routers' own doors.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from decode_worker.worker import DecodeWorker
from kvferry.engine.engine import fake_engine
from kvferry.engine.plan import Plan, StepResult
from kvferry.inprocess import Network
from kvferry.messages import (
    RequestOpen,
    StepOutput,
    WorkerDescription,
    WorkerProgress,
)
from kvferry.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker
from router.dispatcher import Dispatcher, DispatchLimits
from router.index import NUM_SHARDS, PrefixIndex, keys_of
from router.members import Member, Members
from tests.in_process import BLOCK, Node, NumberText, VirtualExecutor

DRAIN_IS_KNOWN_S = 1.5
"""After so long, every router that hears from the worker knows that it drains."""


class PacedExecutor(VirtualExecutor):
    """`slowness` multiplies what a step takes. While `hang` is clear, no step begins."""

    slowness = 1.0

    async def execute(self, plan: Plan) -> StepResult:
        await self.hang.wait()
        await asyncio.sleep((self.slowness - 1) * (self._base_s + self._s_per_token * plan.num_tokens))
        result = await super().execute(plan)
        self.plans.clear()
        return result


# ------------------------------------------------------------------------------------------------------------ the network


class FaultyNetwork(Network):
    """`delays_s`: what a message to or from that address takes. `losses`: messages that get lost, by kind and worker."""

    def __init__(self, group: asyncio.TaskGroup, seed: object = 0):
        super().__init__(group)
        self.observe: Callable[[str, Any], None] = lambda address, message: None
        """Called with each message that is sent or received, and where it goes to or comes from."""
        self.delays_s: dict[str, float] = {}
        self.losses: Counter[tuple[str, str]] = Counter()
        self.num_lost: Counter[str] = Counter()
        self._rng = random.Random(f"network {seed}")

    def _dial(self, method: str, address: str) -> Any:
        return _FaultyStream(super()._dial(method, address), self, address)

    async def pass_time(self, address: str) -> None:
        delay_s = self.delays_s.get(address, 0.0)
        if delay_s:
            await asyncio.sleep(delay_s * self._rng.random())

    def loses(self, kind: str, worker: str) -> bool:
        if not self.losses[kind, worker]:
            return False
        self.losses[kind, worker] -= 1
        self.num_lost[kind] += 1
        return True


class _FaultyStream:
    """The dialling side's end of a stream."""

    def __init__(self, stream: Any, network: FaultyNetwork, address: str):
        self._stream, self._network, self._worker = stream, network, address

    async def send(self, message: Any) -> None:
        if isinstance(message, WorkerDescription):
            self._worker = message.worker_id
        if isinstance(message, WorkerProgress):
            has_events = (message.sealed_block_ids or message.evicted_block_ids) and not message.is_snapshot
            if has_events and self._network.loses("events", self._worker):
                return
        await self._network.pass_time(self._worker)
        self._network.observe(f"to {self._worker}", message)
        await self._stream.send(message)

    async def receive(self) -> Any:
        message = await self._stream.receive()
        await self._network.pass_time(self._worker)
        self._network.observe(f"from {self._worker}", message)
        if isinstance(message, StepOutput) and message.tokens and self._network.loses("token", self._worker):
            return replace(message, tokens=message.tokens[1:])
        return message

    def close(self) -> None:
        self._stream.close()


class _Door:
    """A router's dialer: what it tells decode workers is looked at."""

    def __init__(self, cluster: "Cluster", router: "Router"):
        self._cluster, self._router = cluster, router

    def attach(self, address: str) -> Any:
        return _WatchedStream(self._cluster.network.attach(address), self._cluster, self._router, address)


class _WatchedStream:
    def __init__(self, stream: Any, cluster: "Cluster", router: "Router", address: str):
        self._stream, self._cluster, self._router, self._address = stream, cluster, router, address
        self.receive, self.close = stream.receive, stream.close

    async def send(self, message: Any) -> None:
        if isinstance(message, RequestOpen):
            self._check_opening(message)
        await self._stream.send(message)

    def _check_opening(self, opening: RequestOpen) -> None:
        self._router.num_opened[self._address] += 1
        live = self._router.dispatcher._lives.get(opening.number)
        if live is None or live.journal.attempt != opening.attempt:
            return  # it has ended meanwhile, or goes on elsewhere
        starts = {start.choice: list(start.emitted_tokens) for start in opening.choices}
        emitted = {choice.choice: choice.tokens for choice in live.journal.choices}
        for number, tokens in starts.items():
            self._cluster.check(tokens == emitted[number], f"an opening has other tokens than were emitted: {opening}")
        unfinished = {choice.choice for choice in live.journal.choices if choice.finish is None}
        self._cluster.check(unfinished <= starts.keys(), f"an opening forgets a choice: {opening}")


# ------------------------------------------------------------------------------------------------------------ the cluster


class Router:
    """Members, dispatcher and the task that they run in. Each output that it hears is checked for what is over."""

    def __init__(self, cluster: "Cluster", name: str, limits: DispatchLimits):
        self.name, self._cluster = name, cluster
        text = NumberText()
        self.index = PrefixIndex()
        self.members = Members(name, text.sizes, self.index)
        cluster.network.listen(name, self.members)
        self.dispatcher: Dispatcher = Dispatcher(text, self.members, _Door(cluster, self), limits)  # type: ignore[arg-type]
        self.num_opened: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.dispatcher.observe = lambda live: self.ends.update([live.number])
        self._hear = self.dispatcher.output
        self.dispatcher.output = self._output  # type: ignore[method-assign]
        self.task = cluster.group.create_task(self.dispatcher.run())

    def _output(self, member: Member, output: StepOutput) -> None:
        over = [new for new in output.tokens if self._is_over(member, new.number, new.attempt)]
        before = [self._num_tokens(new.number, new.choice) for new in over]
        self._hear(member, output)
        for new, num_tokens in zip(over, before, strict=True):
            now = self._num_tokens(new.number, new.choice)
            self._cluster.check(now in (num_tokens, None), f"a token of an attempt that is over was taken: {new}")

    def _is_over(self, member: Member, number: int, attempt: int) -> bool:
        live, placed = self.dispatcher._lives.get(number), self.dispatcher._placed.get(number)
        return live is not None and (live.journal.attempt != attempt or placed is None or placed[0] is not member)

    def _num_tokens(self, number: int, choice: int) -> int | None:
        live = self.dispatcher._lives.get(number)
        return None if live is None else len(live.journal.choices[choice].tokens)

    def indexed_keys(self, row: int) -> set[int]:
        shards = (self.index._shards[number] for number in range(NUM_SHARDS))
        return {key for shard in shards for key, holders in shard.items() if holders >> row & 1}


@dataclass
class Cluster:
    group: asyncio.TaskGroup
    network: FaultyNetwork
    routers: list[Router] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """What was found while it ran; told at the end, as an error in the product's own task would be handled there."""

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.broken.append(what)

    def add_router(self, limits: DispatchLimits) -> Router:
        self.routers.append(Router(self, f"router{len(self.routers) + 1}", limits))
        return self.routers[-1]

    def start(self, name: str, life: int = 1, *, num_slots: int = 400, step: Any = None, **settings: Any) -> Node:
        engine = settings.pop("engine", None) or fake_engine(num_slots, BLOCK)
        executor = PacedExecutor(engine.runner, **(step or {}))
        kind = PrefillWorker if name.startswith("p") else DecodeWorker
        addresses = tuple(router.name for router in self.routers)
        worker = kind(
            engine, executor, self.network, WorkerSettings(name, name, f"{name}-{life}", addresses, **settings)
        )
        self.network.listen(name, worker)
        self.nodes[name] = Node(worker, executor, self.group.create_task(worker.run()), engine)
        return self.nodes[name]

    async def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        self.network.kill(name)
        node.task.cancel()
        await asyncio.wait((node.task,))

    async def kill_router(self, router: Router) -> None:
        self.routers.remove(router)
        self.network.kill(router.name)
        router.task.cancel()
        await asyncio.wait((router.task,))

    async def ready(self, *names: str) -> None:
        async with asyncio.timeout(60):
            while not all(self._is_ready(router, name) for router in self.routers for name in names or self.nodes):
                await asyncio.sleep(0.05)

    def _is_ready(self, router: Router, name: str) -> bool:
        member = router.members.get(name)
        life = self.nodes[name].worker.body.settings.incarnation
        if member is None or member.description.incarnation != life:
            return False
        return member.is_attached

    async def quiet(self) -> None:
        """Waits until nothing runs, then checks that nobody holds anything, and that each router knows what is true."""
        await asyncio.sleep(3.0)
        assert not self.broken, self.broken
        for name, node in self.nodes.items():
            audit = node.worker.body.pool.audit()
            assert audit.is_clean, (name, audit)
            assert audit.counts.num_live == audit.counts.num_filling == 0, (name, audit)
            load = node.worker.load()
            assert load.num_waiting == load.num_fetching == load.num_running == load.num_serving == 0, (name, load)
            assert load.kv_tokens == load.counters["leaked_slots"] == 0, (name, load)
        for router in self.routers:
            self._check_router(router)

    def _check_router(self, router: Router) -> None:
        dispatcher, members, view = router.dispatcher, router.members, router.members.view
        assert not dispatcher.lives
        assert not dispatcher._placed
        assert not dispatcher._num_prefilling
        assert dispatcher._apart.is_idle
        assert not dispatcher._keys._entries
        queue = dispatcher._queue
        assert len(queue) == queue.num_tokens == queue.num_bytes == 0
        assert set(router.ends.values()) <= {1}, "each request ends once"
        counters = dispatcher.counters
        num_ended = counters["finished"] + counters["failed"] + counters["cancelled"]
        assert counters["accepted"] == len(router.ends) == num_ended, counters
        assert sorted(member.worker_id for member in members) == sorted(self.nodes)
        no_blocks = np.zeros(view.num_rows, np.int64)
        columns = view.columns(BLOCK, no_blocks, asyncio.get_running_loop().time())
        for member in members:
            assert member.num_active == member.active_tokens == 0, (member.worker_id, member.num_active)
            assert not member.is_alone
            for name in ("num_active", "active_tokens", "waiting_tokens"):
                assert getattr(columns, name)[member.row] == 0, (member.worker_id, name)
            held = set(keys_of(self.nodes[member.worker_id].worker.body.pool.announced_block_ids()))
            indexed = router.indexed_keys(member.row)
            assert indexed == held, (router.name, member.worker_id, len(indexed - held), len(held - indexed))
        rows = {member.row for member in members}
        assert len(rows) == len(self.nodes)
        assert not router.index.is_sweeping
        assert sorted({*view._free, *rows}) == list(range(64)), "each row is a worker's or free"
        assert len(view._free) + len(rows) == 64
        strangers = [row for row in range(view.num_rows) if row not in rows and router.indexed_keys(row)]
        assert not strangers, "nobody holds anything who is not here"

    async def stop(self) -> None:
        for node in self.nodes.values():
            node.task.cancel()
        for router in self.routers:
            router.task.cancel()
        for link in list(self.network.links):
            link.client.close()


@contextlib.asynccontextmanager
async def cluster(num_routers: int, limits: DispatchLimits, seed: object = 0) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as links, asyncio.TaskGroup() as group:
        made = Cluster(group, FaultyNetwork(links, seed))
        for _ in range(num_routers):
            made.add_router(limits)
        yield made
        await made.stop()

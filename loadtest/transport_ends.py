"""The two ends of `kvferry bench transport`: real source and reader of the workers, over pools that no engine touches.

`SourceEnd` seals chains of random bytes and serves them; `ReaderEnd` fetches them into its own pool and copies the same bytes by
itself, for comparison. They run in two processes (`python -m loadtest.transport_ends` is the source), in one, or in two actors.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from kvferry.engine.plan import Plan, StepResult
from kvferry.engine.roofline import StepCosts
from kvferry.engine.sequence import Sequence
from kvferry.engine.torch_memory import TorchMemory
from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.pool import BlockPool
from kvferry.kv.road import Road, roads_called
from kvferry.messages import FetchDown, FetchOpen, FetchUp, Source
from kvferry.process import run_process
from kvferry.rpc.links import GrpcDialer, add_fetch_service, bind, new_server
from kvferry.streams import Dialer, Stream
from kvferry.worker import digests as digests_module
from kvferry.worker import reader as reader_module
from kvferry.worker.allocation import keep_freed_memory
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.loop import EngineLoop
from kvferry.worker.meeting import Meetings
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.reader import BlockReader, FetchReport
from kvferry.worker.source import BlockSource, SourceIdentity

SECRET = "bench"
MODEL_ID, FIDELITY = "bench", "float32"
NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 30, 3, 64, 16
BARE_METHOD = "/kvferry.bench/Bare"
"""A stream of messages of a given size and nothing else: what the gRPC road is compared with."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is moved: a chain of so many blocks of SmolLM2's shape."""

    name: str
    num_blocks: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(range(self.num_blocks, self.num_blocks + self.num_blocks * BLOCK_SIZE))


SIZES = (Size("1,024 tokens", 64), Size("synthetic 256 MB", 348))


POOL_BLOCKS = 3_750
"""The source's, as a worker's of 60,000 tokens: the largest frame is a part of a pool. Pages that nobody writes are not there."""


class IdleScheduler:
    """Nothing is ever computed."""

    is_idle = True

    def plan(self, step: int, now: float) -> Plan | None:
        del step, now
        return None

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        raise AssertionError("nothing was planned")

    def next_deadline(self) -> float | None:
        return None


class IdleExecutor:
    async def execute(self, plan: Plan) -> StepResult:
        raise AssertionError(f"nothing was planned, but {plan.step}")

    def close(self) -> None:
        """Nothing runs."""


def make_memory(num_slots: int) -> TorchMemory:
    return TorchMemory(num_slots, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)


def idle_loop(pool: BlockPool, counters: Counters) -> EngineLoop:
    return EngineLoop(IdleScheduler(), IdleExecutor(), pool, counters, StepCosts(1.0, 1.0, 1.0, 1.0, 1.0))


class NewDigests(BlockDigests):
    """Of blocks that are sent for the first time, each time."""

    def of(self, block_ids: ListOf[bytes], slots: ListOf[int]) -> list[bytes]:
        self._kept.clear()
        return super().of(block_ids, slots)


class SourceEnd:
    """All sizes' chains, sealed, in one pool."""

    def __init__(self, roads: ListOf[Road], keeps_digests: bool = False):
        """`keeps_digests`: as a worker does with what it sends again, or has received."""
        num_slots = POOL_BLOCKS
        self.memory, self.pool = make_memory(num_slots), BlockPool(num_slots)
        rng, root = np.random.default_rng(7), chain_root(MODEL_ID, FIDELITY, b"")
        hold = self.pool.open_hold("bench")
        hold.reserve(sum(size.num_blocks for size in SIZES))
        for size in SIZES:
            parent = root
            for block_id in chain(root, size.tokens, BLOCK_SIZE):
                slot = hold.take()
                np.frombuffer(self.memory.view(slot), np.uint8)[:] = rng.integers(
                    0, 256, self.memory.format.block_bytes, np.uint8
                )
                hold.seal(slot, block_id, parent)
                parent = block_id
        hold.close()  # nothing is ever evicted: nobody asks for room
        counters = Counters()
        self.loop = idle_loop(self.pool, counters)
        identity = SourceIdentity(MODEL_ID, FIDELITY, f"bench-{os.getpid()}", 10**9)
        digests = (BlockDigests if keeps_digests else NewDigests)(self.pool, self.memory)
        self.source = BlockSource(identity, self.pool, self.memory, digests, self.loop, counters, roads)

    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None:
        await self.source.serve_fetch(stream)

    def blocks_of(self, size: Size) -> list[memoryview]:
        ids = chain(chain_root(MODEL_ID, FIDELITY, b""), size.tokens, BLOCK_SIZE)
        return [self.memory.view(slot) for id_ in ids if (slot := self.pool.slot_of(id_)) is not None]

    async def serve(self, on_address: Any) -> None:
        """Over gRPC, until cancelled; with the bare stream beside."""
        server = new_server(self.memory.format.block_bytes)
        add_fetch_service(server, self, SECRET)
        handler = grpc.stream_stream_rpc_method_handler(serve_bare)
        service, method = BARE_METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        on_address(f"127.0.0.1:{port}")
        await self.loop.run()


async def serve_bare(request_iterator: Any, context: Any) -> None:
    del request_iterator
    num_messages, size = (int(word) for word in (await context.read()).split())
    message = os.urandom(size)
    for _ in range(num_messages):
        await context.write(message)


class ReaderEnd:
    """Fetches every size into one pool."""

    def __init__(self, dialer: Dialer, roads: ListOf[Road]):
        num_slots = max(size.num_blocks for size in SIZES) + 1
        self.memory, self.pool = make_memory(num_slots), BlockPool(num_slots)
        for slot in range(num_slots + 1):
            self.memory.view(slot)[:] = bytes(self.memory.format.block_bytes)  # its pages are there
        meetings = Meetings(dialer, self.memory.format, roads, MODEL_ID, FIDELITY, 3.0)
        self.counters = Counters()
        digests = BlockDigests(self.pool, self.memory)
        self.reader = BlockReader(dialer, self.memory, digests, meetings, self.counters, FetchBudgets())
        self._root = chain_root(MODEL_ID, FIDELITY, b"")
        self._other = np.frombuffer(make_memory(num_slots)._bytes, np.uint8)
        self._other[:] = 7

    @property
    def block_bytes(self) -> int:
        return self.memory.format.block_bytes

    def frame_bytes(self, road: Road) -> int:
        """Of a road's full frame."""
        return max(road.frame_bytes // self.block_bytes, 1) * self.block_bytes

    async def fetch(self, address: str, size: Size) -> float:
        """Seconds from the opening to the last block sealed, with the meeting behind it."""
        sequence = Sequence(1, list(size.tokens), self._root, BLOCK_SIZE, self.pool)
        sequence.start(len(size.tokens), 0)
        opening = FetchOpen(MODEL_ID, FIDELITY, size.tokens)
        try:
            began = time.perf_counter()
            report = FetchReport(asyncio.get_running_loop().time(), Source("source", address))
            await self.reader.fetch(sequence, opening, report)
            seconds = time.perf_counter() - began
            assert sequence.num_sealed_blocks == size.num_blocks
        finally:
            sequence.stop()
            self.pool.evict_all()
        return seconds

    def copy(self, size: Size) -> float:
        """Seconds of one plain copy of as many bytes, in one piece.

        The second of two: the first finds what a fetch by two threads left in both cores' caches, which doubles its time, and would
        flatter the road.
        """
        num_bytes = size.num_blocks * self.memory.format.block_bytes
        target = np.frombuffer(self._slots(size), np.uint8)
        np.copyto(target, self._other[:num_bytes])
        began = time.perf_counter()
        np.copyto(target, self._other[:num_bytes])
        return time.perf_counter() - began

    def _slots(self, size: Size) -> memoryview:
        first, last = self.memory.view(1), self.memory.format.block_bytes * (size.num_blocks + 1)
        return memoryview(first.obj).cast("B")[len(first) : last]


async def bare_stream(dialer: GrpcDialer, address: str, num_bytes: int, message_bytes: int) -> float:
    """Seconds that as many bytes take through a bare grpc.aio stream of messages of that size, both ends doing nothing with them."""
    call = dialer.channel(address).stream_stream(BARE_METHOD)()
    left, began = num_bytes, time.perf_counter()
    await call.write(f"{-(-num_bytes // message_bytes)} {message_bytes}".encode())
    while left > 0:
        message: Any = await call.read()
        left -= len(message)
    seconds = time.perf_counter() - began
    call.cancel()
    return seconds


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """This process takes no digest and checks none: what the digests cost is what this saves. Nowhere but in this measurement."""
    kept = (digests_module.block_digest, reader_module.check_block)
    digests_module.block_digest = lambda block_id, block: bytes(16)
    reader_module.check_block = lambda block, copy: None
    try:
        yield
    finally:
        digests_module.block_digest, reader_module.check_block = kept


async def _serve(road: str, mode: str = "new") -> None:
    with unchecked() if mode == "unchecked" else contextlib.nullcontext():
        await SourceEnd(roads_called(road), mode == "again").serve(lambda address: print(address, flush=True))


def main() -> None:
    """The source as a process of its own: says its address, ends with its parent.

    Second argument: `again` keeps digests from one fetch to the next, `unchecked` takes none.
    """
    keep_freed_memory()
    run_process(_serve(*sys.argv[1:3]), with_parent=True)


if __name__ == "__main__":
    main()

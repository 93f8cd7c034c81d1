"""Frames through real gRPC on loopback: their size whatever the prompt, what a reader that does not acknowledge costs (T017), and
a source that cannot begin to send (T009). A fake model whose blocks are as large as a real one's."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from grpc import aio

from kvferry.engine.engine import Engine, fake_engine
from kvferry.engine.fake import BytesMemory, FakeRunner, kv_of
from kvferry.engine.sequence import Sequence
from kvferry.errors import FetchFailed
from kvferry.kv.block_id import chain_root
from kvferry.kv.frame import MAX_HEADER_BYTES
from kvferry.kv.pool import BlockPool
from kvferry.kv.road import MIB, Road, known_roads
from kvferry.messages import FetchAck, FetchEnd, FetchMeet, FetchOffers, FetchOpen, Frame, Source
from kvferry.rpc.frame_wire import fetch_down_from_bytes, fetch_up_to_bytes
from kvferry.rpc.links import (
    FETCH_METHOD,
    MIN_MESSAGE_BYTES,
    SECRET_KEY,
    GrpcDialer,
    add_fetch_service,
    bind,
    new_server,
)
from kvferry.worker import source
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.loop import ThreadExecutor
from kvferry.worker.meeting import Meetings
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.reader import BlockReader, FetchReport
from kvferry.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker
from tests.processes.proxy import Proxy

BLOCK = 16
SECRET = "cluster"
GRPC = known_roads()["grpc"]
REAL_BLOCK_BYTES = BLOCK * 2 * 30 * 3 * 64 * 4
"""SmolLM2-135M's, in float32: 4 MiB are passed near 91 tokens."""
LARGEST = GRPC.frame_bytes + MAX_HEADER_BYTES
"""Of a frame with more than one block."""


class WideMemory(BytesMemory):
    """Blocks of any size: the fake model's bytes, and random ones after them."""

    def __init__(self, num_slots: int, block_bytes: int):
        super().__init__(0, BLOCK)
        shape = (1, 1, 1, BLOCK, block_bytes // BLOCK)
        self.format = replace(self.format, shape=shape, block_bytes=block_bytes)
        self.num_slots, self.address = num_slots, None
        self._bytes = memoryview(bytearray(random.Random(17).randbytes(block_bytes) * (num_slots + 1)))


def engine_of(num_slots: int, block_bytes: int) -> Engine:
    engine, memory = fake_engine(num_slots, BLOCK), WideMemory(num_slots, block_bytes)
    identity = replace(engine.identity, block_bytes=block_bytes)
    return replace(engine, identity=identity, memory=memory, runner=FakeRunner(memory))


@dataclass
class Served:
    worker: PrefillWorker
    address: str

    async def fetch(self, tokens: list[int], reader: "Reader") -> FetchReport:
        return await reader.fetch(tokens, Source("p1", self.address))


@contextlib.asynccontextmanager
async def serving(num_slots: int, block_bytes: int, road: Road = GRPC) -> AsyncIterator[Served]:
    engine = engine_of(num_slots, block_bytes)
    dialer, server = GrpcDialer(SECRET, block_bytes), new_server(block_bytes)
    settings = WorkerSettings("p1", "p1", "p1-1", (), roads=(road,))
    worker = PrefillWorker(engine, ThreadExecutor(engine.runner), dialer, settings)
    add_fetch_service(server, worker, SECRET)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    running = asyncio.ensure_future(worker.run())
    try:
        yield Served(worker, address)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await server.stop(0)
        await dialer.close()


class Reader:
    """A worker's reader with a pool of its own."""

    def __init__(self, num_slots: int, block_bytes: int, road: Road = GRPC):
        self.memory, self.pool, self.counters = WideMemory(num_slots, block_bytes), BlockPool(num_slots), Counters()
        self._dialer = GrpcDialer(SECRET, block_bytes)
        self._meetings = Meetings(self._dialer, self.memory.format, (road,), "fake-1000", "uint8", 3.0)
        digests = BlockDigests(self.pool, self.memory)
        self._reader = BlockReader(self._dialer, self.memory, digests, self._meetings, self.counters, FetchBudgets())

    async def fetch(self, tokens: list[int], source: Source) -> FetchReport:
        """Everything that was sealed is found to be true, also where the fetch fails."""
        sequence = Sequence(1, tokens, chain_root("fake-1000", "uint8"), BLOCK, self.pool)
        sequence.start(len(tokens), max_adopted=0)
        report = FetchReport(asyncio.get_running_loop().time(), source)
        try:
            await self._reader.fetch(sequence, FetchOpen("fake-1000", "uint8", tuple(tokens)), report)
            assert sequence.num_sealed_blocks == len(tokens) // BLOCK
        finally:
            previous, at = b"", 0
            for slot in sequence.slots:
                content = b""
                for token in tokens[at : at + BLOCK]:
                    previous = kv_of(previous, token)
                    content += previous
                assert self.memory.view(slot)[: len(content)] == content
                at += BLOCK
            sequence.stop()
            self.pool.evict_all()
        return report

    async def close(self) -> None:
        await self._dialer.close()


def tokens_of(num_blocks: int, seed: object = 1) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(1000) for k in range(num_blocks * BLOCK)]


class PlainCall:
    """A fetch through grpc's own client with its own limits; knows the size of each message."""

    def __init__(self, channel: aio.Channel):
        self._call: Any = channel.stream_stream(FETCH_METHOD)(metadata=((SECRET_KEY, SECRET),))
        self.sizes: list[int] = []

    async def send(self, message: Any) -> None:
        await self._call.write(fetch_up_to_bytes(message))

    async def receive(self) -> Any:
        raw = await self._call.read()
        self.sizes.append(len(raw))
        return fetch_down_from_bytes(raw)

    async def frame_or_end(self) -> Frame | FetchEnd:
        while not isinstance(message := await self.receive(), Frame | FetchEnd):
            pass
        return message

    def close(self) -> None:
        self._call.cancel()


async def opened(channel: aio.Channel, tokens: list[int]) -> PlainCall:
    meeting = PlainCall(channel)
    await meeting.send(FetchMeet("fake-1000", "uint8"))
    offers = await meeting.receive()
    meeting.close()
    assert isinstance(offers, FetchOffers)
    call = PlainCall(channel)
    opening = FetchOpen("fake-1000", "uint8", tuple(tokens), road="grpc", ticket=bytes(16))
    await call.send(replace(opening, incarnation=offers.incarnation))
    return call


def channel_to(served: Served) -> aio.Channel:
    """With grpc's own options, but for the size of a message."""
    return aio.insecure_channel(served.address, options=[("grpc.max_receive_message_length", LARGEST)])


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 11, 12, 124])
async def test_messages_have_a_bound_that_both_ends_exceed_however_long_the_prompt(num_blocks):
    """Of 80, 90 to 92, 100, 181 to 183, 200 and 2000 tokens, with a real model's blocks."""
    assert LARGEST < MIN_MESSAGE_BYTES
    async with asyncio.timeout(30), serving(num_blocks, REAL_BLOCK_BYTES) as served, channel_to(served) as channel:
        call, num_bytes, num_frames = await opened(channel, tokens_of(num_blocks)), 0, 0
        while isinstance(message := await call.frame_or_end(), Frame):
            num_bytes, num_frames = num_bytes + len(message.payload), num_frames + 1
            await call.send(FetchAck(message.frame_number))
        call.close()
        assert message.first_missing_block == num_blocks
        assert num_bytes == num_blocks * REAL_BLOCK_BYTES
        assert num_frames >= num_bytes / LARGEST
        assert max(call.sizes) <= LARGEST


async def test_a_reader_that_acknowledges_nothing_has_two_frames_of_a_long_prompt_and_holds_no_more():
    async with asyncio.timeout(30), serving(60, REAL_BLOCK_BYTES) as served, channel_to(served) as channel:
        pool = served.worker.body.pool
        call = await opened(channel, tokens_of(60))
        frames = [await call.frame_or_end() for _ in range(2)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await call.frame_or_end()
        num_blocks = sum(len(frame.payload) for frame in frames if isinstance(frame, Frame)) // REAL_BLOCK_BYTES
        assert num_blocks <= 2 * (LARGEST // REAL_BLOCK_BYTES)
        assert pool.counts.num_live == num_blocks
        call.close()
        async with asyncio.timeout(2):
            while pool.counts.num_live:
                await asyncio.sleep(0.01)


async def test_a_reader_that_stops_reading_keeps_no_blocks_from_others(monkeypatch):
    """Its kernel and its grpc take what they have room for, and answer pings."""
    monkeypatch.setattr(source, "READER_TIMEOUT_S", 0.5)
    async with asyncio.timeout(30), serving(10, 8 * MIB) as served, aio.insecure_channel(served.address) as channel:
        pool = served.worker.body.pool
        call = await opened(channel, tokens_of(10))
        async with asyncio.timeout(10):
            while not pool.counts.num_live:
                await asyncio.sleep(0.01)
            while pool.counts.num_live:
                await asyncio.sleep(0.01)
        call.close()


EDGE = 4 * MIB
"""What grpc takes as a message unless it is told otherwise."""


@pytest.mark.parametrize(
    "block_bytes", [64 * 1024, MIB - 4096, MIB, MIB + 16, EDGE - 16, EDGE, 2 * EDGE, 2 * EDGE + 16, 17 * MIB]
)
async def test_blocks_of_any_size_arrive_on_either_side_of_grpcs_default_and_of_our_own_limits(block_bytes):
    """Frames just below, at and above 4 MiB and their own bound; single blocks above it, and above what our ends take at least."""
    num_blocks = max(4 * EDGE // block_bytes, 2) + 1
    reader = Reader(num_blocks, block_bytes)
    async with asyncio.timeout(30), serving(num_blocks, block_bytes) as served:
        report = await served.fetch(tokens_of(num_blocks), reader)
        assert report.num_blocks == num_blocks
        assert report.num_bytes == num_blocks * block_bytes
        async with asyncio.timeout(2):
            while served.worker.body.pool.counts.num_live:
                await asyncio.sleep(0.01)
    await reader.close()


class FullSource:
    """Every fifth fetch finds no room to send from."""

    offer = b""

    def __init__(self, road: Any, is_late: bool):
        self._road, self._is_late, self.num_opened = road, is_late, 0

    def open(self, ticket: bytes) -> Any:
        self.num_opened += 1
        if self.num_opened % 5:
            return self._road.open(ticket)
        if not self._is_late:
            raise OSError(28, "No space left on device")
        return self

    def load(self, slots: Any) -> Any:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_source_that_has_no_room_to_send_from_is_known_within_a_second_and_holds_nothing(is_late):
    """T009: one fetch in five; the next one is served."""
    road = replace(GRPC, lay=lambda memory: FullSource(GRPC.lay(memory), is_late))
    reader, outcomes = Reader(20, 1024), []
    async with asyncio.timeout(30), serving(60, 1024, road) as served:
        for number in range(20):
            began = time.monotonic()
            try:
                await served.fetch(tokens_of(10, number), reader)
                outcomes.append("")
            except FetchFailed as failed:
                outcomes.append(failed.kind)
            assert time.monotonic() - began < 1
        pool = served.worker.body.pool
        async with asyncio.timeout(2):
            while served.worker.load().num_serving or pool.counts.num_live or pool.counts.num_filling:
                await asyncio.sleep(0.01)
    await reader.close()
    assert outcomes.count("") >= 15
    assert len(outcomes) - outcomes.count("") >= 3
    assert set(outcomes) - {""} <= {"stream_ended", "unreachable", "source_error"}


async def test_a_slow_line_is_not_a_silent_source():
    """What the source shows of its progress waits behind its frames: they are as large as the line is fast."""
    num_blocks, reader = 14, Reader(14, REAL_BLOCK_BYTES)
    async with asyncio.timeout(40), serving(100, REAL_BLOCK_BYTES) as served:
        with Proxy().running() as proxy:
            proxy.target = int(served.address.rpartition(":")[2])
            source = Source("p1", f"127.0.0.1:{proxy.port}")
            await reader.fetch(tokens_of(1, "meet"), source)
            proxy.bytes_per_s = 1.8e6
            began = time.monotonic()
            report = await reader.fetch(tokens_of(num_blocks), source)
            assert report.num_blocks == num_blocks
            assert time.monotonic() - began > 3.5, "the line was not slow enough to show anything"
            proxy.bytes_per_s = None
        await reader.close()


async def test_a_line_too_slow_to_try_is_said_to_be(monkeypatch):
    reader = Reader(4, REAL_BLOCK_BYTES)
    monkeypatch.setattr(reader._meetings, "_silence_s", 0.5)
    async with asyncio.timeout(30), serving(4, REAL_BLOCK_BYTES) as served:
        with Proxy().running() as proxy:
            proxy.target, proxy.bytes_per_s = int(served.address.rpartition(":")[2]), 0.8e6
            with pytest.raises(
                FetchFailed, match=r"no road to p1 works: grpc: 1,474,560 bytes did not come within 0\.5 s"
            ):
                await reader.fetch(tokens_of(1, "meet"), Source("p1", f"127.0.0.1:{proxy.port}"))
            proxy.bytes_per_s = None
        await reader.close()


async def test_fetches_one_after_the_other_open_no_new_calls(monkeypatch):
    """Of several frames each, whose acknowledgements are on their way when the last block is there."""
    calls, serve_fetch = set[asyncio.Task[Any] | None](), PrefillWorker.serve_fetch

    async def counted(self: PrefillWorker, stream: Any) -> None:
        calls.add(asyncio.current_task())
        await serve_fetch(self, stream)

    monkeypatch.setattr(PrefillWorker, "serve_fetch", counted)
    async with serving(80, REAL_BLOCK_BYTES) as served:
        reader = Reader(40, REAL_BLOCK_BYTES)
        await served.fetch(tokens_of(30), reader)
        num_calls = len(calls)  # when the two have met, and while the call of that was not at rest yet
        for _ in range(12):
            await asyncio.sleep(0.05)  # until the source is done with it, too
            await served.fetch(tokens_of(30), reader)
        assert len(calls) == num_calls <= 2
        await reader.close()

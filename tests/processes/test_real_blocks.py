"""Blocks of a real model's size between two processes, one of which is killed or stopped while a frame is copied or written (T006, T036).

What arrived before is sealed and true, whatever was held is free again, and the next fetch has everything.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import psutil
import pytest

from kvferry.engine.sequence import Sequence
from kvferry.errors import FetchFailed
from kvferry.kv.block_id import chain_root
from kvferry.kv.road import roads_called
from kvferry.messages import FetchDown, FetchOpen, Frame
from kvferry.messages import Source as SourceAddress
from kvferry.rpc.links import GrpcDialer
from kvferry.worker import source as source_module
from kvferry.worker.reader import BlockReader, FetchReport
from loadtest.own_process import running
from loadtest.transport_ends import BLOCK_SIZE, FIDELITY, MODEL_ID, SECRET, SIZES, ReaderEnd, SourceEnd

pytestmark = [pytest.mark.processes, pytest.mark.beside]

LARGE = SIZES[-1]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RELEASED_S = 3.0
STOPPED_S = 10.0
"""A reader that is stopped is found by its silence: grpc's pings take up to eight seconds, a frame that is not acknowledged less here."""


def cases(*in_make_test: tuple[str, str]) -> pytest.MarkDecorator:
    """All of them in the soak."""
    every = [(road, fault) for road in ("shm", "grpc") for fault in SIGNALS]
    marks = {False: [pytest.mark.soak], True: []}
    return pytest.mark.parametrize(
        ("road", "fault"), [pytest.param(*case, marks=marks[case in in_make_test]) for case in every]
    )


@contextlib.contextmanager
def struck(process: asyncio.subprocess.Process, fault: str, when: Callable[[], bool]) -> Iterator[None]:
    """By a thread: the event loop may be busy with a frame."""
    is_over = threading.Event()

    def strike() -> None:
        while not when():
            if is_over.wait(1e-4):
                return
        os.kill(process.pid, SIGNALS[fault])

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@cache
def true_blocks() -> list[bytes]:
    """As a source makes them."""
    end = SourceEnd(roads_called("inproc"))
    return [bytes(block) for block in end.blocks_of(LARGE)]


class Fetching(ReaderEnd):
    async def fetched(self, address: str) -> int:
        """Blocks that were sealed, each of them true, also where the fetch fails."""
        sequence = Sequence(1, list(LARGE.tokens), chain_root(MODEL_ID, FIDELITY, b""), BLOCK_SIZE, self.pool)
        sequence.start(len(LARGE.tokens), 0)
        report = FetchReport(asyncio.get_running_loop().time(), SourceAddress("source", address))
        try:
            await self.reader.fetch(sequence, FetchOpen(MODEL_ID, FIDELITY, LARGE.tokens), report)
        finally:
            sealed = [self.pool.slot_of(id_) for id_ in sequence.block_ids[: sequence.num_sealed_blocks]]
            for slot, block in zip(sealed, true_blocks(), strict=False):
                assert slot is not None
                assert np.array_equal(np.frombuffer(self.memory.view(slot), np.uint8), np.frombuffer(block, np.uint8))
            self.num_sealed = len(sealed)
            sequence.stop()
            self.pool.evict_all()
            assert self.pool.counts.num_free == self.pool.num_slots
        return self.num_sealed


@contextlib.asynccontextmanager
async def source_and_reader(road: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, Fetching]]:
    """With the source's address."""
    dialer = GrpcDialer(SECRET)
    async with asyncio.timeout(60), running("loadtest.transport_ends", road) as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        yield process, address, Fetching(dialer, roads_called(road))
        await dialer.close()


KINDS = {"kill": ("stream_ended", "unreachable"), "stop": ("silent",)}
"""Of the failure. Of a killed one the stream's end may be heard of first, or it is met again in vain."""


@cases(("shm", "kill"))
async def test_a_source_that_is_lost_within_a_frame(road, fault):
    true_blocks()
    async with source_and_reader(road) as (process, address, reader):
        values, began = reader.counters.values, time.monotonic()
        with struck(process, fault, lambda: values["fetched_bytes"] > 0), pytest.raises(FetchFailed) as failed:
            await reader.fetched(address)
        assert time.monotonic() - began < 8
        assert failed.value.kind in KINDS[fault], failed.value.message
        assert 0 < reader.num_sealed < LARGE.num_blocks
    async with source_and_reader(road) as (_, address, reader):
        assert await reader.fetched(address) == LARGE.num_blocks


class Growth:
    """Of the memory of this process and of a child, at most, while it is watched."""

    def __init__(self, pid: int):
        self._processes, self._is_over = (psutil.Process(), psutil.Process(pid)), threading.Event()
        self._before, self.bytes = self._used(), [0, 0]

    def _used(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def _watch(self) -> None:
        while not self._is_over.wait(1e-3):
            grown = (now - before for now, before in zip(self._used(), self._before, strict=True))
            self.bytes = [max(most, more) for most, more in zip(self.bytes, grown, strict=True)]

    def __enter__(self) -> "Growth":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *of: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.parametrize("road", [pytest.param("shm", marks=pytest.mark.soak), "grpc"])
async def test_neither_end_has_more_in_memory_than_two_frames_beyond_its_pool(road, monkeypatch):
    """Of a chain of 256 MB, by a reader that is slow; the first fetch, of 47, has brought what stays: threads, buffers, pages of the pool.

    Frames are counted; what allocators and grpc have besides is only known to be far less than the chain.
    """
    receive, take_frame, here = BlockReader._receive, BlockReader._take_frame, list[int]()
    num_here = 0

    async def receive_counted(*arguments: Any, **options: Any) -> FetchDown:
        nonlocal num_here
        message = await receive(*arguments, **options)
        num_here += isinstance(message, Frame)
        here.append(num_here)
        return message

    async def take_late(*arguments: Any) -> None:
        nonlocal num_here
        await asyncio.sleep(0.05)
        await take_frame(*arguments)
        num_here -= 1

    async with source_and_reader(road) as (process, address, reader):
        await reader.fetch(address, SIZES[0])
        monkeypatch.setattr(BlockReader, "_receive", receive_counted)
        monkeypatch.setattr(BlockReader, "_take_frame", take_late)
        with Growth(process.pid) as growth:
            await reader.fetch(address, LARGE)
    assert max(here) == 2
    assert max(growth.bytes) < LARGE.num_blocks * reader.block_bytes / 2


@cases(("grpc", "kill"))
async def test_a_reader_that_is_lost_within_a_frame(road, fault, monkeypatch):
    monkeypatch.setattr(source_module, "READER_TIMEOUT_S", 2.0)
    end, address = SourceEnd(roads_called(road)), asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(end.serve(address.set_result))
    where, counts = await address, end.pool.counts
    values = end.source._counters.values
    async with asyncio.timeout(60), running("tests.processes.fetcher", road, where) as process:
        with struck(process, fault, lambda: values["served_bytes"] > 0):
            while not values["served_bytes"]:
                await asyncio.sleep(0.001)
            lost_s = time.monotonic()
            while end.source.num_serving or end.pool.counts != counts:
                await asyncio.sleep(0.01)
                assert time.monotonic() - lost_s < (STOPPED_S if fault == "stop" else RELEASED_S)
    serving.cancel()
    await asyncio.wait((serving,))

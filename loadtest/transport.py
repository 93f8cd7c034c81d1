"""`kvferry bench transport`: what each road moves, beside what moving the same bytes costs with nothing around it.

Rounds in turn: the road's fetch of blocks that are sent for the first time, their digests taken and checked, then what it is compared
with, on the same memory. Ratios are of medians. Let nothing else run.
"""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvferry.inprocess import Network
from kvferry.kv.road import Road, known_roads, roads_called
from kvferry.rpc.links import GrpcDialer
from kvferry.worker.allocation import keep_freed_memory
from loadtest.own_process import serving
from loadtest.transport_ends import SECRET, SIZES, ReaderEnd, Size, SourceEnd, bare_stream, unchecked

SOURCE = "loadtest.transport_ends"
COPY, STREAM, STORE = "one plain copy", "a bare grpc.aio stream", "put + get + one copy"
COMPARED_WITH = defaultdict(lambda: COPY, {"grpc": STREAM, "ray": STORE})
"""By road; a new one is compared with a copy."""
TARGETS = {"shm": 0.6, "grpc": 0.8, "ray": 0.8}
MAX_CHECK_SHARES = {"shm": 0.25, "grpc": 0.10}

Bare = Callable[[Size], Awaitable[float]]
"""Seconds of what a road is compared with."""


@dataclass(frozen=True, slots=True)
class TransportFigure:
    """Medians of a road and a size; seconds. Between actors only the first one is measured of fetches."""

    road: str
    size: str
    num_bytes: int
    fetch_s: float
    bare_s: float
    again_s: float
    """The fetch of blocks that were sent before, or came from elsewhere: their digests are known."""
    unchecked_s: float
    """The fetch with no digests at either end."""

    @property
    def ratio(self) -> float:
        """The road's rate against the bare one's."""
        return self.bare_s / self.fetch_s

    @property
    def again_ratio(self) -> float:
        return self.bare_s / self.again_s

    @property
    def check_share(self) -> float:
        return 1 - self.unchecked_s / self.fetch_s


async def measure_roads(names: list[str], num_rounds: int) -> AsyncIterator[TransportFigure]:
    """Raises ConfigurationError for an unknown road, FetchFailed where one does not work here."""
    for name in names or known_roads():
        (road,) = roads_called(name)
        measured = _in_actors if name == "ray" else _in_process if name == "inproc" else _in_two_processes
        async for figure in measured(road, num_rounds):
            yield figure


async def _in_two_processes(road: Road, num_rounds: int) -> AsyncIterator[TransportFigure]:
    keep_freed_memory()
    async with (
        serving(SOURCE, road.name) as address,
        serving(SOURCE, road.name, "again") as again_address,
        serving(SOURCE, road.name, "unchecked") as unchecked_address,
    ):
        dialer = GrpcDialer(SECRET)
        reader = ReaderEnd(dialer, (road,))

        async def bare(size: Size) -> float:
            if COMPARED_WITH[road.name] == COPY:
                return reader.copy(size)
            return await bare_stream(dialer, address, size.num_blocks * reader.block_bytes, reader.frame_bytes(road))

        async def unchecked_fetch(size: Size) -> float:
            with unchecked():
                return await reader.fetch(unchecked_address, size)

        async for figure in _rounds(road, reader, (address, again_address), bare, unchecked_fetch, num_rounds):
            yield figure
        await dialer.close()


async def _in_process(road: Road, num_rounds: int) -> AsyncIterator[TransportFigure]:
    async with asyncio.TaskGroup() as group:
        network, source, again = Network(group), SourceEnd((road,)), SourceEnd((road,), keeps_digests=True)
        network.listen("source", source)
        network.listen("again", again)
        running = [group.create_task(end.loop.run()) for end in (source, again)]
        reader = ReaderEnd(network, (road,))

        async def bare(size: Size) -> float:
            return reader.copy(size)

        async def unchecked_fetch(size: Size) -> float:
            with unchecked():
                return await reader.fetch("source", size)

        async for figure in _rounds(road, reader, ("source", "again"), bare, unchecked_fetch, num_rounds):
            yield figure
        for task in running:
            task.cancel()


async def _in_actors(road: Road, num_rounds: int) -> AsyncIterator[TransportFigure]:
    from loadtest.transport_actors import measure_in_actors

    block_bytes, measured = await asyncio.to_thread(measure_in_actors, SIZES, num_rounds)
    for size, (fetches, bares) in zip(SIZES, measured, strict=True):
        yield _figure(road, size, block_bytes, fetches, bares, fetches, fetches)


async def _rounds(
    road: Road, reader: ReaderEnd, addresses: tuple[str, str], bare: Bare, unchecked_fetch: Bare, num_rounds: int
) -> AsyncIterator[TransportFigure]:
    """`addresses`: of a source that sends its blocks for the first time, and of one that sends them again."""
    for size in SIZES:
        fetches, bares, agains, uncheckeds = list[float](), list[float](), list[float](), list[float]()
        for _ in range(num_rounds + 1):
            fetches.append(await reader.fetch(addresses[0], size))
            bares.append(await bare(size))
            agains.append(await reader.fetch(addresses[1], size))
            uncheckeds.append(await unchecked_fetch(size))
        yield _figure(road, size, reader.block_bytes, fetches[1:], bares[1:], agains[1:], uncheckeds[1:])


def _figure(
    road: Road,
    size: Size,
    block_bytes: int,
    fetches: list[float],
    bares: list[float],
    agains: list[float],
    uncheckeds: list[float],
) -> TransportFigure:
    medians = (statistics.median(seconds) for seconds in (fetches, bares, agains, uncheckeds))
    return TransportFigure(road.name, size.name, size.num_blocks * block_bytes, *medians)

"""Two workers that meet: a real reader and a real source over in-process links, in virtual time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvferry.engine.engine import fake_engine
from kvferry.engine.fake import KV_BYTES, kv_of
from kvferry.engine.sequence import Sequence as TokenSequence
from kvferry.errors import FetchFailed, RoadFailed
from kvferry.inprocess import Network
from kvferry.kv.block_id import chain_root
from kvferry.kv.pool import BlockPool
from kvferry.kv.road import Inlet, Road, known_roads
from kvferry.messages import FetchOpen, Frame, Source
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.meeting import BARRED_S, Meetings
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.reader import BlockReader, FetchReport
from kvferry.worker.settings import WorkerSettings
from loadtest.virtual_time import run_virtual
from prefill_worker.worker import PrefillWorker
from tests.in_process import BLOCK, VirtualExecutor

NUM_BLOCKS, PER_FRAME = 10, 3
TOKENS = tuple(range(100, 100 + NUM_BLOCKS * BLOCK))
SOURCE = Source("p1", "p1")
INPROC, SHM, GRPC = (known_roads()[name] for name in ("inproc", "shm", "grpc"))


def blocks_of(tokens: Sequence[int]) -> list[bytes]:
    content, previous = b"", b""
    for token in tokens:
        previous = kv_of(previous, token)
        content += previous
    size = BLOCK * KV_BYTES
    return [content[at : at + size] for at in range(0, len(content), size)]


class CountingNetwork(Network):
    """Counts the streams that were dialled."""

    num_dialled = 0

    def fetch(self, address: str):
        self.num_dialled += 1
        return super().fetch(address)


class Reader:
    """A reader with a pool of its own, which is checked after each fetch."""

    def __init__(self, network: Network, *roads: Road, model_id: str = "fake-1000", fidelity: str = "uint8"):
        engine = fake_engine(100, BLOCK)
        self.memory, self.pool, self.counters = engine.memory, BlockPool(engine.num_slots), Counters()
        self._pair = (model_id, fidelity)
        meetings = Meetings(network, self.memory.format, roads, model_id, fidelity, 3.0)
        digests = BlockDigests(self.pool, self.memory)
        self._reader = BlockReader(network, self.memory, digests, meetings, self.counters, FetchBudgets())

    async def fetch(self, tokens: Sequence[int] = TOKENS) -> FetchReport:
        """Everything that was sealed is found to be true, also where the fetch fails."""
        sequence = TokenSequence(1, list(tokens), chain_root(*self._pair), BLOCK, self.pool)
        sequence.start(len(tokens), max_adopted=0)
        report = FetchReport(asyncio.get_running_loop().time(), SOURCE)
        try:
            await self._reader.fetch(sequence, FetchOpen(*self._pair, tuple(tokens)), report)
            assert sequence.num_sealed_blocks == len(tokens) // BLOCK
        finally:
            sealed = [bytes(self.memory.view(slot)) for slot in sequence.slots]
            assert sealed == blocks_of(tokens)[: len(sealed)]
            assert report.num_blocks == len(sealed)
            sequence.stop()
            assert self.pool.audit().errors == ()
        return report


@dataclass
class Place:
    """Where sources live and readers dial."""

    network: CountingNetwork
    group: asyncio.TaskGroup
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, *roads: Road, incarnation: str = "p1-1") -> PrefillWorker:
        engine = fake_engine(100, BLOCK)
        settings = WorkerSettings("p1", "p1", incarnation, (), roads=roads)
        worker = PrefillWorker(engine, VirtualExecutor(engine.runner), self.network, settings)
        self.network.listen("p1", worker)
        self.running[incarnation] = self.group.create_task(worker.run())
        return worker

    async def kill(self, incarnation: str = "p1-1") -> None:
        self.network.kill("p1")
        task = self.running.pop(incarnation)
        task.cancel()
        await asyncio.wait((task,))


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Place]:
    async with asyncio.TaskGroup() as links, asyncio.TaskGroup() as group:
        here = Place(CountingNetwork(links), group)
        yield here
        for task in here.running.values():
            task.cancel()
        for link in list(here.network.links):
            link.client.close()


class WatchedInlet:
    """Delivers so many blocks; then the road is broken. Knows whether it was closed."""

    def __init__(self, inlet: Inlet, num_blocks: int):
        self._inlet, self._num_blocks, self.is_closed = inlet, num_blocks, False

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        await self._inlet.arrive(frame, num_blocks, block_bytes)

    def copy(self, number: int, into: memoryview) -> None:
        if self._num_blocks == 0:
            raise RoadFailed("the bridge is down")
        self._num_blocks -= 1
        self._inlet.copy(number, into)

    def close(self) -> None:
        self._inlet.close()
        self.is_closed = True


def watched(road: Road, inlets: list[WatchedInlet], num_blocks: int) -> Road:
    """The same, with few blocks a frame; each inlet, to be found in `inlets`, breaks after so many blocks."""

    async def enter(offer: bytes, ticket: bytes) -> Inlet:
        inlets.append(WatchedInlet(await road.enter(offer, ticket), num_blocks))
        return inlets[-1]

    return replace(road, frame_bytes=PER_FRAME * BLOCK * KV_BYTES, enter=enter)


def breaking(road: Road, num_blocks: int) -> Road:
    return replace(watched(road, [], num_blocks), name=f"breaking {road.name}")


def closed(why: str) -> Callable[[bytes, bytes], Awaitable[Inlet]]:
    async def enter(offer: bytes, ticket: bytes) -> Inlet:
        raise RoadFailed(why)

    return enter


@pytest.mark.parametrize(
    ("offered", "taken", "expected"),
    [
        ((INPROC, SHM, GRPC), (INPROC, SHM, GRPC), "inproc"),
        ((SHM, GRPC), (INPROC, SHM, GRPC), "shm"),
        ((INPROC, SHM, GRPC), (SHM, GRPC), "shm"),
        ((GRPC, SHM, INPROC), (SHM, GRPC), "shm"),
        ((GRPC, INPROC), (SHM, GRPC), "grpc"),
        ((GRPC,), (INPROC, SHM, GRPC), "grpc"),
    ],
)
def test_the_best_road_that_both_have_is_taken(offered, taken, expected):
    async def main():
        async with place() as here:
            here.start(*offered)
            reader = Reader(here.network, *taken)
            assert (await reader.fetch()).road == expected
            values = reader.counters.values
            assert values["fetched_bytes"] == values[f"fetched_bytes_over_{expected}"] == NUM_BLOCKS * BLOCK * KV_BYTES

    run_virtual(main)


def test_a_road_that_cannot_be_entered_gives_way_to_the_next_and_the_log_says_why(caplog):
    async def main():
        async with place() as here:
            shut = replace(INPROC, name="ferry", enter=closed("the tide is out"))
            here.start(shut, replace(SHM, name="tunnel"), GRPC)
            reader = Reader(here.network, shut, replace(SHM, name="bridge"), GRPC)
            assert (await reader.fetch()).road == "grpc"

    with caplog.at_level(logging.INFO, "kvferry.worker.meeting"):
        run_virtual(main)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvferry.worker.meeting"]
    assert "blocks of p1 come over grpc" in line
    assert "(ferry: the tide is out; bridge: not offered)" in line


def test_a_road_that_does_not_deliver_its_first_frame_is_not_taken():
    async def main():
        async with place() as here:
            road = breaking(INPROC, 0)
            here.start(road, GRPC)
            assert (await Reader(here.network, road, GRPC).fetch()).road == "grpc"

    run_virtual(main)


@pytest.mark.parametrize("num_blocks", range(PER_FRAME, NUM_BLOCKS))
def test_a_road_that_breaks_is_left_and_the_next_one_brings_only_what_had_not_come(num_blocks, caplog):
    async def main():
        async with place() as here:
            road = breaking(SHM, num_blocks)
            source = here.start(road, GRPC)
            reader = Reader(here.network, road, GRPC)
            report = await reader.fetch()
            values = reader.counters.values
            assert (report.road, report.num_blocks) == ("grpc", NUM_BLOCKS)
            assert values["fetched_blocks"] == NUM_BLOCKS, "none came twice"
            assert values["fetched_bytes_over_breaking shm"] == num_blocks * BLOCK * KV_BYTES
            assert values["fetched_bytes_over_grpc"] == (NUM_BLOCKS - num_blocks) * BLOCK * KV_BYTES
            assert (values["fetches_started"], values["fetches_finished"]) == (1, 1)
            other = await reader.fetch([*TOKENS[:BLOCK], *range(500, 500 + BLOCK)])
            assert other.road == "grpc", "the road is not tried again so soon"
            assert values["fetched_bytes_over_breaking shm"] == num_blocks * BLOCK * KV_BYTES
            await asyncio.sleep(5)
            counts = source.body.pool.counts
            assert counts.num_live == counts.num_filling == 0, "the source has given up what it held for the road"

    with caplog.at_level(logging.INFO, "kvferry.worker.meeting"):
        run_virtual(main)
    assert "breaking shm to p1 broke: the bridge is down; trying another road" in caplog.messages
    assert any("(breaking shm: broke a moment ago)" in message for message in caplog.messages)


def test_a_road_is_barred_for_one_life_of_the_source_only():
    async def main():
        async with place() as here:
            road = breaking(INPROC, PER_FRAME)
            here.start(road, GRPC)
            reader = Reader(here.network, road, GRPC)
            assert (await reader.fetch()).road == "grpc"
            await here.kill()
            here.start(road, GRPC, incarnation="p1-2")
            assert (await reader.fetch(TOKENS[:BLOCK])).road == "breaking inproc"

    run_virtual(main)


def test_a_road_that_broke_is_tried_again_after_a_while_and_as_the_last_one_at_once():
    async def main():
        async with place() as here:
            road = breaking(INPROC, PER_FRAME)
            here.start(road, GRPC)
            reader, lone = Reader(here.network, road, GRPC), Reader(here.network, road)
            assert (await reader.fetch()).road == "grpc"
            with pytest.raises(FetchFailed):
                await lone.fetch()
            assert (await lone.fetch(TOKENS[:BLOCK])).road == "breaking inproc"
            await asyncio.sleep(BARRED_S)
            assert (await reader.fetch(TOKENS[:BLOCK])).road == "breaking inproc"

    run_virtual(main)


def test_when_every_road_breaks_the_fetch_fails_and_keeps_what_came():
    async def main():
        async with place() as here:
            roads = breaking(INPROC, 3), breaking(GRPC, 5)
            here.start(*roads)
            reader = Reader(here.network, *roads)
            with pytest.raises(FetchFailed) as error:
                await reader.fetch()
            assert error.value.kind == "road"
            assert reader.counters.values["fetched_blocks"] == 8
            assert reader.counters.values["fetch_failed_road"] == 1

    run_virtual(main)


@pytest.mark.parametrize("road", [INPROC, SHM, GRPC], ids=lambda road: road.name)
@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_source_that_restarted_is_met_again_and_delivers(road, is_orderly):
    """Its memory is another one: what the reader knows of the old one must not be used."""

    async def main():
        async with place() as here:
            here.start(road)
            reader = Reader(here.network, road)
            await reader.fetch()
            if is_orderly:
                await here.kill()
            here.start(road, incarnation="p1-2")
            before = here.network.num_dialled
            report = await reader.fetch([*TOKENS, *TOKENS])
            assert report.num_blocks == 2 * NUM_BLOCKS
            assert here.network.num_dialled == before + 3, "a stranger, a meeting, a fetch"

    run_virtual(main)


def test_a_source_that_is_gone_is_unreachable_and_met_again_when_it_is_back():
    async def main():
        async with place() as here:
            reader = Reader(here.network, INPROC)
            for incarnation in ("p1-1", "p1-2"):
                with pytest.raises(FetchFailed) as error:
                    await reader.fetch()
                assert error.value.kind == "unreachable"
                here.start(INPROC, incarnation=incarnation)
                await reader.fetch()
                await here.kill(incarnation)

    run_virtual(main)


def test_a_source_that_says_nothing_at_a_meeting_is_unreachable_after_the_time_of_silence():
    async def main():
        async with place() as here:
            here.start(INPROC)
            here.network.freeze("p1")
            reader, began = Reader(here.network, INPROC), asyncio.get_running_loop().time()
            with pytest.raises(FetchFailed, match="p1 at p1 cannot be reached") as error:
                await reader.fetch()
            assert error.value.kind == "unreachable"
            assert asyncio.get_running_loop().time() - began == 3
            here.network.thaw("p1")
            await reader.fetch()

    run_virtual(main)


def test_fetches_that_meet_a_source_at_once_share_one_meeting():
    async def main():
        async with place() as here:
            here.start(INPROC, GRPC)
            reader = Reader(here.network, INPROC, GRPC)
            chains = [range(k, k + 2 * BLOCK) for k in range(8)]
            reports = await asyncio.gather(*(reader.fetch(chain) for chain in chains))
            assert [report.num_blocks for report in reports] == [2] * 8
            assert here.network.num_dialled == 1 + 8
            await reader.fetch()
            assert here.network.num_dialled == 1 + 9, "later ones remember it"

    run_virtual(main)


def test_a_meeting_whose_first_fetch_is_cancelled_is_held_by_the_next():
    async def main():
        async with place() as here:
            here.start(INPROC)
            here.network.freeze("p1")
            reader = Reader(here.network, INPROC)
            first, second = (asyncio.ensure_future(reader.fetch()) for _ in range(2))
            await asyncio.sleep(1)
            first.cancel()
            here.network.thaw("p1")
            assert (await second).num_blocks == NUM_BLOCKS
            with pytest.raises(asyncio.CancelledError):
                await first

    run_virtual(main)


@pytest.mark.parametrize("way_out", ["done", "broken", "source killed", "cancelled"])
def test_road_and_stream_are_closed_on_every_way_out(way_out):
    async def main():
        async with place() as here:
            inlets: list[WatchedInlet] = []
            road = watched(INPROC, inlets, NUM_BLOCKS // 2 if way_out == "broken" else NUM_BLOCKS)
            here.start(road)
            reader = Reader(here.network, road)
            fetching = asyncio.ensure_future(reader.fetch())
            await asyncio.sleep(0 if way_out == "done" else 0.05)
            if way_out == "source killed":
                await here.kill()
            elif way_out == "cancelled":
                fetching.cancel()
            await asyncio.wait((fetching,))
            assert fetching.cancelled() or (fetching.exception() is None) == (way_out == "done")
            assert len(inlets) >= 2, "one to try the road with"
            assert all(inlet.is_closed for inlet in inlets)
            await asyncio.sleep(0.1)
            assert not here.network.links

    run_virtual(main)


def test_without_a_road_in_common_the_fetch_fails_and_names_each_reason():
    async def main():
        async with place() as here:
            shut = replace(INPROC, name="ferry", enter=closed("the tide is out"))
            here.start(shut, breaking(INPROC, 0), GRPC)
            reader = Reader(here.network, shut, breaking(INPROC, 0), SHM)
            with pytest.raises(FetchFailed) as error:
                await reader.fetch()
            assert error.value.kind == "road"
            for reason in (
                "no road to p1 works",
                "ferry: the tide is out",
                "breaking inproc: the bridge is down",
                "shm: not offered",
            ):
                assert reason in error.value.message
            assert reader.counters.values["fetch_failed_road"] == 1

    run_virtual(main)


@pytest.mark.parametrize("different", [dict(model_id="another model"), dict(fidelity="another fidelity")])
def test_a_source_of_another_kind_refuses_to_meet_and_names_the_field(different):
    async def main():
        async with place() as here:
            here.start(INPROC, GRPC)
            reader = Reader(here.network, INPROC, GRPC, **different)
            with pytest.raises(FetchFailed) as error:
                await reader.fetch()
            ((name, value),) = different.items()
            assert error.value.kind == "refused"
            assert f"{name}: this worker has" in error.value.message
            assert repr(value) in error.value.message
            assert reader.counters.values["fetch_failed_refused"] == 1

    run_virtual(main)

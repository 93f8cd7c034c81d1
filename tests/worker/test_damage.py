"""100,000 damaged frames: none is believed, none does anything but fail its fetch, and each is counted by what was wrong with it.

A real reader, over each road's real ends; the source is a script that meets it honestly and then sends what the test has prepared.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest

import kvferry.worker.copier
import kvferry.worker.reader
from kvferry.engine.fake import KV_BYTES, BytesMemory
from kvferry.engine.sequence import Sequence
from kvferry.errors import FetchFailed
from kvferry.kv.block_id import chain_root, extend_chain
from kvferry.kv.frame import PROBE_IDS, block_digest, pack_header
from kvferry.kv.pool import BlockPool
from kvferry.kv.road import Road, known_roads
from kvferry.kv.roads.in_process import InProcessInlet
from kvferry.kv.roads.object_store import ObjectStoreInlet
from kvferry.messages import (
    FetchDown,
    FetchEnd,
    FetchEndReason,
    FetchMeet,
    FetchOffers,
    FetchOpen,
    FetchProbe,
    FetchUp,
    Frame,
    RoadOffer,
    Source,
)
from kvferry.rpc.frame_wire import fetch_down_from_bytes, fetch_down_to_bytes
from kvferry.streams import StreamEnded
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.meeting import Meetings
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.reader import BlockReader, FetchReport
from loadtest.virtual_time import run_virtual

NUM_DAMAGED = 100_000
ROADS = ("inproc", "shm", "grpc", "ray")
SIZE, PER_FRAME, NUM_FRAMES = 2, 3, 2
NUM_BLOCKS = PER_FRAME * NUM_FRAMES
NUM_PROBED = 2
"""Blocks that are copied when the two meet."""
BLOCK_BYTES = SIZE * KV_BYTES
TOKENS = tuple(range(NUM_BLOCKS * SIZE))
ROOT, OTHER_ROOT = chain_root("m", "f"), chain_root("m", "f", b"other salt")
IDS, OTHER_IDS = (extend_chain([], root, TOKENS, SIZE) for root in (ROOT, OTHER_ROOT))
OPENING = FetchOpen("m", "f", TOKENS)
SOURCE = Source("p1", "p1")
BLOCKS = [random.Random(k).randbytes(BLOCK_BYTES) for k in range(2 * NUM_BLOCKS + 1)]
"""What the source's slots hold: padding, the chain, and the one of the other salt."""
COMPLETE = FetchEnd(FetchEndReason.COMPLETE, NUM_BLOCKS)
DAMAGE_KINDS = ("truncated", "header", "version", "layout", "shape", "identity", "order", "place", "digest")


class FromStore(ObjectStoreInlet):
    """The object store's end of the road; what an actor would have yielded is what the frame carries in these tests."""

    def __init__(self) -> None:
        super().__init__(None, lambda: None)

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        content = np.frombuffer(frame.payload, np.uint8)
        shipment = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]

        async def yielded() -> AsyncIterator[asyncio.Future[Any]]:
            reference = asyncio.get_running_loop().create_future()
            reference.set_result(shipment)
            yield reference

        self._generator = yielded()
        await super().arrive(frame, num_blocks, block_bytes)


async def enter_store(offer: bytes, ticket: bytes) -> FromStore:
    return FromStore()


def road_called(name: str) -> Road:
    return replace(known_roads()["grpc"], name="ray", enter=enter_store) if name == "ray" else known_roads()[name]


class Script:
    """Dialer and stream in one: plays `messages` to each fetch, and then ends the stream."""

    def __init__(self, road_name: str):
        self.road = road_called(road_name)
        self.memory = BytesMemory(2 * NUM_BLOCKS, SIZE)
        self.restore()
        source = self.road.lay(self.memory)
        assert source is not None
        self.laid = source
        self.messages: list[FetchDown] = []
        self._coming: asyncio.Queue[FetchDown | None] = asyncio.Queue()

    def restore(self) -> None:
        for slot, block in enumerate(BLOCKS):
            self.memory.view(slot)[:] = block

    def body(self, slots: list[int]) -> Frame:
        """A frame without a header, as it comes out of the wire."""
        cargo = self.laid.open(b"").load(slots)
        return fetch_down_from_bytes(fetch_down_to_bytes(Frame(0, b"", cargo.payload, cargo.place)))

    def frame(self, first: int, slots: list[int], ids: list[bytes]) -> Frame:
        """Of the blocks in `slots`, as the chain's from block `first` on, under these ids."""
        digests = [block_digest(id_, self.memory.view(slot)) for id_, slot in zip(ids, slots, strict=True)]
        return replace(self.body(slots), header=pack_header(self.memory.format, first, ids, digests))

    def chain_frame(self, first: int, count: int = PER_FRAME, is_other: bool = False) -> Frame:
        ids, slot = (OTHER_IDS, first + NUM_BLOCKS + 1) if is_other else (IDS, first + 1)
        return self.frame(first, list(range(slot, slot + count)), ids[first : first + count])

    def fetch(self, address: str) -> "Script":
        del address
        self._coming = asyncio.Queue()
        return self

    async def send(self, message: FetchUp) -> None:
        answer: list[FetchDown | None] = []
        if isinstance(message, FetchMeet):
            answer = [FetchOffers("p1-1", (RoadOffer(self.road.name, self.laid.offer),))]
        elif isinstance(message, FetchProbe):
            answer = [self.frame(0, list(range(NUM_PROBED)), list(PROBE_IDS[:NUM_PROBED]))]
        elif isinstance(message, FetchOpen):
            answer = [*self.messages, None]
        for each in answer:
            self._coming.put_nowait(each)

    async def receive(self) -> FetchDown:
        message = await self._coming.get()
        if message is None:
            raise StreamEnded("the script has ended")
        return message

    def close(self) -> None:
        """Nothing is held."""


class Rig:
    """One reader and its pool. Each attempt begins with an empty sequence and leaves an empty pool."""

    def __init__(self, road_name: str):
        self.script = Script(road_name)
        self.frames = [self.script.chain_frame(k * PER_FRAME) for k in range(NUM_FRAMES)]
        self.memory, self.pool, self.counters = BytesMemory(9, SIZE), BlockPool(9), Counters()
        meetings = Meetings(self.script, self.memory.format, (self.script.road,), "m", "f", 3.0)
        digests = BlockDigests(self.pool, self.memory)
        self._reader = BlockReader(self.script, self.memory, digests, meetings, self.counters, FetchBudgets())
        self.sequence = Sequence(1, list(TOKENS), ROOT, SIZE, self.pool)

    async def attempt(self, messages: list[FetchDown]) -> tuple[int, str]:
        """How many blocks were sealed, each of them found to be true, and how the fetch failed, as it was counted."""
        self.script.messages, sequence = messages, self.sequence
        before = self.counters.values.copy()
        assert sequence.start(len(TOKENS), max_adopted=0) == 0
        failed = ""
        try:
            await self._reader.fetch(sequence, OPENING, FetchReport(0.0, SOURCE))
        except FetchFailed as error:
            failed = error.kind
        num_sealed = sequence.num_sealed_blocks
        sealed = [bytes(self.memory.view(slot)) for slot in sequence.slots]
        assert sealed == BLOCKS[1 : num_sealed + 1], "a sealed block is not what its id says"
        assert sorted(self.pool.sealed_block_ids()) == sorted(IDS[:num_sealed])
        counts = self.pool.counts
        assert (counts.num_live, counts.num_filling, counts.num_cached) == (num_sealed, NUM_BLOCKS - num_sealed, 0)
        sequence.stop()
        self.pool.evict_all()
        return num_sealed, failed and self._counted(before, failed)

    def _counted(self, before: Counter[str], failed: str) -> str:
        """The kind of damage for a bad frame; of failure for anything else."""
        prefixes = ("fetch_failed_", "bad_frame_")
        rose = {n: v - before[n] for n, v in self.counters.values.items() if n.startswith(prefixes) and v > before[n]}
        assert rose.pop(f"fetch_failed_{failed}") == 1
        if failed != "bad_frame":
            assert not rose
            return failed
        ((name, count),) = rose.items()
        assert count == 1
        return name.removeprefix("bad_frame_")

    def check(self) -> None:
        audit = self.pool.audit()
        assert audit.is_clean, audit
        assert audit.counts.num_free == self.pool.num_slots


# ------------------------------------------------------------------------------------------------------------- damages
# Each makes what comes after `good` true frames, and before the true ones that follow.


def changed(
    frame: Frame, random_: random.Random, change: Callable[[bytearray, random.Random], None]
) -> list[FetchDown]:
    """Header, payload or place, changed until it says something else: a number written in another way is no damage."""
    while True:
        name = random_.choice(["header", "payload" if frame.payload else "place"])
        raw = bytearray(getattr(frame, name))
        before = bytes(raw)
        change(raw, random_)
        if raw != before and (name == "payload" or said(raw) != said(before)):
            return [replace(frame, **{name: bytes(raw)})]


def said(packed: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException):
        return None


def flip(raw: bytearray, random_: random.Random) -> None:
    for _ in range(random_.choice((1, 1, 1, 2, 8))):
        raw[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)


def cut(raw: bytearray, random_: random.Random) -> None:
    at = random_.choice((0, random_.randrange(len(raw)), len(raw) - 1))
    del raw[at : at + random_.choice((1, 2, 16, 64, len(raw)))]


def insert(raw: bytearray, random_: random.Random) -> None:
    at = random_.choice((0, random_.randrange(len(raw)), len(raw)))
    raw[at:at] = random_.choice((random_.randbytes(random_.randint(1, 70)), raw[at : at + 64], raw[:]))


def overwrite(raw: bytearray, random_: random.Random) -> None:
    at = random_.randrange(len(raw))
    count = min(random_.randint(1, 40), len(raw) - at)
    raw[at : at + count] = random_.choice((random_.randbytes(count), bytes(count), b"\xff" * count))


def flipped(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    return changed(rig.frames[good], random_, flip)


def resized(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    return changed(rig.frames[good], random_, random_.choice((cut, insert)))


def overwritten(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    return changed(rig.frames[good], random_, overwrite)


def garbage(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    frame, noise = rig.frames[good], random_.randbytes(random_.randrange(300))
    name = random_.choice(["header", "payload" if frame.payload else "place"])
    return [replace(frame, **{name: noise})]


def with_blocks_swapped(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """Or doubled and lost."""
    true = list(range(good * PER_FRAME + 1, (good + 1) * PER_FRAME + 1))
    slots = true
    while slots == true:
        slots = random_.choice((random_.sample(true, PER_FRAME), random_.choices(true, k=PER_FRAME)))
    return [replace(rig.script.body(slots), header=rig.frames[good].header)]


def out_of_order(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """A later frame, an earlier one, or the same one again."""
    first = random_.choice([k for k in range(NUM_BLOCKS) if k != good * PER_FRAME])
    return [rig.script.chain_frame(first, min(PER_FRAME, NUM_BLOCKS - first))]


def foreign(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """A true frame of another salt's chain, or of a meeting."""
    first = good * PER_FRAME
    if random_.random() < 0.2:
        return [rig.script.frame(first, [1, 2], list(PROBE_IDS[:2]))]
    return [rig.script.chain_frame(first, random_.randint(1, PER_FRAME), is_other=True)]


def disguised(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """Another salt's blocks, whole and with their digests, under this chain's ids."""
    frame = rig.script.chain_frame(good * PER_FRAME, is_other=True)
    fields: list[Any] = msgpack.unpackb(frame.header)
    fields[6] = IDS[good * PER_FRAME :][:PER_FRAME]
    if random_.random() < 0.5:  # from the second on
        true = rig.script.chain_frame(good * PER_FRAME)
        slots = [
            good * PER_FRAME + 1,
            *range(good * PER_FRAME + NUM_BLOCKS + 2, (good + 1) * PER_FRAME + NUM_BLOCKS + 1),
        ]
        frame, fields[7][0] = rig.script.body(slots), msgpack.unpackb(true.header)[7][0]
    return [replace(frame, header=msgpack.packb(fields))]


def stale(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """The header of what the slots hold, which had another block in one of them when the reader came."""
    slots = range(good * PER_FRAME + 1, good * PER_FRAME + PER_FRAME + 1)
    rig.script.memory.view(random_.choice(slots))[:] = BLOCKS[NUM_BLOCKS + random_.randint(1, NUM_BLOCKS)]
    return [replace(rig.script.body(list(slots)), header=rig.frames[good].header)]


LIES: list[list[Any]] = [
    [0, 2, -1, 2**60, "1", 1.0, True, None, b"\x01"],  # version
    ["", "other", b"layout", 1, None, [], "x" * 60_000],
    ["float32", "int8", "", "object", b"uint8", 1, None],  # dtype
    [[], [1, 1, 1, 2], [1, 1, 1, 64, 2], [1, 1, 1, 2, 2**60], [1, 1, 1, 2, -64], {}, None, [[[]]], 128, "111264"],
    [-1, 1, 2, 2**60, -(2**60), 2**64 - 1, 1000, None, 0.5, "0", False],  # first token
    [0, -1, 1, 2, 4, 8, 2**60, 2**64 - 1, None, 6.5, "6"],  # number of tokens
    [[], [b""] * 3, [bytes(16)] * 3, [bytes(16)] * 1024, ["x" * 16] * 3, [None], {}, b"", 3, OTHER_IDS[:3]],  # ids
    [[], [b""] * 3, [bytes(16)] * 3, [bytes(16)] * 1024, ["x" * 16] * 3, [None], {}, b"", 3, OTHER_IDS[:3]],  # digests
]


def lying(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    fields: list[Any] = msgpack.unpackb(rig.frames[good].header)
    kind = random_.randrange(10)
    if kind < len(LIES):
        fields[kind] = random_.choice(LIES[kind])
    elif kind == 8:  # fewer or more blocks than there are, and nothing in the header contradicts it
        count = random_.choice((1, 2, 4, 5, 1024, 1025))
        fields[5] = count * SIZE
        fields[6] = fields[7] = (IDS[good * PER_FRAME :] + [bytes(16)] * count)[:count]
    else:
        fields = random_.choice(([*fields, 0], fields[:-1], fields[::-1], [fields], []))
    return [replace(rig.frames[good], header=msgpack.packb(fields))]


def with_mixed_ids(rig: Rig, good: int, random_: random.Random) -> list[FetchDown]:
    """Ids or digests in another order, doubled, or each other's."""
    fields: list[Any] = msgpack.unpackb(rig.frames[good].header)
    before, which = list(fields), random_.choice((6, 7))
    while fields == before:
        fields[which] = random_.choices([*before[6], *before[7]], k=PER_FRAME)
    return [replace(rig.frames[good], header=msgpack.packb(fields))]


@dataclass(frozen=True)
class Damage:
    make: Callable[[Rig, int, random.Random], list[FetchDown]]
    kinds: tuple[str, ...] = DAMAGE_KINDS
    """That it may be counted as."""
    goods: tuple[int, ...] = (0, 1)
    """After how many true frames it may come."""


DAMAGES = [
    Damage(flipped),
    Damage(resized),
    Damage(overwritten),
    Damage(garbage, ("header", "truncated", "place", "digest")),
    Damage(with_blocks_swapped, ("digest",)),
    Damage(out_of_order, ("order",)),
    Damage(foreign, ("identity",)),
    Damage(disguised, ("digest",)),
    Damage(stale, ("digest",)),
    Damage(lying),
    Damage(with_mixed_ids, ("identity", "digest")),
]
NUM_EACH = -(-NUM_DAMAGED // (len(ROADS) * len(DAMAGES)))
NUM_EACH_IN_TURNS = 100


@pytest.mark.parametrize("road_name", ROADS)
async def test_what_comes_behind_the_last_block_is_not_even_looked_at(road_name):
    """The fetch has all that it wants: it ends there, and nothing that follows can spoil it."""
    rig = Rig(road_name)
    for bad in (*garbage(rig, 0, random.Random(1)), rig.frames[0], FetchEnd(FetchEndReason.MISSING, 0, "a lie")):
        assert await rig.attempt([*rig.frames, bad]) == (NUM_BLOCKS, "")
        rig.check()
    assert await rig.attempt(rig.frames) == (NUM_BLOCKS, ""), "nor is the end waited for"
    rig.check()


async def expect_misses(road_name: str, damage: Damage, num_damaged: int) -> None:
    rig, random_ = Rig(road_name), random.Random(f"{road_name} {damage.make.__name__}")
    whole = [*rig.frames, COMPLETE]
    for _ in range(num_damaged):
        good = random_.choice(damage.goods)
        bad = damage.make(rig, good, random_)
        num_sealed, kind = await rig.attempt([*whole[:good], *bad, *whole[good:]])
        rig.script.restore()
        assert kind in damage.kinds, (kind, bad)
        assert good * PER_FRAME <= num_sealed < (good + 1) * PER_FRAME, (num_sealed, bad)
    assert rig.counters.values["fetches_started"] == rig.counters.values["fetch_failed_bad_frame"] == num_damaged
    rig.check()
    assert await rig.attempt(whole) == (NUM_BLOCKS, ""), "a whole one is believed after all that"
    rig.check()


@pytest.mark.parametrize("road_name", ROADS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.make.__name__)
def test_no_damaged_frame_is_believed_and_each_is_counted_by_kind(road_name, damage):
    run_virtual(lambda: expect_misses(road_name, damage, NUM_EACH))


@pytest.mark.parametrize("blocks_per_turn", [1, 2, 3])
@pytest.mark.parametrize("road_name", ROADS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.make.__name__)
def test_nor_when_two_threads_copy_a_frame_in_several_turns(road_name, damage, blocks_per_turn, monkeypatch):
    monkeypatch.setattr(kvferry.worker.reader, "TURN_BYTES", blocks_per_turn * BLOCK_BYTES)
    monkeypatch.setattr(kvferry.worker.copier, "_cores", lambda: {0, 1})
    monkeypatch.setattr(kvferry.worker.copier, "MIN_SHARED_BYTES", 1)
    run_virtual(lambda: expect_misses(road_name, damage, NUM_EACH_IN_TURNS))


@pytest.mark.parametrize("num_copied", range(1, PER_FRAME))
def test_a_sequence_that_gives_up_between_two_turns_gets_no_further_copy(num_copied, monkeypatch):
    """Its slots may be another's by then."""
    monkeypatch.setattr(kvferry.worker.reader, "TURN_BYTES", BLOCK_BYTES)
    copied = list[int]()

    async def main():
        rig = Rig("inproc")

        def copy(inlet: InProcessInlet, number: int, into: memoryview) -> None:
            true_copy(inlet, number, into)
            copied.append(number)
            if len(copied) == num_copied + NUM_PROBED:
                asyncio.get_running_loop().call_soon(rig.sequence.stop)

        true_copy = InProcessInlet.copy
        monkeypatch.setattr(InProcessInlet, "copy", copy)
        with pytest.raises(asyncio.CancelledError):
            await rig.attempt([*rig.frames, COMPLETE])
        assert copied[NUM_PROBED:] == list(range(num_copied))
        assert sorted(rig.pool.sealed_block_ids()) == sorted(IDS[:num_copied])
        rig.pool.evict_all()
        rig.check()

    run_virtual(main)


@pytest.mark.parametrize("road_name", ROADS)
def test_an_undamaged_frame_is_believed_whatever_its_size(road_name):
    async def main():
        rig = Rig(road_name)
        for count in (1, 2, 3, 4, 6):
            frames = [rig.script.chain_frame(k, min(count, NUM_BLOCKS - k)) for k in range(0, NUM_BLOCKS, count)]
            assert await rig.attempt([*frames, COMPLETE]) == (NUM_BLOCKS, "")
            rig.check()
        values = rig.counters.values
        assert values["fetches_finished"] == values["fetches_started"] == 5
        assert values[f"fetched_bytes_over_{road_name}"] == values["fetched_bytes"] == 5 * NUM_BLOCKS * BLOCK_BYTES

    run_virtual(main)


@pytest.mark.parametrize("road_name", ROADS)
def test_a_stream_that_ends_early_is_no_damage_and_what_came_stays(road_name):
    async def main():
        rig = Rig(road_name)
        frame = rig.frames[0]
        missing = FetchEnd(FetchEndReason.MISSING, PER_FRAME)
        for messages, num_blocks, kind in (
            ([], 0, "unreachable"),
            ([frame], PER_FRAME, "stream_ended"),
            ([COMPLETE], 0, "source_error"),
            ([frame, COMPLETE], PER_FRAME, "source_error"),
            ([frame, missing], PER_FRAME, "missing"),
        ):
            assert await rig.attempt(messages) == (num_blocks, kind)
            rig.check()

    run_virtual(main)

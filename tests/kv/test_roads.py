"""One contract for every road: what an outlet loads an inlet copies, and what is no such thing is refused by type."""

import contextlib
import gc
import pickle
import random

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.engine.fake import BytesMemory
from kvferry.errors import BadFrame, ConfigurationError, RoadFailed
from kvferry.kv.places import MAX_SLOT, pack_slots, unpack_slots
from kvferry.kv.road import Inlet, known_roads, roads_called
from kvferry.messages import Frame
from kvferry.rpc.frame_wire import fetch_down_from_bytes, fetch_down_to_bytes

NUM_SLOTS = 8
BLOCK_BYTES = 64 * 4
TICKET = b"ticket"
GARBAGE = {
    "empty": b"",
    "one byte": b"\xc1",
    "pickle": pickle.dumps([1, 2, 3]),
    "pickle that calls": b"cos\nsystem\n(S'false'\ntR.",
    "negative": msgpack.packb([1, -1, 2]),
    "huge numbers": msgpack.packb([1, 2, 2**64 - 1]),
    "beyond any memory": msgpack.packb([1, 2, MAX_SLOT]),
    "booleans": msgpack.packb([True, True, True]),
    "floats": msgpack.packb([1.0, 2.0, 3.0]),
    "nothing": msgpack.packb([None, None, None]),
    "texts": msgpack.packb(["1", "2", "3"]),
    "lists": msgpack.packb([[1], [2], [3]]),
    "a map": msgpack.packb({1: 1, 2: 2, 3: 3}),
    "a number": msgpack.packb(3),
    "an extension": msgpack.packb(msgpack.ExtType(5, b"abc")),
    "a time": msgpack.packb(msgpack.Timestamp(1, 2)),
    "more than it says": msgpack.packb([1, 2, 3]) + b"\x01",
    "less than it says": msgpack.packb([1, 2, 3])[:-1],
    "a list said to be huge": b"\xdd\xff\xff\xff\xff",
    "bytes said to be huge": b"\xc6\xff\xff\xff\xff",
    "deep": b"\x91" * 40,
    "deeper": b"\x91" * 100_000,
    "long": msgpack.packb(list(range(100_000))),
}


def block_of(slot: int) -> bytes:
    return random.Random(slot).randbytes(BLOCK_BYTES)


class Way:
    """A road, laid at a source whose slot k holds `block_of(k)`."""

    def __init__(self, name: str):
        self.memory = BytesMemory(NUM_SLOTS, 4)
        for slot in range(NUM_SLOTS + 1):
            self.memory.view(slot)[:] = block_of(slot)
        self.road = known_roads()[name]
        source = self.road.lay(self.memory)
        assert source is not None
        self.source = source

    def frame(self, slots: list[int]) -> Frame:
        cargo = self.source.open(TICKET).load(slots)
        return Frame(0, b"", cargo.payload, cargo.place)

    async def copies(self, frame: Frame, num_blocks: int, offer: bytes | None = None) -> list[bytes]:
        inlet = await self.road.enter(self.source.offer if offer is None else offer, TICKET)
        try:
            return await copies_of(inlet, frame, num_blocks)
        finally:
            inlet.close()


async def copies_of(inlet: Inlet, frame: Frame, num_blocks: int) -> list[bytes]:
    await inlet.arrive(frame, num_blocks, BLOCK_BYTES)
    copies = [bytearray(BLOCK_BYTES) for _ in range(num_blocks)]
    for number, copy in enumerate(copies):
        inlet.copy(number, memoryview(copy))
    return [bytes(copy) for copy in copies]


@pytest.fixture(params=["inproc", "shm", "grpc"])
def way(request) -> Way:
    return Way(request.param)


@pytest.fixture(params=["inproc", "shm"])
def pointing_way(request) -> Way:
    """Its frames say where the blocks are."""
    return Way(request.param)


@pytest.mark.parametrize("slots", [[1], [8], [3, 1, 7], [2, 2], list(range(NUM_SLOTS + 1))])
@pytest.mark.parametrize("is_sent", [False, True])
async def test_what_is_loaded_is_what_is_copied_in_that_order(way, slots, is_sent):
    frame = way.frame(slots)
    if is_sent:
        frame = fetch_down_from_bytes(fetch_down_to_bytes(frame))
    assert await way.copies(frame, len(slots)) == [block_of(slot) for slot in slots]


async def test_one_inlet_takes_frame_after_frame_and_copies_what_slots_hold_by_then(way):
    inlet = await way.road.enter(way.source.offer, TICKET)
    for number in range(3):
        now = bytes([number]) * BLOCK_BYTES
        way.memory.view(2)[:] = now
        assert await copies_of(inlet, way.frame([1, 2]), 2) == [block_of(1), now]
    inlet.close()


async def test_a_copy_is_the_readers_own_and_its_blocks_come_in_any_order(way):
    inlet = await way.road.enter(way.source.offer, TICKET)
    await inlet.arrive(way.frame([3, 4, 5]), 3, BLOCK_BYTES)
    copies = [bytearray(BLOCK_BYTES) for _ in range(3)]
    for number in (2, 0, 1):
        inlet.copy(number, memoryview(copies[number]))
    way.memory.view(3)[:] = bytes(BLOCK_BYTES)
    assert copies == [block_of(slot) for slot in (3, 4, 5)]
    copies[1][:] = bytes(BLOCK_BYTES)
    assert way.memory.view(4) == block_of(4)
    inlet.close()


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 1024])
@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_frame_of_another_number_of_blocks_is_bad(way, num_blocks, is_sent):
    frame = way.frame([1, 2, 3])
    if is_sent:
        frame = fetch_down_from_bytes(fetch_down_to_bytes(frame))
    with pytest.raises(BadFrame):
        await way.copies(frame, num_blocks)


@pytest.mark.parametrize("slot", [NUM_SLOTS + 1, 1000, 2**31, 2**32, MAX_SLOT - 1])
async def test_a_slot_beyond_the_sources_memory_is_bad(pointing_way, slot):
    with pytest.raises(BadFrame) as error:
        await pointing_way.copies(pointing_way.frame([1, slot, 2]), 3)
    assert error.value.kind == "place"


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_a_frame_of_garbage_is_bad(way, garbage):
    with pytest.raises(BadFrame):
        await way.copies(Frame(0, b"", garbage, garbage), 3)


async def test_a_frame_of_random_bytes_is_bad(way):
    random_ = random.Random(1)
    for _ in range(500):
        garbage = random_.randbytes(random_.randrange(3 * BLOCK_BYTES))
        with pytest.raises(BadFrame):
            await way.copies(Frame(0, b"", garbage, garbage), 3)


@given(st.binary(max_size=60), st.integers(1, 4))
@example(pack_slots([1, 2, 3]), 3)
@example(pack_slots([1, 2, 3]), 4)
def test_a_place_is_so_many_slot_numbers_or_bad(place, num_blocks):
    with contextlib.suppress(BadFrame):
        slots = unpack_slots(place, num_blocks)
        assert len(slots) == num_blocks
        assert all(type(slot) is int and slot in range(MAX_SLOT) for slot in slots)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_an_offer_of_garbage_is_no_road(pointing_way, garbage):
    with pytest.raises(RoadFailed):
        await pointing_way.road.enter(garbage, TICKET)


async def test_an_offer_of_random_bytes_is_no_road(pointing_way):
    random_ = random.Random(2)
    for _ in range(300):
        with pytest.raises(RoadFailed):
            await pointing_way.road.enter(random_.randbytes(random_.randrange(100)), TICKET)


async def test_a_damaged_offer_is_no_road_or_one_that_breaks_or_brings_so_many_bytes(pointing_way):
    """Which ones, their digests will tell."""
    random_, frame, num_refused = random.Random(3), pointing_way.frame([1, 2, 3]), 0
    for _ in range(300):
        damaged = bytearray(pointing_way.source.offer)
        damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
        try:
            copies = await pointing_way.copies(frame, 3, bytes(damaged))
        except (RoadFailed, BadFrame):
            num_refused += 1
        else:
            assert [len(copy) for copy in copies] == [BLOCK_BYTES] * 3
    assert num_refused > 200


async def test_an_offer_of_a_source_that_is_gone_is_no_road():
    way = Way("inproc")
    road, offer = way.road, way.source.offer
    del way
    gc.collect()
    with pytest.raises(RoadFailed):
        await road.enter(offer, TICKET)


async def test_both_ends_close_twice(way):
    outlet, inlet = way.source.open(TICKET), await way.road.enter(way.source.offer, TICKET)
    for _ in range(2):
        inlet.close()
        outlet.close()
    assert await way.copies(way.frame([1]), 1) == [block_of(1)], "another fetch is not harmed"


def test_memory_that_is_not_where_a_process_could_look_is_not_offered_so():
    memory, roads = BytesMemory(NUM_SLOTS, 4), known_roads()
    memory.address = None
    offered = {name: roads[name].lay(memory) is not None for name in ("inproc", "shm", "grpc")}
    assert offered == {"inproc": True, "shm": False, "grpc": True}


async def test_the_object_store_is_for_actors_only():
    road = known_roads()["ray"]
    assert road.lay(BytesMemory(NUM_SLOTS, 4)) is None
    with pytest.raises(RoadFailed, match="not an actor"):
        await road.enter(b"", TICKET)


def test_roads_are_known_best_first_and_the_one_that_always_works_last():
    assert list(known_roads()) == ["inproc", "shm", "ray", "grpc"]
    assert roads_called("auto") == tuple(known_roads().values())
    assert [road.name for road in roads_called("shm")] == ["shm"]


def test_a_road_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ConfigurationError) as error:
        roads_called("carrier pigeon")
    assert "'carrier pigeon'" in error.value.message
    assert all(name in error.value.message for name in ("auto", *known_roads()))

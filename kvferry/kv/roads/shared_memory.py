"""Shared memory: for two workers on one host. The reader maps the source's pool, read-only, for as long as its fetch is open.

A notice names slots; the reader copies each block once, out of memory that the source keeps referenced until it has heard so.
"""

from collections.abc import Sequence
from typing import Any

import msgpack

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.places import pack_slots, unpack_slots
from kvferry.kv.road import MIB, Cargo, Road
from kvferry.kv.shared_pages import MappedPages, SharedPages, SharedPlace
from kvferry.messages import Frame

MAX_OFFER_BYTES = 4096


class SharedMemorySource:
    def __init__(self, pages: SharedPages):
        self._pages = pages

    @property
    def offer(self) -> bytes:
        place = self._pages.place
        packed = msgpack.packb([place.boot_id, place.pid, place.descriptor, place.num_bytes, place.token])
        assert isinstance(packed, bytes)
        return packed

    def open(self, ticket: bytes) -> "SharedMemorySource":
        """Nothing differs between two fetches: it is its own outlet."""
        del ticket
        return self

    def load(self, slots: Sequence[int]) -> Cargo:
        return Cargo(place=pack_slots(slots))

    def close(self) -> None:
        """Nothing is held."""


class SharedMemoryInlet:
    def __init__(self, pages: MappedPages):
        self._pages = pages

    async def unload(self, frame: Frame, num_blocks: int, block_bytes: int) -> Sequence[memoryview]:
        slots = unpack_slots(frame.place, num_blocks)
        if (max(slots) + 1) * block_bytes > len(self._pages.view):
            raise BadFrame("place", f"slot {max(slots)} lies beyond the source's memory")
        return [self._pages.view[slot * block_bytes : (slot + 1) * block_bytes] for slot in slots]

    def close(self) -> None:
        self._pages.close()


def lay(memory: BlockMemory) -> SharedMemorySource | None:
    return None if memory.shared_pages is None else SharedMemorySource(memory.shared_pages)


async def enter(offer: bytes, ticket: bytes) -> SharedMemoryInlet:
    del ticket
    try:
        return SharedMemoryInlet(MappedPages(_place_of(offer)))
    except (OSError, ValueError) as error:
        raise RoadFailed(f"the source's memory cannot be mapped: {error}") from error


def _place_of(offer: bytes) -> SharedPlace:
    """Raises ValueError."""
    if len(offer) > MAX_OFFER_BYTES:
        raise ValueError(f"an offer of {len(offer)} bytes")
    try:
        values: Any = msgpack.unpackb(offer)
    except msgpack.UnpackException as error:
        raise ValueError(str(error)) from error
    kinds = (str, int, int, int, bytes)
    if not isinstance(values, list) or tuple(map(type, values)) != kinds or min(values[1:4]) < 0:
        raise ValueError("not an offer of shared memory")
    return SharedPlace(*values)


ROAD = Road("shm", rank=20, frame_bytes=16 * MIB, lay=lay, enter=enter)

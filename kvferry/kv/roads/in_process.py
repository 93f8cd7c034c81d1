"""In process: the reader looks at the source's slots themselves. For two workers on one event loop, and for tests.

The reference implementation of a road. A source is known by a name that only its own process can resolve.
"""

import secrets
import weakref
from collections.abc import Sequence

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.places import pack_slots, unpack_slots
from kvferry.kv.road import MIB, Cargo, Road, copy_bytes
from kvferry.messages import Frame

_offered: "weakref.WeakValueDictionary[bytes, InProcessSource]" = weakref.WeakValueDictionary()


class InProcessSource:
    def __init__(self, memory: BlockMemory):
        self.memory = memory
        self.offer = secrets.token_bytes(16)
        _offered[self.offer] = self

    def open(self, ticket: bytes) -> "InProcessSource":
        """Nothing differs between two fetches: it is its own outlet."""
        del ticket
        return self

    def load(self, slots: Sequence[int]) -> Cargo:
        return Cargo(place=pack_slots(slots))

    def close(self) -> None:
        """Nothing is held."""


class InProcessInlet:
    def __init__(self, memory: BlockMemory):
        self._memory = memory
        self._slots: list[int] = []

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        del block_bytes
        self._slots = unpack_slots(frame.place, num_blocks)
        if max(self._slots) > self._memory.num_slots:
            raise BadFrame("place", f"slot {max(self._slots)} lies beyond the source's {self._memory.num_slots}")

    def copy(self, number: int, into: memoryview) -> None:
        copy_bytes(self._memory.view(self._slots[number]), into)

    def close(self) -> None:
        """Nothing is held."""


async def enter(offer: bytes, ticket: bytes) -> InProcessInlet:
    del ticket
    source = _offered.get(offer)
    if source is None:
        raise RoadFailed("the source lives in another process")
    return InProcessInlet(source.memory)


ROAD = Road("inproc", rank=10, frame_bytes=16 * MIB, lay=InProcessSource, enter=enter, is_read_in_place=True)

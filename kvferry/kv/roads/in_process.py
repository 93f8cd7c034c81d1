"""In process: the reader looks at the source's slots themselves. For two workers on one event loop, and for tests.

The reference implementation of a road. A source is known by a name that only its own process can resolve.
"""

import secrets
import weakref
from collections.abc import Sequence

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.memory import BlockMemory
from kvferry.kv.places import pack_slots, unpack_slots
from kvferry.kv.road import MIB, Cargo, Road
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
    def __init__(self, source: InProcessSource):
        self._source: InProcessSource | None = source

    async def unload(self, frame: Frame, num_blocks: int, block_bytes: int) -> Sequence[memoryview]:
        source = self._source
        if source is None:
            raise RoadFailed("the fetch has ended")
        views = [source.memory.view(slot).toreadonly() for slot in unpack_slots(frame.place, num_blocks)]
        if any(len(view) != block_bytes for view in views):
            raise BadFrame("place", "a slot lies beyond the source's memory")
        return views

    def close(self) -> None:
        self._source = None


async def enter(offer: bytes, ticket: bytes) -> InProcessInlet:
    del ticket
    source = _offered.get(offer)
    if source is None:
        raise RoadFailed("the source lives in another process")
    return InProcessInlet(source)


ROAD = Road("inproc", rank=10, frame_bytes=16 * MIB, lay=InProcessSource, enter=enter)

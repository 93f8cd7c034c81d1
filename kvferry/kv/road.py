"""A road: how blocks' bytes get from a source's memory to a reader. Notices, acknowledgements and the end go over the fetch stream.

*Offer, read, confirm*: the source says once, when two workers meet, what a reader must know to take the road; for each frame it
loads the slots that it references, and the reader copies each block once into its own slots and checks it; its acknowledgement
confirms that, and only then does the source give up its references. Reading another's memory and receiving frames are so two kinds of
one thing. Nobody writes into another's pool, and a copy is one call: it cannot outlive the slot it goes into. A road whose bytes
arrive by themselves (RDMA) lets them land in two frames' worth of memory of its own, registered once, and copies from there.

A road is one module in kvferry/kv/roads with a `ROAD`; nothing else names it. `known_roads` finds it, workers offer it and take it
by its rank, `--transport` accepts its name, `kvferry bench transport` measures it.
"""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from kvferry.errors import ConfigurationError
from kvferry.kv import roads
from kvferry.kv.memory import BlockMemory
from kvferry.messages import Frame

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cargo:
    """What of a frame the fetch stream carries for a road: the blocks themselves, or where to find them."""

    payload: tuple[memoryview, ...] = ()
    place: bytes = b""


class Outlet(Protocol):
    """A road's beginning, at the source: one for each fetch."""

    def load(self, slots: Sequence[int]) -> Cargo:
        """The slots are referenced until the reader has acknowledged the frame, or the fetch has ended."""
        ...

    def close(self) -> None:
        """The fetch has ended, well or not. Idempotent."""
        ...


class Inlet(Protocol):
    """A road's end, at the reader: one for each fetch."""

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        """Returns when the frame's blocks can be copied. They can until the next call, or until `close`.

        Raises BadFrame for a frame that cannot be what it says, RoadFailed where the road itself has broken.
        """
        ...

    def copy(self, number: int, into: memoryview) -> None:
        """One of the arrived frame's blocks, from 0, into memory of the reader: one call, nothing of it goes on afterwards.

        Called by two threads at once, for different blocks.
        Raises RoadFailed.
        """
        ...

    def close(self) -> None:
        """The fetch has ended, well or not: nothing of it stays open or referenced. Idempotent."""
        ...


class SourceRoad(Protocol):
    """A road as one worker offers it."""

    @property
    def offer(self) -> bytes:
        """What a reader must know to take it. It is told to workers that know the cluster's secret only."""
        ...

    def open(self, ticket: bytes) -> Outlet:
        """For the fetch that its reader named so."""
        ...


@dataclass(frozen=True, slots=True)
class Road:
    name: str
    rank: int
    """Lower is tried first."""
    frame_bytes: int
    """A frame has as many blocks as fit into so many bytes, at most an eighth of the pool, and at least one."""
    lay: Callable[[BlockMemory], SourceRoad | None]
    """At the source, once; None where this worker cannot offer it."""
    enter: Callable[[bytes, bytes], Awaitable[Inlet]]
    """At the reader, from offer and ticket. Raises RoadFailed, saying why it cannot be taken here."""
    is_read_in_place: bool = False
    """Its frames only name slots, so that a large first one is there as soon as a small one."""


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Without the interpreter's lock, so that the step's thread is not kept waiting. Raises ValueError if the sizes differ."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@cache
def known_roads() -> dict[str, Road]:
    """By name, best first."""
    found = [
        importlib.import_module(f"{roads.__name__}.{info.name}").ROAD for info in pkgutil.iter_modules(roads.__path__)
    ]
    return {road.name: road for road in sorted(found, key=lambda road: road.rank)}


def roads_called(name: str) -> tuple[Road, ...]:
    """All of them for "auto". Raises ConfigurationError for a name that is not known."""
    known = known_roads()
    if name == "auto":
        return tuple(known.values())
    if name not in known:
        raise ConfigurationError(f"transport: {name!r} is not known; known: auto, {', '.join(known)}")
    return (known[name],)

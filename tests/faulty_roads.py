"""Roads on which something happens: one bit of a block is another one when it is copied, or the road breaks there, or takes its time.

A fault of a road is a road of its own, given to a worker in its settings. What happens is drawn from a seed.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any

from kvferry.engine.fake import KV_BYTES
from kvferry.errors import RoadFailed
from kvferry.kv.road import Road, roads_called
from kvferry.messages import Frame
from tests.in_process import BLOCK

ROADS = ("inproc", "shm", "grpc")
"""Within one process; another one needs actors."""


class FaultyInlet:
    """Of some frames, one bit of one block is another one when it is copied; or the road breaks there, or takes its time."""

    def __init__(self, inlet: Any, fault: str, rng: random.Random):
        self._inlet, self._fault, self._rng = inlet, fault, rng
        self._bad_block: int | None = None

    async def arrive(self, frame: Frame, num_blocks: int, block_bytes: int) -> None:
        await self._inlet.arrive(frame, num_blocks, block_bytes)
        self._bad_block = self._rng.randrange(num_blocks) if self._rng.random() < 0.2 else None
        if self._fault == "slow" and self._bad_block is not None:
            await asyncio.sleep(self._rng.choice((0.01, 0.3, 2.0)))

    def copy(self, number: int, into: memoryview) -> None:
        self._inlet.copy(number, into)
        if number == self._bad_block and self._fault == "break":
            raise RoadFailed("the bridge is down")
        if number == self._bad_block and self._fault == "damage":
            into[self._rng.randrange(len(into))] ^= 1 << self._rng.randrange(8)

    def close(self) -> None:
        self._inlet.close()


def faulty(road: Road, fault: str, seed: object) -> Road:
    if not fault:
        return road
    rng = random.Random(str(seed))

    async def enter(offer: bytes, ticket: bytes) -> FaultyInlet:
        return FaultyInlet(await road.enter(offer, ticket), fault, rng)

    return replace(road, enter=enter)


def small_frames(num_blocks: int, name: str = "auto") -> tuple[Road, ...]:
    return tuple(replace(road, frame_bytes=num_blocks * BLOCK * KV_BYTES) for road in roads_called(name))

"""Copies blocks out of a road into slots and checks them there, on two threads where the process may use two cores.

A call returns when every copy has: none goes on afterwards, whatever was found. The interpreter's lock is given up for the copies of
most roads and for the digests.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import BadFrame, RoadFailed
from kvferry.kv.frame import FrameBlock, check_block
from kvferry.kv.road import Inlet

MIN_SHARED_BYTES = 2 * 1024 * 1024
"""Below this, waking the other thread costs more than it brings."""

Fault = BadFrame | RoadFailed | None


class Copier:
    def __init__(self) -> None:
        has_two_cores = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else True
        self._other = ThreadPoolExecutor(1, thread_name_prefix="kvferry-copy") if has_two_cores else None

    def copy_and_check(self, inlet: Inlet, blocks: Sequence[FrameBlock], copies: Sequence[memoryview]) -> list[Fault]:
        """Of an arrived frame: what is wrong with each block."""
        faults: list[Fault] = [None] * len(blocks)
        numbers = iter(range(len(blocks)))

        def work(mine: Iterator[int]) -> None:
            for number in mine:
                faults[number] = _copy_one(inlet, blocks[number], number, copies[number])

        if self._other is None or len(blocks) < 2 or len(blocks) * len(copies[0]) < MIN_SHARED_BYTES:
            work(numbers)
            return faults
        theirs = self._other.submit(work, numbers)  # each takes the next one: whoever is faster does more
        try:
            work(numbers)
        finally:
            if not theirs.cancel():  # it has begun
                theirs.result()
        return faults


def _copy_one(inlet: Inlet, block: FrameBlock, number: int, copy: memoryview) -> Fault:
    try:
        inlet.copy(number, copy)
        check_block(block, copy)
    except (BadFrame, RoadFailed) as fault:
        return fault
    return None

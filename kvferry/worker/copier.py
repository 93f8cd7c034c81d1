"""Work on the blocks of a frame by two threads where the process may use two cores: each takes the next, so who is faster does more.

A call returns when all of it is done: no copy goes on afterwards, whatever was found, so a slot cannot be given away under one. The
work must give up the interpreter's lock for its longer parts, as copies and digests do. Knows nothing of roads and pools.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

MIN_SHARED_BYTES = 8 * 1024 * 1024
"""Below this, waking the other thread costs more than it brings."""


class Copier:
    """Of one reader. Its thread begins with the first work that is worth sharing. One call at a time."""

    def __init__(self, num_cores: int | None = None):
        """`num_cores`: those that this process may use, if not given."""
        is_alone = (num_cores or _num_cores()) < 2
        self._other = None if is_alone else ThreadPoolExecutor(1, thread_name_prefix="kvferry-copy")

    def each(self, work: Callable[[int], None], count: int, num_bytes: int) -> None:
        """`work(number)` for each of `count` blocks, `num_bytes` in all. Raises what it raises, when both threads have stopped."""
        numbers = iter(range(count))
        if self._other is None or num_bytes < MIN_SHARED_BYTES:
            _work_through(numbers, work)
            return
        theirs = self._other.submit(_work_through, numbers, work)
        try:
            _work_through(numbers, work)
        finally:
            if not theirs.cancel():  # it has begun
                theirs.result()


def _work_through(numbers: Iterator[int], work: Callable[[int], None]) -> None:
    for number in numbers:
        work(number)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Work on the blocks of a frame by two threads where the caller may use two cores: each takes the next, so who is faster does more.

A call returns when all of it is done: no copy goes on afterwards, whatever was found, so a slot cannot be given away under one. The
work must give up the interpreter's lock for its longer parts, as copies and digests do. Knows nothing of roads and pools.

The system likes to wake a thread on the core of who woke it, where it would wait for milliseconds: it is kept from there.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MIN_SHARED_BYTES = 8 * 1024 * 1024
"""Below this, waking the other thread costs more than it brings."""


class Copier:
    """Of one reader. Its thread begins with the first work that is worth sharing. One call at a time."""

    def __init__(self) -> None:
        self._other = ThreadPoolExecutor(1, thread_name_prefix="kvferry-copy")
        self._other_id: int | None = None
        self._kept_to = set[int]()

    def each(self, work: Callable[[int], None], count: int, num_bytes: int) -> None:
        """`work(number)` for each of `count` blocks, `num_bytes` in all. Raises what it raises, when both threads have stopped."""
        numbers = iter(range(count))
        if num_bytes < MIN_SHARED_BYTES or len(cores := _cores()) < 2:
            _work_through(numbers, work)
            return
        self._keep_off_this_core(cores)
        theirs = self._other.submit(_work_through, numbers, work)
        try:
            _work_through(numbers, work)
        finally:
            if not theirs.cancel():  # it has begun
                theirs.result()

    def _keep_off_this_core(self, cores: set[int]) -> None:
        """`cores`: those of the caller. Whoever confines it confines the other thread too."""
        here = _here()
        if here is None or (others := cores - {here}) == self._kept_to:
            return
        if self._other_id is None:
            self._other_id = self._other.submit(threading.get_native_id).result()
        with contextlib.suppress(OSError):  # the process was given other cores meanwhile
            os.sched_setaffinity(self._other_id, others)
            self._kept_to = others


def _work_through(numbers: Iterator[int], work: Callable[[int], None]) -> None:
    for number in numbers:
        work(number)


def _cores() -> set[int]:
    """That this thread may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


_library: Any = ctypes.CDLL(None)


def _here() -> int | None:
    """The core that this thread runs on; None where threads cannot be kept from one."""
    if not hasattr(os, "sched_setaffinity") or not hasattr(_library, "sched_getcpu"):
        return None
    return _library.sched_getcpu()

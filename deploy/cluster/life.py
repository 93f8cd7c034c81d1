"""An actor's own work, begun with the actor and never lost silently; and what of the machine it takes."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import psutil

MEMORY_FRESH_S = 2.0


class MemoryInUse:
    """Of this process alone. The kernel walks all of its pages for it: asked seldom."""

    def __init__(self) -> None:
        self._read_at, self._bytes = -MEMORY_FRESH_S, 0

    def forget(self) -> None:
        """What was read: it has changed by much."""
        self._read_at = -MEMORY_FRESH_S

    @property
    def private_bytes(self) -> int:
        if time.monotonic() >= self._read_at + MEMORY_FRESH_S:
            found: Any = psutil.Process().memory_full_info()
            self._read_at, self._bytes = time.monotonic(), found.uss
        return self._bytes


def as_long_as_the_actor(work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
    """To be kept. If it fails, so does the actor, and whoever wants it begins it anew.

    (An actor's call to itself would do, but is lost when Ray restarts an actor that `ray.kill` has ended.)
    """
    running = asyncio.ensure_future(work)
    running.add_done_callback(_end_with)
    return running


def _end_with(running: "asyncio.Future[None]") -> None:
    if running.cancelled() or (error := running.exception()) is None:
        return
    logging.getLogger("kvferry").critical("unexpected error", exc_info=error)
    logging.shutdown()
    os._exit(1)

"""A worker that ends in order: it wants nothing new, finishes what it has, and goes; at the latest when its grace is over.

What runs then still goes on elsewhere: the routers hold the tokens. A second signal ends it at once.
"""

import asyncio
import logging
from typing import Protocol

from kvferry.bell import Bell
from kvferry.messages import WorkerProgress
from kvferry.worker.body import WorkerBody
from kvferry.worker.loop import EngineLoop

logger = logging.getLogger(__name__)

CHECKED_S = 0.1
TOLD_S = 0.3
"""For the routers to hear of it, before an idle worker goes."""


class Drained(Protocol):
    """A worker of either role."""

    @property
    def body(self) -> WorkerBody: ...

    @property
    def loop(self) -> EngineLoop: ...

    def load(self, router_life: str = "") -> WorkerProgress: ...


class Draining:
    def __init__(self, worker: Drained, grace_s: float):
        self._worker, self._grace_s = worker, grace_s
        self._begun, self._is_hurried = Bell(), False

    def begin(self) -> None:
        """From a signal's handler."""
        self._is_hurried = self._worker.body.is_draining
        self._worker.body.is_draining = True
        self._worker.loop.post(lambda: None)  # so that its progress says so
        self._begun.ring()

    async def run(self) -> None:
        """Returns when the worker may end."""
        while not self._worker.body.is_draining:
            await self._begun.wait()
        now = asyncio.get_running_loop().time
        began = now()
        logger.info("draining: at most %g s", self._grace_s)
        while not self._is_hurried and now() < began + self._grace_s:
            load = self._worker.load()
            if now() >= began + TOLD_S and not load.num_sequences and not load.num_serving:
                return
            await self._begun.wait(CHECKED_S)

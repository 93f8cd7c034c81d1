"""Requests that kill or hang the workers that compute them, and workers that are started again a moment later, as a supervisor does."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry.engine.plan import Plan, StepResult
from kvferry.messages import Sampling
from router.request import GenerationRequest
from tests.cluster import Cluster, PacedExecutor
from tests.hand_off import prompt_of
from tests.in_process import BLOCK, Node

MARKED = 13
KILLER = GenerationRequest((*prompt_of(30, "killer"), *[MARKED] * BLOCK), Sampling(0, 8, 0.0))
"""Kills or hangs in the step in which its tail runs."""
CHAIN_KILLER = GenerationRequest((*prompt_of(48, "killer"), *[MARKED] * 2 * BLOCK, *prompt_of(8)), Sampling(0, 8, 0.0))
"""The same in one of its whole blocks, which a prefill worker computes."""


def is_marked(plan: Plan) -> bool:
    return any(chunk.tokens.count(MARKED) >= BLOCK for chunk in plan.chunks)


class KillerExecutor(PacedExecutor):
    """Its worker dies at the very beginning of a step with a marked block."""

    die: Callable[[], None] = staticmethod(lambda: None)

    async def execute(self, plan: Plan) -> StepResult:
        if is_marked(plan):
            self.die()
            await asyncio.get_running_loop().create_future()
        return await super().execute(plan)


class HangingExecutor(PacedExecutor):
    """A step with a marked block never ends."""

    async def execute(self, plan: Plan) -> StepResult:
        if is_marked(plan):
            await asyncio.get_running_loop().create_future()
        return await super().execute(plan)


class Mortal:
    """Workers that crash under a marked block and are started again `back_s` later."""

    def __init__(self, made: Cluster, *names: str, back_s: float = 1.0, **settings: Any):
        self.made, self.num_deaths, self._lives = made, 0, 1
        self._back_s, self._settings = back_s, settings
        for name in names:
            self._start(name, "")

    def _start(self, name: str, previous_end: str) -> Node:
        node = self.made.start(name, self._lives, previous_end=previous_end, **self._settings)
        executor = KillerExecutor(node.engine.runner)
        executor.die = lambda: self._die(name)
        node.executor = executor
        node.worker.loop._executor = executor  # type: ignore[union-attr]
        return node

    def _die(self, name: str) -> None:
        self.made.group.create_task(self._die_and_come_back(name))

    async def _die_and_come_back(self, name: str) -> None:
        self.num_deaths += 1
        await self.made.kill(name)
        await asyncio.sleep(self._back_s)
        self._lives += 1
        self._start(name, "signal 11")

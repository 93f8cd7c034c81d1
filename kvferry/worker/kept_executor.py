"""An executor that outlives its worker. A worker that has ended may leave a step running, which writes into the memory that the next
one's pool is made over: `settle` comes before that pool, for blocks may be fetched into it before its first step.
"""

import asyncio

from kvferry.engine.plan import Plan, StepResult
from kvferry.errors import ConfigurationError
from kvferry.worker.loop import Executor

SETTLE_S = 60.0
"""Longer than any step takes."""


class KeptExecutor:
    def __init__(self, kept: Executor):
        self._kept = kept
        self._running: asyncio.Future[StepResult] | None = None

    @classmethod
    def of(cls, executor: Executor) -> "KeptExecutor":
        return executor if isinstance(executor, cls) else cls(executor)

    async def execute(self, plan: Plan) -> StepResult:
        """A step whose worker ends goes on."""
        self._running = asyncio.ensure_future(self._kept.execute(plan))
        return await asyncio.shield(self._running)

    async def settle(self) -> None:
        """Returns when no step runs. Raises ConfigurationError for one that does not end."""
        if self._running is None:
            return
        _, running = await asyncio.wait([self._running], timeout=SETTLE_S)
        if running:
            raise ConfigurationError(
                f"a step that another worker began here has not ended for {SETTLE_S:g} s: end this process"
            )

    def close(self) -> None:
        """Not yet: it ends with the process."""

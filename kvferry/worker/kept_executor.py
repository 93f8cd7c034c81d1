"""An executor that outlives its worker: the next worker's first step runs after the last step of the one before it.

A worker that has ended may leave a step running; it writes into the pool's memory, which is the next one's, too.
"""

from kvferry.engine.plan import Plan, StepResult
from kvferry.worker.loop import Executor


class KeptExecutor:
    def __init__(self, kept: Executor):
        self._kept = kept

    @classmethod
    def of(cls, executor: Executor) -> "KeptExecutor":
        return executor if isinstance(executor, cls) else cls(executor)

    async def execute(self, plan: Plan) -> StepResult:
        return await self._kept.execute(plan)

    def close(self) -> None:
        """Not yet: it ends with the process."""

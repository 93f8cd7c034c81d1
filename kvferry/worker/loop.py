"""The worker's loop: drain the inbox, plan, run, commit, emit. One for both policies.

Everything that changes scheduler or pool runs on this loop's task or, between two awaits, on the same event loop; what must not
happen while a step runs (abort, admission) is posted to the inbox. The step itself runs on an executor: a thread of its own
in production, inline and in virtual time in tests. The loop knows no request and no wire.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from kvferry.bell import Bell
from kvferry.engine.plan import NON_FINITE, Plan, Runner, Scheduler, StepResult
from kvferry.engine.roofline import StepCosts, Throughput
from kvferry.errors import EngineLost
from kvferry.kv.pool import BlockPool
from kvferry.worker.counters import Counters
from kvferry.worker.rates import MeasuredRates
from kvferry.worker.step_line import StepLine

logger = logging.getLogger(__name__)

MIN_STEP_LIMIT_S = 3.0
FIRST_STEP_LIMIT_S = 30.0
STEP_LIMIT_FACTOR = 8.0
SMALL_STEP_TOKENS = 16
SENDER_TURNS = 4
"""Of the event loop, until a ring has woken a task and that has sent what it may."""


class StepTimes:
    """What steps took at most: the allowance within which a long step is not taken for a hang."""

    def __init__(self) -> None:
        self._small_s = 0.0
        self._s_per_token = 0.0

    def limit_s(self, num_tokens: int) -> float:
        if num_tokens > SMALL_STEP_TOKENS and not self._s_per_token:
            return FIRST_STEP_LIMIT_S
        if not self._small_s and not self._s_per_token:
            return FIRST_STEP_LIMIT_S
        return max(MIN_STEP_LIMIT_S, STEP_LIMIT_FACTOR * (self._small_s + num_tokens * self._s_per_token))

    def measured(self, num_tokens: int, duration_s: float) -> None:
        if num_tokens <= SMALL_STEP_TOKENS:
            self._small_s = max(0.99 * self._small_s, duration_s)
        else:
            self._s_per_token = max(0.99 * self._s_per_token, duration_s / num_tokens)


class Executor(Protocol):
    """Where the step runs."""

    async def execute(self, plan: Plan) -> StepResult: ...

    def close(self) -> None: ...


class ThreadExecutor:
    """Runs steps on one thread of its own. `StepResult.duration_s` is measured there."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-step")

    async def execute(self, plan: Plan) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class EngineLoop:
    """Owns the inbox, the step counter and the knowledge of whether the engine advances."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pool: BlockPool,
        counters: Counters,
        costs: StepCosts,
        rates: MeasuredRates | None = None,
    ):
        self._rates = rates or MeasuredRates()
        self._scheduler, self._executor, self._pool, self._counters = scheduler, executor, pool, counters
        self._costs, self.throughput = costs, Throughput()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = Bell()
        self._step_began: float | None = None
        self._times = StepTimes()
        self._step_limit_s = FIRST_STEP_LIMIT_S
        self._num_evictions = 0
        self._num_leaked = 0
        self.step = 0
        self.stepped = Bell()
        """Rings after each commit and whenever the loop has drained its inbox."""
        self.emit: Callable[[], bool] = lambda: False
        """Called after each commit and each drain. True: something must be on its way before the next step runs."""
        self.is_lending: Callable[[], bool] = lambda: False
        """Whether blocks are referenced for other workers' readers: then an idle engine does not mean an idle pool."""

    def now(self) -> float:
        """The event loop's monotonic clock, virtual in tests."""
        return asyncio.get_running_loop().time()

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` between two steps."""
        self._inbox.append(action)
        self._wake.ring()

    @property
    def is_advancing(self) -> bool:
        """False while a step takes longer than what was measured can explain: only then is silence the truth."""
        return self._step_began is None or self.now() - self._step_began < self._step_limit_s

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                while self._inbox:
                    self._inbox.popleft()()
                plan = self._scheduler.plan(self.step + 1, self.now())
                is_urgent = self.emit()
                self.stepped.ring()
                if plan is None:
                    await self._rest()
                else:
                    if is_urgent:
                        await self._let_senders_run()
                    await self._run_step(plan)
                    await self._let_senders_run()
        finally:
            self._executor.close()

    async def _let_senders_run(self) -> None:
        """They take what was committed: tokens do not wait for the next plan, and blocks may be evicted by it."""
        self.emit()
        self.stepped.ring()
        for _ in range(SENDER_TURNS):
            await asyncio.sleep(0)

    async def _rest(self) -> None:
        if self._inbox:
            return
        if self._scheduler.is_idle and not self.is_lending():
            self._audit()
        deadline = self._scheduler.next_deadline()
        await self._wake.wait(None if deadline is None else max(deadline - self.now(), 0.001))

    async def _execute(self, plan: Plan) -> StepResult:
        """A step that raises is run again chunk by chunk, so that only the chunk to blame fails."""
        try:
            return await self._executor.execute(plan)
        except EngineLost:
            raise
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            if len(plan.chunks) == 1:
                return StepResult({}, {plan.chunks[0].sequence_id: f"the step failed: {error!r}"})
        results = [await self._execute(Plan(plan.step, (chunk,))) for chunk in plan.chunks]
        return StepResult(
            tokens={key: value for result in results for key, value in result.tokens.items()},
            failures={key: value for result in results for key, value in result.failures.items()},
            logprobs={key: value for result in results for key, value in result.logprobs.items()},
            scores={key: value for result in results for key, value in result.scores.items()},
        )

    def _audit(self) -> None:
        """Nothing runs, so nobody may hold anything."""
        counts = self._pool.counts
        if counts.num_filling == counts.num_live == 0:
            return
        audit = self._pool.audit()
        num_leaked = sum(audit.leaks.values())
        if num_leaked <= self._num_leaked:
            return  # told before
        self._counters.add("leaked_slots", num_leaked - self._num_leaked)
        self._num_leaked = num_leaked
        logger.error(
            "the idle pool is not clean: held by %s; %s", audit.leaks, "; ".join(audit.errors) or "no other fault"
        )

    async def _run_step(self, plan: Plan) -> None:
        self._step_began = began = self.now()
        self._step_limit_s = self._times.limit_s(plan.num_tokens)
        try:
            result = await self._execute(plan)
        finally:
            self._step_began = None
        duration_s = self.now() - began
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", StepLine(plan.step, len(plan.chunks), plan.num_tokens, began, duration_s))
        if not result.failures:
            self._times.measured(plan.num_tokens, duration_s)
            self._rates.stepped(plan, duration_s)
            work = self._costs.of_plan(plan)
            self.throughput.stepped(work, duration_s)
            self._counters.add("step_flops", int(work.flops))
            self._counters.add("step_bytes", int(work.num_bytes))
            self._counters.add("step_microseconds", int(duration_s * 1e6))
        self.step = plan.step
        self._counters.add("steps")
        done = sum(len(chunk.tokens) for chunk in plan.chunks if chunk.sequence_id not in result.failures)
        self._counters.add("computed_tokens", done)
        self._counters.add("generated_tokens", len(result.tokens))
        self._counters.add("non_finite_logits", sum(why == NON_FINITE for why in result.failures.values()))
        self._scheduler.commit(plan, replace(result, duration_s=duration_s), self.now())
        self._counters.add("evicted_blocks", self._pool.num_evictions - self._num_evictions)
        self._num_evictions = self._pool.num_evictions

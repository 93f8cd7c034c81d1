"""A prefill worker: the common body with the prefill policy. Serves fetches; everything else is inside."""

from kvferry.engine.budget import StepBudget
from kvferry.engine.engine import Engine
from kvferry.messages import FetchDown, FetchUp, Role, WorkerProgress
from kvferry.streams import Dialer, Stream
from kvferry.worker.body import WorkerBody
from kvferry.worker.loop import Executor
from kvferry.worker.settings import WorkerSettings
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.service import PrefillService


class PrefillWorker:
    def __init__(self, engine: Engine, executor: Executor, dialer: Dialer, settings: WorkerSettings):
        self.body = body = WorkerBody(Role.PREFILL, engine, executor, dialer, settings)
        identity = body.identity
        budget = StepBudget(settings.step_target_s, identity.block_size, settings.max_step_tokens, engine.tokens_per_s)
        self._scheduler = PrefillScheduler(body.pool, identity.block_size, budget)
        self.loop = body.loop_for(self._scheduler)
        self._service = PrefillService(identity, self._scheduler, self.loop, body.reader)
        self._source = body.source_for(self.loop, self._service)

    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None:
        await self._source.serve_fetch(stream)

    def load(self, router_life: str = "") -> WorkerProgress:
        """The same for every router: fetches come from workers."""
        del router_life
        return self.body.progress(
            self.loop,
            num_waiting=self._scheduler.num_waiting,
            num_fetching=self._scheduler.num_reading,
            num_running=self._scheduler.num_running,
            num_serving=self._source.num_serving,
            kv_tokens=self._scheduler.num_tokens,
            waiting_tokens=self._scheduler.num_missing_tokens,
            waiting_by_size=self._scheduler.missing_by_size,
        )

    async def run(self) -> None:
        """Raises JoinRefused; otherwise until cancelled."""
        await self.body.run(self.loop, self.load, [self._service.run()])

"""A decode worker: the common body with the decode policy. Serves routers, and blocks that it has to other workers."""

from decode_worker.choice import State
from decode_worker.scheduler import DecodeLimits, DecodeScheduler
from decode_worker.service import DecodeService
from kvferry.engine.budget import StepBudget
from kvferry.engine.engine import Engine
from kvferry.messages import DecodeMessage, FetchDown, FetchUp, Role, RouterMessage, WorkerProgress
from kvferry.streams import Dialer, Stream
from kvferry.worker.body import WorkerBody
from kvferry.worker.loop import Executor
from kvferry.worker.settings import WorkerSettings


class DecodeWorker:
    def __init__(self, engine: Engine, executor: Executor, dialer: Dialer, settings: WorkerSettings):
        self.body = body = WorkerBody(Role.DECODE, engine, executor, dialer, settings)
        identity = body.identity
        limits = DecodeLimits(
            identity.context_tokens, settings.max_sequences, settings.max_local_tokens, settings.max_warm
        )
        budget = StepBudget(
            settings.step_target_s,
            identity.block_size,
            settings.max_step_tokens,
            engine.tokens_per_s,
            settings.itl_target_s,
        )
        self._scheduler = DecodeScheduler(body.pool, identity.block_size, limits, budget, body.counters)
        self.loop = body.loop_for(self._scheduler)
        self._service = DecodeService(
            identity, self._scheduler, self.loop, body.pool, body.reader, body.counters, settings.silence_s
        )
        self._source = body.source_for(self.loop)

    async def serve_attach(self, stream: Stream[DecodeMessage, RouterMessage]) -> None:
        await self._service.serve_attach(stream)

    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None:
        await self._source.serve_fetch(stream)

    def load(self, router_life: str = "") -> WorkerProgress:
        """As the router of that life sees it."""
        yours = self._service.share_of(router_life)
        return self.body.progress(
            self.loop,
            num_waiting=self._scheduler.count(State.WAITING),
            num_fetching=self._scheduler.count(State.FETCHING),
            num_running=self._scheduler.count(State.RUNNING),
            num_serving=self._source.num_serving,
            kv_tokens=self._scheduler.num_kv_tokens,
            waiting_tokens=self._scheduler.num_tokens_behind,
            waiting_by_size=self._scheduler.tokens_behind_by_size,
            your_sequences=yours.num_sequences,
            your_kv_tokens=yours.kv_tokens,
        )

    async def run(self) -> None:
        """Raises JoinRefused; otherwise until cancelled."""
        await self.body.run(self.loop, self.load, [self._service.run()])

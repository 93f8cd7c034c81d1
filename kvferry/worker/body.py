"""The parts that both workers have, put together: pool, counters, loop, reader, memberships.

A role adds its scheduler and its service. `run` runs it all until it is cancelled; when it ends, everything has ended.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.plan import Scheduler
from kvferry.kv.pool import BlockPool
from kvferry.messages import Role, WorkerDescription, WorkerProgress
from kvferry.streams import Dialer
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.loop import EngineLoop, Executor
from kvferry.worker.meeting import Meetings
from kvferry.worker.member import Membership
from kvferry.worker.rates import MeasuredRates
from kvferry.worker.reader import BlockReader
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.source import BlockSource, Computer, SourceIdentity


class WorkerBody:
    def __init__(self, role: Role, engine: Engine, executor: Executor, dialer: Dialer, settings: WorkerSettings):
        self.role, self.engine, self.settings = role, engine, settings
        self.identity = engine.identity
        self.counters = Counters()
        self.rates = MeasuredRates()
        self.is_draining = False
        self.pool = BlockPool(engine.num_slots)
        meetings = Meetings(
            dialer,
            engine.memory.format,
            settings.roads,
            self.identity.model_id,
            self.identity.fidelity,
            settings.silence_s,
            self.rates,
        )
        self._digests = BlockDigests(self.pool, engine.memory)
        self.reader = BlockReader(
            dialer, engine.memory, self._digests, meetings, self.counters, settings.budgets, self.rates
        )
        self._executor, self._dialer = executor, dialer
        self.on_joined: Callable[[], None] = lambda: None
        """Called whenever a router has taken this worker in."""

    def source_for(self, loop: EngineLoop, computer: Computer | None = None) -> BlockSource:
        identity, settings = self.identity, self.settings
        pair = SourceIdentity(identity.model_id, identity.fidelity, settings.incarnation, identity.context_tokens)
        return BlockSource(
            pair,
            self.pool,
            self.engine.memory,
            self._digests,
            loop,
            self.counters,
            settings.roads,
            computer,
            self.engine.link,
        )

    def loop_for(self, scheduler: Scheduler) -> EngineLoop:
        return EngineLoop(scheduler, self._executor, self.pool, self.counters, self.engine.costs, self.rates)

    def progress(self, loop: EngineLoop, **more: Any) -> WorkerProgress:
        """What both roles say of themselves; `more` is the role's own."""
        return WorkerProgress(
            step=loop.step,
            slots=self.pool.counts,
            counters=dict(self.counters.values),
            flops_per_s=loop.throughput.flops_per_s,
            bytes_per_s=loop.throughput.bytes_per_s,
            step_s=dict(self.rates.step_s),
            tokens_per_s=dict(self.rates.tokens_per_s),
            link_bytes_per_s=dict(self.rates.link_bytes_per_s),
            is_draining=self.is_draining,
            **more,
        )

    @property
    def description(self) -> WorkerDescription:
        identity, settings = self.identity, self.settings
        return WorkerDescription(
            worker_id=settings.worker_id,
            incarnation=settings.incarnation,
            role=self.role,
            address=settings.address,
            model_id=identity.model_id,
            fidelity=identity.fidelity,
            numerics_id=identity.numerics_id,
            block_size=identity.block_size,
            block_bytes=identity.block_bytes,
            pool_tokens=self.pool.num_slots * identity.block_size,
            context_tokens=identity.context_tokens,
            vocabulary_size=identity.vocabulary_size,
            max_sequences=settings.max_sequences,
            pid=os.getpid(),
            num_threads=settings.num_threads,
            ceiling_flops_per_s=settings.ceilings.flops_per_s,
            ceiling_bytes_per_s=settings.ceilings.bytes_per_s,
            previous_end=settings.previous_end,
        )

    async def run(
        self, loop: EngineLoop, load: Callable[[str], WorkerProgress], services: list[Coroutine[None, None, None]]
    ) -> None:
        """Raises JoinRefused; otherwise until cancelled."""
        async with asyncio.TaskGroup() as group:
            for service in services:
                group.create_task(service)
            group.create_task(loop.run())
            for address in self.settings.router_addresses:
                membership = Membership(
                    self._dialer,
                    address,
                    self.description,
                    loop,
                    self.pool,
                    load,
                    self.settings.silence_s,
                    self.on_joined,
                )
                group.create_task(membership.run())

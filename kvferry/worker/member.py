"""Joining a router: one stream, on which the worker says what it is and then how it is doing.

Progress goes out every second while the engine advances, and sooner (at most ten times a second) when something changed; an engine
that hangs falls silent, which is the truth. A lost router is dialled again for ever; a refusal ends the worker with its reason.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kvferry.errors import JoinRefused
from kvferry.kv.pool import BlockPool, PoolWatch
from kvferry.messages import JoinDown, JoinUp, Refusal, SnapshotWanted, Welcome, WorkerDescription, WorkerProgress
from kvferry.racing import until_first
from kvferry.streams import Dialer, Stream, StreamEnded
from kvferry.worker.loop import EngineLoop

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
COALESCE_S = 0.1
SILENCE_S = 3.0
RETRY_S = 0.5


class Membership:
    """One worker's membership of one router. `load` reads the worker's progress, as that router sees it, without block ids."""

    def __init__(
        self,
        dialer: Dialer,
        router_address: str,
        description: WorkerDescription,
        loop: EngineLoop,
        pool: BlockPool,
        load: Callable[[str], WorkerProgress],
        silence_s: float = SILENCE_S,
        on_joined: Callable[[], None] = lambda: None,
    ):
        self._dialer, self._router_address, self._description = dialer, router_address, description
        self._loop, self._pool, self._load, self._silence_s = loop, pool, load, silence_s
        self._on_joined = on_joined
        self._router_life = ""
        self._next_event = 0
        self._wants_snapshot = True
        self.is_member = False

    async def run(self) -> None:
        """Until cancelled. Raises JoinRefused."""
        while True:
            try:
                await self._be_member()
            except (StreamEnded, TimeoutError) as error:
                if isinstance(error, StreamEnded) and error.status == "UNAUTHENTICATED":
                    message = f"the router at {self._router_address} refuses this worker's secret"
                    raise JoinRefused("secret", message) from error
                if self.is_member:
                    reason = "it fell silent" if isinstance(error, TimeoutError) else error
                    logger.warning("lost the router at %s: %s; joining again", self._router_address, reason)
            self.is_member = False
            await asyncio.sleep(RETRY_S)

    async def _be_member(self) -> None:
        stream = self._dialer.join(self._router_address)
        watch = self._pool.watch()
        try:
            async with asyncio.timeout(self._silence_s):
                await stream.send(self._description)
                answer = await stream.receive()
            if isinstance(answer, Refusal):
                raise JoinRefused(answer.field, answer.detail)
            if isinstance(answer, Welcome):
                self.is_member = True
                self._router_life, self._next_event, self._wants_snapshot = answer.router_life, 0, True
                logger.info("joined router %s at %s", answer.router_id, self._router_address)
                self._on_joined()
            await until_first(self._listen(stream, watch), self._report(stream, watch))
        finally:
            watch.close()
            stream.close()

    async def _listen(self, stream: Stream[JoinUp, JoinDown], watch: PoolWatch) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                message = await stream.receive()
            if isinstance(message, SnapshotWanted):
                watch.start_again()
                self._wants_snapshot = True

    async def _report(self, stream: Stream[JoinUp, JoinDown], watch: PoolWatch) -> None:
        last: WorkerProgress | None = None
        while True:
            load = self._load(self._router_life)
            if self._loop.is_advancing:
                await stream.send(self._with_events(load, watch))
            last = load
            until = self._loop.now() + INTERVAL_S
            await asyncio.sleep(COALESCE_S)
            while (left := until - self._loop.now()) > 0 and self._load(self._router_life) == last:
                await self._loop.stepped.wait(left)

    def _with_events(self, load: WorkerProgress, watch: PoolWatch) -> WorkerProgress:
        sealed, evicted = watch.take()
        first, self._next_event = self._next_event, self._next_event + len(sealed) + len(evicted)
        is_snapshot, self._wants_snapshot = self._wants_snapshot, False
        ids = {"sealed_block_ids": tuple(sealed), "evicted_block_ids": tuple(evicted)}
        return replace(load, first_event=first, is_snapshot=is_snapshot, **ids)

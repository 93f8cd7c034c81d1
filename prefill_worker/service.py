"""Where fetch streams meet the prefill scheduler: a `Computer` for kvferry/worker/source.py.

A computation belongs to one fetch stream and is aborted, between two steps, when the stream closes it. Before it computes, it may
read the beginning of its chain from a holder, hold-only: one hop, no waiting there, so workers cannot wait in a ring.
"""

import asyncio
import contextlib

from kvferry.errors import FetchFailed, InvalidRequest
from kvferry.messages import FetchEnd, FetchEndReason, FetchOpen, Source
from kvferry.worker.identity import WorkerIdentity
from kvferry.worker.loop import EngineLoop
from kvferry.worker.reader import BlockReader, FetchReport
from prefill_worker.scheduler import Chain, ChainState, PrefillScheduler


class ChainComputation:
    """One stream's view of its chain."""

    def __init__(self, service: "PrefillService", chain: Chain):
        self._service, self._chain = service, chain

    @property
    def num_done_blocks(self) -> int:
        return self._chain.num_done_blocks

    @property
    def has_ended(self) -> bool:
        return self._chain.state in (ChainState.DONE, ChainState.FAILED)

    @property
    def is_queued(self) -> bool:
        return self._chain.state is ChainState.WAITING

    @property
    def is_reading(self) -> bool:
        return self._chain.state is ChainState.READING

    @property
    def failure(self) -> FetchEnd | None:
        if self._chain.state is not ChainState.FAILED:
            return None
        return FetchEnd(FetchEndReason.ENGINE_ERROR, self._chain.num_done_blocks, self._chain.failure)

    def close(self) -> None:
        self._service.forget(self._chain)


class RefusedComputation:
    """A chain that was not admitted."""

    num_done_blocks = 0
    has_ended = True
    is_queued = is_reading = False

    def __init__(self, failure: FetchEnd):
        self.failure: FetchEnd | None = failure

    def close(self) -> None:
        """Nothing is held."""


class PrefillService:
    """Begins computations, and reads from holders. `run` must run beside the engine loop."""

    def __init__(self, identity: WorkerIdentity, scheduler: PrefillScheduler, loop: EngineLoop, reader: BlockReader):
        self._identity, self._scheduler, self._loop, self._reader = identity, scheduler, loop, reader
        self._reads: dict[Chain, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        loop.emit = self._emit

    async def run(self) -> None:
        """Keeps the task group of the reads; until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            await asyncio.get_running_loop().create_future()

    def begin(self, opening: FetchOpen, root: bytes) -> ChainComputation | RefusedComputation:
        if max(opening.tokens) >= self._identity.vocabulary_size:
            detail = f"tokens: {max(opening.tokens)} is not in the vocabulary of {self._identity.vocabulary_size}"
            return RefusedComputation(FetchEnd(FetchEndReason.REFUSED, 0, detail))
        try:
            chain = self._scheduler.admit(opening.tokens, root, opening.priority, opening.holders, opening.salt)
        except InvalidRequest as error:
            return RefusedComputation(FetchEnd(FetchEndReason.TOO_LARGE, 0, error.message))
        if opening.time_left_s is not None:
            chain.deadline_s = self._loop.now() + opening.time_left_s
        self._loop.post(lambda: None)
        return ChainComputation(self, chain)

    def forget(self, chain: Chain) -> None:
        """Between two steps: the chain may be part of the one that runs."""
        self._loop.post(lambda: self._abort(chain))

    def _abort(self, chain: Chain) -> None:
        task = self._reads.pop(chain, None)
        if task is not None:
            task.cancel()
        self._scheduler.abort(chain)

    def _emit(self) -> bool:
        for chain, holder in self._scheduler.take_reads():
            assert self._group is not None, "run() must run beside the loop"
            self._reads[chain] = self._group.create_task(self._read(chain, holder))
        return False

    async def _read(self, chain: Chain, holder: Source) -> None:
        opening = FetchOpen(
            model_id=self._identity.model_id,
            fidelity=self._identity.fidelity,
            tokens=tuple(chain.sequence.tokens),
            salt=chain.salt,
            hold_only=True,
            time_left_s=None if chain.deadline_s is None else max(chain.deadline_s - self._loop.now(), 0.001),
        )
        with contextlib.suppress(FetchFailed):  # counted by the reader; what lacks is read elsewhere or computed
            await self._reader.fetch(chain.sequence, opening, FetchReport(self._loop.now(), holder))
        self._reads.pop(chain, None)
        self._loop.post(lambda: self._scheduler.read_ended(chain))

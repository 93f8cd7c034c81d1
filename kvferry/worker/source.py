"""Serving blocks to another worker: one coroutine per fetch stream, in every worker.

It packs consecutive sealed blocks into frames, keeps at most two frames unacknowledged, and never makes the engine wait for its
reader: a block that is gone when its turn comes is reported as missing. Where the worker can compute (a prefill worker), a
chain that is not sealed is handed to a `Computer`, and frames go out as it goes on. What a stream holds ends with the coroutine.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Protocol

from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.frame import pack_frame
from kvferry.kv.memory import BlockMemory
from kvferry.kv.pool import BlockPool
from kvferry.messages import (
    PROTOCOL_VERSION,
    FetchAck,
    FetchDown,
    FetchEnd,
    FetchEndReason,
    FetchOpen,
    FetchProgress,
    FetchState,
    FetchUp,
    Frame,
)
from kvferry.racing import until_first
from kvferry.streams import Stream, StreamEnded
from kvferry.worker.counters import Counters
from kvferry.worker.loop import EngineLoop

FRAME_BYTES = 2 * 1024 * 1024
MAX_FRAMES_IN_FLIGHT = 2
PROGRESS_INTERVAL_S = 1.0
OPENING_TIMEOUT_S = 5.0
LINGER_S = 2.0


class Computation(Protocol):
    """A chain on its way. Closing it is idempotent."""

    @property
    def num_done_blocks(self) -> int: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def is_queued(self) -> bool: ...

    @property
    def failure(self) -> FetchEnd | None: ...

    def close(self) -> None: ...


class Computer(Protocol):
    """Who computes what is missing; a worker without one answers *missing*."""

    def begin(self, opening: FetchOpen, root: bytes) -> Computation: ...


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """What a reader must share with this worker."""

    model_id: str
    fidelity: str
    context_tokens: int
    """A longer chain is refused before anything is done for it."""


class _FetchIsOver(Exception):
    """Carries the end out of the sender."""

    def __init__(self, end: FetchEnd):
        super().__init__(end.reason.value)
        self.end = end


class BlockSource:
    """Serves fetch streams out of one pool."""

    def __init__(
        self,
        identity: SourceIdentity,
        pool: BlockPool,
        memory: BlockMemory,
        loop: EngineLoop,
        counters: Counters,
        computer: Computer | None = None,
    ):
        self._identity, self._pool, self._memory = identity, pool, memory
        self._loop, self._counters, self._computer = loop, counters, computer
        self.num_serving = 0

    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None:
        """Until everything asked for is sent, or the stream ends."""
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            opening = await stream.receive()
        if not isinstance(opening, FetchOpen):
            await stream.send(FetchEnd(FetchEndReason.REFUSED, 0, "the first message must be an opening"))
            return
        refusal = self._refusal(opening)
        if refusal is not None:
            await stream.send(refusal)
            return
        self.num_serving += 1
        self._counters.add("served_fetches")
        try:
            await _Serving(self, stream, opening).run()
        finally:
            self.num_serving -= 1

    def _refusal(self, opening: FetchOpen) -> FetchEnd | None:
        mine = (PROTOCOL_VERSION, self._identity.model_id, self._identity.fidelity)
        theirs = (opening.protocol_version, opening.model_id, opening.fidelity)
        for name, here, there in zip(("protocol_version", "model_id", "fidelity"), mine, theirs, strict=True):
            if here != there:
                return FetchEnd(FetchEndReason.REFUSED, 0, f"{name}: this worker has {here!r}, the reader {there!r}")
        size = self._memory.format.block_size
        if not opening.tokens or len(opening.tokens) % size or opening.first_block * size > len(opening.tokens):
            detail = f"tokens: {len(opening.tokens)} from block {opening.first_block} are not whole blocks of {size}"
            return FetchEnd(FetchEndReason.REFUSED, 0, detail)
        if len(opening.tokens) > self._identity.context_tokens:
            detail = f"tokens: {len(opening.tokens)}, this worker's limit is {self._identity.context_tokens}"
            return FetchEnd(FetchEndReason.TOO_LARGE, 0, detail)
        return None


class _Serving:
    """One stream."""

    def __init__(self, source: BlockSource, stream: Stream[FetchDown, FetchUp], opening: FetchOpen):
        self._source, self._stream, self._opening = source, stream, opening
        self._pool, self._memory, self._loop = source._pool, source._memory, source._loop
        self._root = chain_root(opening.model_id, opening.fidelity, opening.salt)
        self._ids = chain(self._root, opening.tokens, self._memory.format.block_size)
        self._next = opening.first_block
        self._frame_number = 0
        self._unacknowledged: set[int] = set()
        self._acknowledged = asyncio.Event()
        self._computation: Computation | None = None

    async def run(self) -> None:
        try:
            await until_first(self._take_acknowledgements(), self._show_progress(), self._send_all())
        except StreamEnded:
            pass  # the reader has left: nothing to tell
        finally:
            if self._computation is not None:
                self._computation.close()

    async def _send_all(self) -> None:
        """Frames and the end; what the stream holds is given up with the end. Then the reader closes the stream.

        Acknowledgements are taken until it does: a read that is cut short would end the call, and the end might not be read.
        """
        end = FetchEnd(FetchEndReason.COMPLETE, len(self._ids))
        try:
            async with asyncio.timeout(self._opening.time_left_s):
                await self._send_blocks()
        except TimeoutError:
            end = FetchEnd(FetchEndReason.DEADLINE, self._next, "the time left ran out")
        except _FetchIsOver as over:
            end = over.end
        if self._computation is not None:
            self._computation.close()
        await self._stream.send(end)
        await asyncio.sleep(LINGER_S)

    async def _send_blocks(self) -> None:
        while self._next < len(self._ids):
            if len(self._unacknowledged) >= MAX_FRAMES_IN_FLIGHT:
                self._acknowledged.clear()
                await self._acknowledged.wait()
            elif (count := self._num_sendable()) > 0:
                await self._send_frame(count)
            else:
                await self._wait_for_a_block()

    def _num_sendable(self) -> int:
        limit = max(FRAME_BYTES // self._memory.format.block_bytes, 1)
        return self._pool.num_sealed_prefix(self._ids[self._next : self._next + limit])

    async def _send_frame(self, count: int) -> None:
        ids = self._ids[self._next : self._next + count]
        hold = self._pool.open_hold(f"frame of a fetch at block {self._next}")
        try:
            slots = [slot for id_ in ids if (slot := hold.adopt(id_)) is not None]
            assert len(slots) == count, "nothing is evicted between two statements"
            header, payload = pack_frame(
                self._memory.format, self._next, ids, [self._memory.view(slot) for slot in slots]
            )
        finally:
            hold.close()
        self._unacknowledged.add(self._frame_number)
        frame = Frame(self._frame_number, header, payload)
        self._frame_number += 1
        self._next += count
        await self._stream.send(frame)
        self._source._counters.add("served_blocks", count)
        self._source._counters.add("served_bytes", len(payload))

    async def _wait_for_a_block(self) -> None:
        """Returns when block `next` may be sealed. Raises the end if it will not be."""
        if self._computation is None:
            if self._opening.hold_only or self._source._computer is None:
                raise _FetchIsOver(FetchEnd(FetchEndReason.MISSING, self._next, "not sealed here"))
            self._computation = self._source._computer.begin(self._opening, self._root)
        if self._computation.failure is not None:
            failure = self._computation.failure
            raise _FetchIsOver(FetchEnd(failure.reason, self._next, failure.detail))
        if self._computation.has_ended or self._computation.num_done_blocks > self._next:
            raise _FetchIsOver(FetchEnd(FetchEndReason.MISSING, self._next, "evicted before it was sent"))
        await self._loop.stepped.wait()

    async def _take_acknowledgements(self) -> None:
        while True:
            message = await self._stream.receive()
            if isinstance(message, FetchAck):
                self._unacknowledged.discard(message.frame_number)
                self._acknowledged.set()

    async def _show_progress(self) -> None:
        shown: FetchState | None = None
        while True:
            state = self._state()
            if self._loop.is_advancing:
                progress = FetchProgress(self._loop.step, state, self._pool.num_sealed_prefix(self._ids))
                await self._stream.send(progress)
            shown = state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_INTERVAL_S):
                    while self._state() is shown:
                        await self._loop.stepped.wait()

    def _state(self) -> FetchState:
        if self._computation is None or self._computation.has_ended:
            return FetchState.SENDING
        return FetchState.QUEUED if self._computation.is_queued else FetchState.COMPUTING

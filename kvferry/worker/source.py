"""Serving blocks to another worker: one coroutine per fetch stream, in every worker.

It puts consecutive sealed blocks into frames, loads them onto the road that the reader chose when the two met
(kvferry/worker/meeting.py), and keeps the blocks of at most two frames referenced, until the reader has acknowledged them. It never
makes the engine wait for its reader: a block that is gone when its turn comes is reported as missing. Where the worker can compute (a
prefill worker), a chain that is not sealed is handed to a `Computer`, and frames go out as it goes on. What a stream holds ends with
the coroutine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.engine.engine import Link
from kvferry.errors import ConfigurationError
from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.frame import MAX_BLOCKS, PROBE_IDS, pack_header
from kvferry.kv.memory import BlockMemory
from kvferry.kv.pool import BlockPool, Hold
from kvferry.kv.road import Outlet, Road, SourceRoad
from kvferry.messages import (
    PROTOCOL_VERSION,
    FetchAck,
    FetchDown,
    FetchEnd,
    FetchEndReason,
    FetchMeet,
    FetchOffers,
    FetchOpen,
    FetchProbe,
    FetchProgress,
    FetchState,
    FetchUp,
    Frame,
    RoadOffer,
)
from kvferry.racing import until_first
from kvferry.streams import Stream, StreamEnded
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.loop import EngineLoop
from kvferry.worker.pace import FramePace

FRAMES_A_POOL = 8
"""No frame has more than this part of the pool."""
PROGRESS_INTERVAL_S = 1.0
OPENING_TIMEOUT_S = 5.0
MEETING_TIMEOUT_S = 60.0
"""For a reader to try a road: longer than any road takes to fail."""
READER_TIMEOUT_S = 30.0
"""A reader that takes no frame, or acknowledges none, for so long is given up: its frames' blocks are in others' way."""
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
    def is_reading(self) -> bool: ...

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
    incarnation: str
    """This life of the worker: a reader that met another one knows other memory."""
    context_tokens: int
    """A longer chain is refused before anything is done for it."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a stream shows its reader; see FetchProgress."""

    state: FetchState
    is_reading: bool = False


class _FetchIsOver(Exception):
    """Carries the end out of the sender."""

    def __init__(self, end: FetchEnd):
        super().__init__(end.reason.value)
        self.end = end


class BlockSource:
    """Serves fetch streams out of one pool, over the given roads, best first."""

    def __init__(
        self,
        identity: SourceIdentity,
        pool: BlockPool,
        memory: BlockMemory,
        digests: BlockDigests,
        loop: EngineLoop,
        counters: Counters,
        roads: Sequence[Road],
        computer: Computer | None = None,
        link: Link | None = None,
    ):
        self.link = link
        self._identity, self._pool, self._memory, self._digests = identity, pool, memory, digests
        self._loop, self._counters, self._computer = loop, counters, computer
        self._laid = {road.name: (road, laid) for road in roads if (laid := road.lay(memory)) is not None}
        if not self._laid:
            names = ", ".join(road.name for road in roads)
            raise ConfigurationError(
                f"transport {names}: this worker cannot offer it here; use --transport auto or grpc"
            )
        self.num_serving = 0
        loop.is_lending = lambda: self.num_serving > 0

    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None:
        """Until everything asked for is sent, or the stream ends."""
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            opening = await stream.receive()
        refusal = self._refusal(opening)
        if refusal is not None:
            await stream.send(refusal)
        elif isinstance(opening, FetchMeet):
            await self._serve_meeting(stream)
        elif isinstance(opening, FetchOpen):
            await self._serve_opening(stream, opening)

    async def _serve_opening(self, stream: Stream[FetchDown, FetchUp], opening: FetchOpen) -> None:
        self.num_serving += 1
        self._counters.add("warmed_chains" if opening.warm else "served_fetches")
        try:
            await _Serving(self, stream, opening).run()
        finally:
            self.num_serving -= 1
            self._loop.post(lambda: None)  # an idle pool is audited when the last one has ended

    async def _serve_meeting(self, stream: Stream[FetchDown, FetchUp]) -> None:
        """Says which roads there are, and sends a frame over each that the reader tries."""
        offers = tuple(RoadOffer(name, laid.offer) for name, (_, laid) in self._laid.items())
        await stream.send(FetchOffers(self._identity.incarnation, offers))
        frame_number = 0
        while True:
            async with asyncio.timeout(MEETING_TIMEOUT_S):
                probe = await stream.receive()
            if not isinstance(probe, FetchProbe) or probe.road not in self._laid:
                return
            outlet = self.road(probe.road).open(probe.ticket)
            try:
                num_blocks = min(max(probe.num_blocks, 1), self._blocks_that_fit(probe.road), self._pool.num_slots)
                cargo, no_ids = outlet.load(range(num_blocks)), PROBE_IDS[:num_blocks]
                header = pack_header(self._memory.format, 0, no_ids, no_ids)
                if self.link is not None:
                    await self.link.pass_blocks(num_blocks)
                await stream.send(Frame(frame_number, header, cargo.payload, cargo.place))
                async with asyncio.timeout(MEETING_TIMEOUT_S):
                    await stream.receive()
            finally:
                outlet.close()
            frame_number += 1

    def road(self, name: str) -> SourceRoad:
        return self._laid[name][1]

    def frame_blocks(self, road: str) -> tuple[int, int]:
        """At most so many in a fetch's first frame, and in the others: a small one is there sooner."""
        largest = self.max_frame_blocks(road)
        return largest if self._laid[road][0].is_read_in_place else -(-largest // 4), largest

    def max_frame_blocks(self, road: str) -> int:
        """A reader that stalls keeps two frames of slots from others: in a small pool frames are small."""
        return max(min(self._blocks_that_fit(road), self._pool.num_slots // FRAMES_A_POOL), 1)

    def _blocks_that_fit(self, road: str) -> int:
        return min(max(self._laid[road][0].frame_bytes // self._memory.format.block_bytes, 1), MAX_BLOCKS)

    def _refusal(self, opening: FetchUp) -> FetchEnd | None:
        if not isinstance(opening, FetchOpen | FetchMeet):
            return FetchEnd(FetchEndReason.REFUSED, 0, "the first message must be an opening or a meeting")
        mine = (PROTOCOL_VERSION, self._identity.model_id, self._identity.fidelity)
        theirs = (opening.protocol_version, opening.model_id, opening.fidelity)
        for name, here, there in zip(("protocol_version", "model_id", "fidelity"), mine, theirs, strict=True):
            if here != there:
                return FetchEnd(FetchEndReason.REFUSED, 0, f"{name}: this worker has {here!r}, the reader {there!r}")
        return None if isinstance(opening, FetchMeet) else self._refusal_of_chain(opening)

    def _refusal_of_chain(self, opening: FetchOpen) -> FetchEnd | None:
        size = self._memory.format.block_size
        if not opening.tokens or len(opening.tokens) % size or opening.first_block * size > len(opening.tokens):
            detail = f"tokens: {len(opening.tokens)} from block {opening.first_block} are not whole blocks of {size}"
            return FetchEnd(FetchEndReason.REFUSED, 0, detail)
        if len(opening.tokens) > self._identity.context_tokens:
            detail = f"tokens: {len(opening.tokens)}, this worker's limit is {self._identity.context_tokens}"
            return FetchEnd(FetchEndReason.TOO_LARGE, 0, detail)
        if opening.warm:
            return None
        if opening.incarnation != self._identity.incarnation:
            detail = f"incarnation: this worker is {self._identity.incarnation}, met was {opening.incarnation}"
            return FetchEnd(FetchEndReason.STRANGER, 0, detail)
        if opening.road not in self._laid:
            return FetchEnd(FetchEndReason.STRANGER, 0, f"road: {opening.road!r} is not offered here")
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
        self._has_ended = False
        self._in_flight: dict[int, Hold] = {}
        self._acknowledged = asyncio.Event()
        self._computation: Computation | None = None
        self._outlet: Outlet | None = None if opening.warm else source.road(opening.road).open(opening.ticket)
        self._pace = FramePace(*((1, 1) if opening.warm else source.frame_blocks(opening.road)))

    async def run(self) -> None:
        try:
            await until_first(self._send_all(), self._take_acknowledgements(), self._show_progress())
        except StreamEnded:
            pass  # the reader has left: nothing to tell
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Everything that is held for the reader. Idempotent."""
        if self._computation is not None:
            self._computation.close()
        if self._outlet is not None:
            self._outlet.close()
        self._let_go()

    def _let_go(self) -> None:
        for hold in self._in_flight.values():
            hold.close()
        self._in_flight.clear()

    async def _send_all(self) -> None:
        """Frames and the end; then the reader closes the stream.

        What computes is given up with the end, what is in flight when it is acknowledged. Acknowledgements are taken until the
        reader closes the stream: a read that is cut short would end the call, and the end might not be read.
        """
        end = FetchEnd(FetchEndReason.COMPLETE, len(self._ids))
        try:
            async with asyncio.timeout(self._opening.time_left_s):
                await (self._compute_all() if self._outlet is None else self._send_blocks(self._outlet))
        except TimeoutError:
            end = FetchEnd(FetchEndReason.DEADLINE, self._next, "the time left ran out")
        except _FetchIsOver as over:
            end = over.end
        if self._computation is not None:
            self._computation.close()
        self._has_ended = True
        with contextlib.suppress(_FetchIsOver):
            async with self._while_it_reads("took no end"):
                await self._stream.send(end)
            while self._in_flight:
                await self._one_acknowledged()
            await asyncio.sleep(LINGER_S)

    async def _one_acknowledged(self) -> None:
        self._acknowledged.clear()
        async with self._while_it_reads("acknowledged nothing"):
            await self._acknowledged.wait()

    @contextlib.asynccontextmanager
    async def _while_it_reads(self, otherwise: str) -> AsyncIterator[None]:
        """Raises _FetchIsOver for a reader that does not read; nothing is held for it any more."""
        try:
            async with asyncio.timeout(READER_TIMEOUT_S):
                yield
        except TimeoutError:
            self._let_go()
            detail = f"the reader {otherwise} for {READER_TIMEOUT_S:g} s"
            raise _FetchIsOver(FetchEnd(FetchEndReason.DEADLINE, self._next, detail)) from None

    async def _compute_all(self) -> None:
        """For a reader that has no room yet."""
        while (num_sealed := self._pool.num_sealed_prefix(self._ids)) < len(self._ids):
            self._next = num_sealed
            await self._wait_for_a_block()

    async def _send_blocks(self, outlet: Outlet) -> None:
        pace = self._pace
        while self._next < len(self._ids):
            if len(self._in_flight) >= pace.num_in_flight:
                await self._one_acknowledged()
                continue
            if (count := self._pool.num_sealed_prefix(self._ids[self._next : self._next + pace.num_blocks])) > 0:
                await self._send_frame(outlet, count)
            else:
                await self._wait_for_a_block()

    async def _send_frame(self, outlet: Outlet, count: int) -> None:
        ids, form = self._ids[self._next : self._next + count], self._memory.format
        hold = self._pool.open_hold(f"frame of a fetch at block {self._next}")
        self._in_flight[self._frame_number] = hold
        slots = [slot for id_ in ids if (slot := hold.adopt(id_)) is not None]
        assert len(slots) == count, "nothing is evicted between two statements"
        self._memory.to_host(slots)
        header = pack_header(form, self._next, ids, self._source._digests.of(ids, slots))
        cargo = outlet.load(slots)
        frame = Frame(self._frame_number, header, cargo.payload, cargo.place)
        self._frame_number += 1
        self._next += count
        if self._source.link is not None:
            await self._source.link.pass_blocks(count)
        self._pace.sent(count, self._loop.now())
        async with self._while_it_reads("took no frame"):
            await self._stream.send(frame)
        self._source._counters.add("served_blocks", count)
        self._source._counters.add("served_bytes", count * form.block_bytes)

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
            if isinstance(message, FetchAck) and message.frame_number in self._in_flight:
                self._in_flight.pop(message.frame_number).close()
                self._pace.acknowledged(self._loop.now())
                self._acknowledged.set()
                self._loop.post(lambda: None)  # somebody may wait for this room

    async def _show_progress(self) -> None:
        """Of waiting and computing at once and at each change; of blocks that are all here only if sending them takes long."""
        is_here = self._pool.num_sealed_prefix(self._ids) == len(self._ids)
        shown = Doing(FetchState.SENDING) if is_here else None
        while True:
            if shown is not None:
                await self._state_is_another(shown)
            shown = self._state()
            if self._has_ended:
                await asyncio.get_running_loop().create_future()  # nothing follows the end
            if self._loop.is_advancing:
                progress = FetchProgress(
                    self._loop.step, shown.state, self._pool.num_sealed_prefix(self._ids), shown.is_reading
                )
                await self._stream.send(progress)

    async def _state_is_another(self, shown: Doing) -> None:
        """Returns after the interval at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROGRESS_INTERVAL_S):
                while self._state() == shown:
                    await self._loop.stepped.wait()

    def _state(self) -> Doing:
        computation = self._computation
        if computation is None or computation.has_ended:
            return Doing(FetchState.SENDING)
        return (
            Doing(FetchState.QUEUED) if computation.is_queued else Doing(FetchState.COMPUTING, computation.is_reading)
        )

"""Reading blocks from another worker into a sequence's reserved slots.

The road is agreed when the two first meet (kvferry/worker/meeting.py); notices, acknowledgements and the end go over the fetch stream.
A block is sealed only when it is whole, is the one asked for, and its digest has been checked over this worker's own copy. Whatever
goes wrong is a `FetchFailed` with a kind; the blocks that arrived stay. Stream and road are closed on every way out.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

from kvferry.engine.sequence import Sequence
from kvferry.errors import BadFrame, FetchFailed, RoadFailed
from kvferry.kv.frame import FrameBlock, check_block, unpack_header
from kvferry.kv.memory import BlockMemory
from kvferry.kv.road import Inlet
from kvferry.messages import (
    FetchAck,
    FetchDown,
    FetchEnd,
    FetchEndReason,
    FetchFailureKind,
    FetchOpen,
    FetchProgress,
    FetchUp,
    Frame,
    Source,
)
from kvferry.streams import Dialer, Stream, StreamEnded
from kvferry.worker.counters import Counters
from kvferry.worker.meeting import Meeting, Meetings
from kvferry.worker.patience import FetchBudgets, Patience

MAX_MEETINGS_PER_FETCH = 8
"""A source that is another one at each of so many meetings is not worth more."""


@dataclass(slots=True)
class FetchReport:
    """What a fetch brought so far; times are the event loop's."""

    opened_s: float
    source: Source
    first_block_s: float | None = None
    last_block_s: float | None = None
    num_blocks: int = 0
    num_bytes: int = 0
    num_source_cached_blocks: int = 0
    road: str = ""


class _MeetAgain(Exception):
    """The source is another one than was met."""


class BlockReader:
    """Fetches into one worker's memory."""

    def __init__(
        self, dialer: Dialer, memory: BlockMemory, meetings: Meetings, counters: Counters, budgets: FetchBudgets
    ):
        self._dialer, self._memory, self._meetings = dialer, memory, meetings
        self._counters, self._budgets = counters, budgets

    async def fetch(self, sequence: Sequence, opening: FetchOpen, report: FetchReport) -> None:
        """Returns when every block of `opening` is sealed in `sequence`; raises FetchFailed. Fills in `report`."""
        self._counters.add("fetches_started")
        try:
            for _ in range(MAX_MEETINGS_PER_FETCH):
                if await self._fetch_over_one_road(sequence, opening, report):
                    self._counters.add("fetches_finished")
                    return
            message = f"{report.source.worker_id} was another one at each of {MAX_MEETINGS_PER_FETCH} meetings"
            raise FetchFailed(FetchFailureKind.SOURCE_ERROR.value, message)
        except FetchFailed as failed:
            self._counters.add(f"fetch_failed_{failed.kind}")
            raise

    async def warm(self, source: Source, opening: FetchOpen) -> None:
        """Lets a source compute a chain for which there is no room here yet. Raises FetchFailed."""
        stream = self._dialer.fetch(source.address)
        try:
            await self._send_opening(stream, replace(opening, warm=True))
            patience = Patience(self._budgets, self._now())
            while not isinstance(await self._receive(stream, patience), FetchEnd):
                pass
        finally:
            stream.close()

    async def _fetch_over_one_road(self, sequence: Sequence, opening: FetchOpen, report: FetchReport) -> bool:
        """False: it is worth another meeting. What has arrived stays."""
        meeting = await self._meetings.with_source(report.source)
        ticket = secrets.token_bytes(16)
        opening = replace(
            opening,
            road=meeting.road.name,
            ticket=ticket,
            incarnation=meeting.incarnation,
            first_block=sequence.num_sealed_blocks,
        )
        stream = self._dialer.fetch(report.source.address)
        try:
            await self._send_opening(stream, opening)
            inlet = await meeting.enter(ticket)
            try:
                await self._receive_blocks(stream, inlet, meeting, sequence, opening, report)
            finally:
                inlet.close()
        except RoadFailed as failed:
            self._meetings.bar(meeting, failed.message)
            return False
        except _MeetAgain:
            self._meetings.forget(meeting)
            return False
        except FetchFailed as failed:
            if failed.kind == FetchFailureKind.UNREACHABLE.value:
                self._meetings.forget(meeting)
            raise
        finally:
            stream.close()
        return True

    async def _send_opening(self, stream: Stream[FetchUp, FetchDown], opening: FetchOpen) -> None:
        try:
            async with asyncio.timeout(self._budgets.silence_s):
                await stream.send(opening)
        except (StreamEnded, TimeoutError) as error:
            raise FetchFailed(FetchFailureKind.UNREACHABLE.value, f"the source cannot be reached: {error}") from error

    async def _receive_blocks(
        self,
        stream: Stream[FetchUp, FetchDown],
        inlet: Inlet,
        meeting: Meeting,
        sequence: Sequence,
        opening: FetchOpen,
        report: FetchReport,
    ) -> None:
        patience, has_heard = Patience(self._budgets, self._now()), False
        while True:
            message = await self._receive(stream, patience, has_heard)
            if isinstance(message, FetchProgress):
                if not has_heard:
                    already = max(message.num_sealed_blocks - opening.first_block, 0)
                    report.num_source_cached_blocks = max(report.num_source_cached_blocks, already)
            elif isinstance(message, Frame):
                report.road = meeting.road.name
                await self._take_frame(message, inlet, sequence, opening, report)
                with contextlib.suppress(StreamEnded):  # what has arrived can still be received; the end tells the rest
                    await stream.send(FetchAck(message.frame_number))
            elif isinstance(message, FetchEnd):
                self._check_end(message, sequence, opening)
                return
            has_heard = True

    async def _receive(
        self, stream: Stream[FetchUp, FetchDown], patience: Patience, has_heard: bool = False
    ) -> FetchDown:
        try:
            async with asyncio.timeout(max(patience.left_s(self._now()), 0)):
                message = await stream.receive()
        except TimeoutError as error:
            raise patience.run_out(self._now()) from error
        except StreamEnded as ended:
            kind = FetchFailureKind.STREAM_ENDED if has_heard else FetchFailureKind.UNREACHABLE
            raise FetchFailed(kind.value, f"the source ended the stream: {ended}") from ended
        patience.heard(message, self._now())
        return message

    async def _take_frame(
        self, frame: Frame, inlet: Inlet, sequence: Sequence, opening: FetchOpen, report: FetchReport
    ) -> None:
        """Copies, checks, seals. Nothing is taken from the pool before the bytes can be copied, so no copy outlives its slot."""
        form = self._memory.format
        try:
            wanted = sequence.block_ids[: len(opening.tokens) // form.block_size]
            blocks = unpack_header(frame.header, form, sequence.num_sealed_blocks, wanted)
            views = await inlet.unload(frame, len(blocks), form.block_bytes)
            try:
                for block, view in zip(blocks, views, strict=True):
                    self._seal_block(block, view, sequence, report)
            finally:
                _release(views)
        except BadFrame as bad:
            self._counters.add(f"bad_frame_{bad.kind}")
            raise FetchFailed(FetchFailureKind.BAD_FRAME.value, bad.message) from bad
        num_bytes = len(blocks) * form.block_bytes
        self._counters.add("fetched_bytes", num_bytes)
        self._counters.add(f"fetched_bytes_over_{report.road}", num_bytes)

    def _seal_block(self, block: FrameBlock, view: memoryview, sequence: Sequence, report: FetchReport) -> None:
        slot = sequence.hold.take()
        copy = self._memory.view(slot)
        copy[:] = view
        try:
            check_block(block, copy)
        except BadFrame:
            sequence.hold.put_back(slot)
            raise
        sequence.received(slot)
        report.last_block_s = self._now()
        report.first_block_s = report.first_block_s if report.first_block_s is not None else report.last_block_s
        report.num_blocks += 1
        report.num_bytes += self._memory.format.block_bytes
        self._counters.add("fetched_blocks")

    def _check_end(self, end: FetchEnd, sequence: Sequence, opening: FetchOpen) -> None:
        wanted = len(opening.tokens) // self._memory.format.block_size
        if end.reason is FetchEndReason.COMPLETE and sequence.num_sealed_blocks >= wanted:
            return
        if end.reason is FetchEndReason.STRANGER:
            raise _MeetAgain
        kinds = {FetchEndReason.MISSING: FetchFailureKind.MISSING, FetchEndReason.REFUSED: FetchFailureKind.REFUSED}
        kind = kinds.get(end.reason, FetchFailureKind.SOURCE_ERROR)
        message = f"the source ended with {end.reason.value} at block {end.first_missing_block}: {end.detail}"
        raise FetchFailed(kind.value, message)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _release(views: ListOf[memoryview]) -> None:
    """At once, so that a road can let go of the memory behind them."""
    for view in views:
        view.release()

"""Reading blocks from another worker into a sequence's reserved slots.

The road is agreed when the two first meet (kvferry/worker/meeting.py); notices, acknowledgements and the end go over the fetch stream.
A block is sealed only when it is whole, is the one asked for, and its digest has been checked over this worker's own copy. Whatever
goes wrong is a `FetchFailed` with a kind; the blocks that arrived stay. Stream and road are closed on every way out.
"""

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, replace

from kvferry.engine.sequence import Sequence
from kvferry.errors import BadFrame, FetchFailed, RoadFailed
from kvferry.kv.frame import FrameBlock, check_block, claimed_end, unpack_header
from kvferry.kv.memory import BlockMemory
from kvferry.kv.pool import Hold
from kvferry.kv.road import Inlet
from kvferry.messages import (
    FetchAck,
    FetchDown,
    FetchEnd,
    FetchEndReason,
    FetchFailureKind,
    FetchOpen,
    FetchProgress,
    FetchState,
    FetchUp,
    Frame,
    Source,
)
from kvferry.racing import until_first
from kvferry.streams import Dialer, Stream, StreamEnded
from kvferry.worker.copier import Copier
from kvferry.worker.counters import Counters
from kvferry.worker.digests import BlockDigests
from kvferry.worker.meeting import Meeting, Meetings
from kvferry.worker.patience import FetchBudgets, Patience
from kvferry.worker.rates import MeasuredRates

logger = logging.getLogger(__name__)

TURN_BYTES = 48 * 1024 * 1024
"""Copied and checked in one go; then the event loop has its turns: acknowledgements leave, and the next notice is there in time."""
LOOP_TURNS = 4
"""Of the event loop, until what grpc has received is with who waits for it, and what is to be sent is on its way."""
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


@dataclass(frozen=True, slots=True)
class _Arriving:
    """One fetch over one road."""

    meeting: Meeting
    sequence: Sequence
    hold: Hold
    """The sequence's when the fetch began. Once it is closed nobody wants the rest, and a cancellation is on its way."""
    opening: FetchOpen
    num_wanted: int
    """Blocks, those before the opening's first one included."""
    report: FetchReport
    inbox: asyncio.Queue[FetchDown | FetchFailed]
    outbox: asyncio.Queue[FetchUp]

    def check_wanted(self) -> None:
        if not self.hold.is_open:
            raise asyncio.CancelledError


async def _send_all(stream: Stream[FetchUp, FetchDown], outbox: asyncio.Queue[FetchUp]) -> None:
    """Beside receiving, which tells if the stream has ended."""
    with contextlib.suppress(StreamEnded):
        while True:
            await stream.send(await outbox.get())
    await asyncio.get_running_loop().create_future()


async def _let_others_run() -> None:
    for _ in range(LOOP_TURNS):
        await asyncio.sleep(0)


class BlockReader:
    """Fetches into one worker's memory."""

    def __init__(
        self,
        dialer: Dialer,
        memory: BlockMemory,
        digests: BlockDigests,
        meetings: Meetings,
        counters: Counters,
        budgets: FetchBudgets,
        rates: MeasuredRates | None = None,
    ):
        self._dialer, self._memory, self._digests, self._meetings = dialer, memory, digests, meetings
        self._counters, self._budgets, self._rates = counters, budgets, rates or MeasuredRates()
        self._copier = Copier()

    async def fetch(self, sequence: Sequence, opening: FetchOpen, report: FetchReport) -> None:
        """Returns when every block of `opening` is sealed in `sequence`, or, hold-only, when the source has no more.

        Raises FetchFailed. Fills in `report`.
        """
        self._counters.add("fetches_started")
        try:
            broken: set[tuple[str, str]] = set()
            for _ in range(MAX_MEETINGS_PER_FETCH):
                if await self._fetch_over_one_road(sequence, opening, report, broken):
                    self._counters.add("fetches_finished")
                    self._measure(report)
                    return
            message = f"{report.source.worker_id} was another one at each of {MAX_MEETINGS_PER_FETCH} meetings"
            raise FetchFailed(FetchFailureKind.SOURCE_ERROR.value, message)
        except FetchFailed as failed:
            self._counters.add(f"fetch_failed_{failed.kind}")
            had, wanted = sequence.num_sealed_blocks, len(opening.tokens) // self._memory.format.block_size
            logger.warning(
                "fetch from %s, %d of %d blocks here: %s", report.source.worker_id, had, wanted, failed.message
            )
            raise

    def _measure(self, report: FetchReport) -> None:
        if report.last_block_s is not None and report.num_source_cached_blocks >= report.num_blocks:
            duration_s = report.last_block_s - report.opened_s
            self._rates.fetched(report.source.worker_id, report.num_bytes, duration_s)

    async def warm(self, source: Source, opening: FetchOpen) -> None:
        """Lets a source compute a chain for which there is no room here yet. Raises FetchFailed."""
        stream = self._dialer.fetch(source.address)
        try:
            patience = Patience(self._budgets, self._now())
            with contextlib.suppress(StreamEnded, TimeoutError):  # receiving tells why
                async with asyncio.timeout(self._budgets.silence_s):
                    await stream.send(replace(opening, warm=True))
            while not isinstance(await self._receive(stream, patience), FetchEnd):
                pass
        finally:
            stream.close()

    async def _fetch_over_one_road(
        self, sequence: Sequence, opening: FetchOpen, report: FetchReport, broken: set[tuple[str, str]]
    ) -> bool:
        """False: it is worth another meeting. What has arrived stays. `broken`: lives and roads that broke in this fetch."""
        meeting = await self._meetings.with_source(report.source)
        if (meeting.incarnation, meeting.road.name) in broken:
            names = ", ".join(sorted(name for _, name in broken))
            message = f"every road to {report.source.worker_id} broke: {names}"
            raise FetchFailed(FetchFailureKind.ROAD.value, message)
        opening = replace(
            opening,
            road=meeting.road.name,
            ticket=secrets.token_bytes(16),
            incarnation=meeting.incarnation,
            first_block=sequence.num_sealed_blocks,
        )
        stream, has_all = self._dialer.fetch(report.source.address), False
        try:
            inbox: asyncio.Queue[FetchDown | FetchFailed] = asyncio.Queue(1)
            outbox: asyncio.Queue[FetchUp] = asyncio.Queue()
            outbox.put_nowait(opening)
            num_wanted = len(opening.tokens) // self._memory.format.block_size
            arriving = _Arriving(meeting, sequence, sequence.hold, opening, num_wanted, report, inbox, outbox)
            others = self._receive_ahead(stream, arriving), _send_all(stream, outbox)
            await until_first(*others, self._take_messages(arriving), awaits_others=False)
            has_all = True
        except RoadFailed as failed:
            self._meetings.bar(meeting, failed.message)
            broken.add((meeting.incarnation, meeting.road.name))
            return False
        except _MeetAgain:
            self._meetings.forget(meeting)
            return False
        except FetchFailed as failed:
            if failed.kind == FetchFailureKind.UNREACHABLE.value:
                self._meetings.forget(meeting)
            raise
        finally:
            if has_all:  # what waited for the blocks comes before the end of the call
                asyncio.get_running_loop().call_soon(stream.close)
            else:
                stream.close()
        return True

    async def _receive_ahead(self, stream: Stream[FetchUp, FetchDown], arriving: "_Arriving") -> None:
        """The next message is on its way while a frame is copied; a failure comes after all that arrived before it.

        Behind the end, and behind a frame that has the last blocks, nothing is awaited: a read that must be cut short would hold up the
        fetch that has all it wants.
        """
        patience, message, inbox = Patience(self._budgets, self._now()), None, arriving.inbox
        try:
            while not isinstance(message, FetchEnd):
                message = await self._receive(stream, patience, has_heard=message is not None)
                began = self._now()
                await inbox.put(message)
                if isinstance(message, Frame) and claimed_end(message.header) >= len(arriving.opening.tokens):
                    await inbox.join()  # and the fetch has ended, if that is true
                patience.rested(self._now() - began)
        except FetchFailed as failed:
            await inbox.put(failed)
        await asyncio.get_running_loop().create_future()

    async def _take_messages(self, arriving: "_Arriving") -> None:
        """What comes before a source says that it computes nobody computed for this fetch: it had that, or read it elsewhere."""
        await _let_others_run()  # the opening leaves before the road is entered
        inlet = await arriving.meeting.enter(arriving.opening.ticket)
        try:
            report, computes = arriving.report, False
            had_cached, had = report.num_source_cached_blocks, report.num_blocks  # over another road, before it broke
            while True:
                message = await arriving.inbox.get()
                if isinstance(message, FetchFailed):
                    raise message
                if isinstance(message, FetchProgress) and not computes:
                    computes = message.state is FetchState.COMPUTING and not message.is_reading
                    already = max(message.num_sealed_blocks - arriving.opening.first_block, 0)
                    report.num_source_cached_blocks = max(report.num_source_cached_blocks, had_cached + already)
                elif isinstance(message, Frame):
                    await self._take_frame(message, inlet, arriving)
                    if not computes:
                        report.num_source_cached_blocks = had_cached + report.num_blocks - had
                    if arriving.sequence.num_sealed_blocks >= arriving.num_wanted:
                        return  # closing the stream confirms the last frame, too
                    arriving.outbox.put_nowait(FetchAck(message.frame_number))
                    await _let_others_run()
                elif isinstance(message, FetchEnd):
                    self._check_end(message, arriving)
                    return
                arriving.inbox.task_done()
        finally:
            inlet.close()

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

    async def _take_frame(self, frame: Frame, inlet: Inlet, arriving: "_Arriving") -> None:
        """Copies, checks, seals. Nothing is taken from the pool before the bytes can be copied, so no copy outlives its slot."""
        form, sequence, report = self._memory.format, arriving.sequence, arriving.report
        report.road = arriving.meeting.road.name
        arriving.check_wanted()
        try:
            wanted = sequence.block_ids[: arriving.num_wanted]
            blocks = unpack_header(frame.header, form, sequence.num_sealed_blocks, wanted)
            await inlet.arrive(frame, len(blocks), form.block_bytes)
            arriving.check_wanted()
            await self._seal_blocks(blocks, inlet, arriving)
        except BadFrame as bad:
            self._counters.add(f"bad_frame_{bad.kind}")
            raise FetchFailed(FetchFailureKind.BAD_FRAME.value, bad.message) from bad

    async def _seal_blocks(self, blocks: list[FrameBlock], inlet: Inlet, arriving: "_Arriving") -> None:
        """In order, up to the first that is not what it should be, which is raised. No copy is under way when the loop has its turn."""
        num_turns = min(-(-len(blocks) * self._memory.format.block_bytes // TURN_BYTES), len(blocks))
        for turn in range(num_turns):
            if turn:
                await _let_others_run()
                arriving.check_wanted()
            first, last = (len(blocks) * border // num_turns for border in (turn, turn + 1))
            self._seal_at_once(range(first, last), blocks, inlet, arriving)

    def _seal_at_once(self, numbers: range, blocks: list[FrameBlock], inlet: Inlet, arriving: "_Arriving") -> None:
        """Those of the frame's blocks. What comes behind one that is bad is not sealed, though it was copied."""
        sequence, block_bytes = arriving.sequence, self._memory.format.block_bytes
        assert blocks[numbers.start].position == sequence.num_sealed_blocks, "only its fetch fills a sequence meanwhile"
        slots = [sequence.hold.take() for _ in numbers]
        faults: dict[int, BadFrame | RoadFailed] = {}

        def copy(k: int) -> None:
            own_copy = self._memory.view(slots[k])
            try:
                inlet.copy(numbers[k], own_copy)
                check_block(blocks[numbers[k]], own_copy)
            except (BadFrame, RoadFailed) as fault:
                faults[k] = fault

        if arriving.meeting.road.is_read_in_place:
            self._copier.each(copy, len(slots), len(slots) * block_bytes)
        else:  # the source needs the other core for its next frame
            for k in range(len(slots)):
                copy(k)
        num_good = min(faults, default=len(slots))
        self._memory.filled(slots[:num_good])
        for k, slot in zip(numbers[:num_good], slots, strict=False):
            sequence.received(slot)
            self._digests.keep(blocks[k].block_id, slot, blocks[k].digest)
        for slot in reversed(slots[num_good:]):
            sequence.hold.put_back(slot)
        if num_good:
            self._count(num_good, arriving.report)
        if faults:
            raise faults[num_good]

    def _count(self, num_sealed: int, report: FetchReport) -> None:
        report.last_block_s = self._now()
        if report.first_block_s is None:
            report.first_block_s = report.last_block_s
        num_bytes = num_sealed * self._memory.format.block_bytes
        report.num_blocks += num_sealed
        report.num_bytes += num_bytes
        self._counters.add("fetched_blocks", num_sealed)
        self._counters.add("fetched_bytes", num_bytes)
        self._counters.add(f"fetched_bytes_over_{report.road}", num_bytes)

    def _check_end(self, end: FetchEnd, arriving: "_Arriving") -> None:
        if end.reason is FetchEndReason.COMPLETE and arriving.sequence.num_sealed_blocks >= arriving.num_wanted:
            return
        if end.reason is FetchEndReason.MISSING and arriving.opening.hold_only:
            return  # it has given what it holds, which is all that was asked of it
        if end.reason is FetchEndReason.STRANGER:
            raise _MeetAgain
        kinds = {FetchEndReason.MISSING: FetchFailureKind.MISSING, FetchEndReason.REFUSED: FetchFailureKind.REFUSED}
        kind = kinds.get(end.reason, FetchFailureKind.SOURCE_ERROR)
        message = f"the source ended with {end.reason.value} at block {end.first_missing_block}: {end.detail}"
        raise FetchFailed(kind.value, message)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

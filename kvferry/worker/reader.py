"""Reading blocks from another worker into a sequence's reserved slots.

A block is sealed only when it is whole, is the one asked for, and its digest has been checked over this worker's own copy.
Whatever goes wrong is a `FetchFailed` with a kind; the blocks that arrived stay. The stream is closed on every way out.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from kvferry.engine.sequence import Sequence
from kvferry.errors import BadFrame, FetchFailed
from kvferry.kv.frame import check_block, unpack_frame
from kvferry.kv.memory import BlockMemory
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

SILENCE_S = 3.0
"""After so long without any message a source is taken for dead (its progress comes every second)."""


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


class BlockReader:
    """Fetches into one worker's memory."""

    def __init__(self, dialer: Dialer, memory: BlockMemory, counters: Counters, silence_s: float = SILENCE_S):
        self._dialer, self._memory, self._counters, self._silence_s = dialer, memory, counters, silence_s

    async def fetch(self, sequence: Sequence, opening: FetchOpen, report: FetchReport) -> None:
        """Returns when every block of `opening` is sealed in `sequence`; raises FetchFailed. Fills in `report`."""
        self._counters.add("fetches_started")
        stream = self._dialer.fetch(report.source.address)
        try:
            await self._send_opening(stream, opening)
            await self._receive_blocks(stream, sequence, opening, report)
            self._counters.add("fetches_finished")
        except FetchFailed as failed:
            self._counters.add(f"fetch_failed_{failed.kind}")
            raise
        finally:
            stream.close()

    async def _send_opening(self, stream: Stream[FetchUp, FetchDown], opening: FetchOpen) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                await stream.send(opening)
        except (StreamEnded, TimeoutError) as error:
            raise FetchFailed(FetchFailureKind.UNREACHABLE.value, f"the source cannot be reached: {error}") from error

    async def _receive_blocks(
        self, stream: Stream[FetchUp, FetchDown], sequence: Sequence, opening: FetchOpen, report: FetchReport
    ) -> None:
        has_heard = False
        while True:
            message = await self._receive(stream, has_heard)
            if isinstance(message, FetchProgress):
                if not has_heard:
                    already = max(message.num_sealed_blocks - opening.first_block, 0)
                    report.num_source_cached_blocks = already
            elif isinstance(message, Frame):
                self._seal_frame(message, sequence, opening, report)
                with contextlib.suppress(StreamEnded):  # what has arrived can still be received; the end tells the rest
                    await stream.send(FetchAck(message.frame_number))
            else:
                self._check_end(message, sequence, opening)
                return
            has_heard = True

    async def _receive(self, stream: Stream[FetchUp, FetchDown], has_heard: bool) -> FetchDown:
        try:
            async with asyncio.timeout(self._silence_s):
                return await stream.receive()
        except TimeoutError as error:
            message = f"the source was silent for {self._silence_s:g} s"
            raise FetchFailed(FetchFailureKind.SILENT.value, message) from error
        except StreamEnded as ended:
            kind = FetchFailureKind.STREAM_ENDED if has_heard else FetchFailureKind.UNREACHABLE
            raise FetchFailed(kind.value, f"the source ended the stream: {ended}") from ended

    def _seal_frame(self, frame: Frame, sequence: Sequence, opening: FetchOpen, report: FetchReport) -> None:
        now = asyncio.get_running_loop().time()
        try:
            wanted = sequence.block_ids[: len(opening.tokens) // self._memory.format.block_size]
            first = sequence.num_sealed_blocks
            blocks = unpack_frame(frame.header, frame.payload, self._memory.format, first, wanted)
            for block in blocks:
                slot = sequence.hold.take()
                copy = self._memory.view(slot)
                copy[:] = block.data
                try:
                    check_block(block, copy)
                except BadFrame:
                    sequence.hold.put_back(slot)
                    raise
                sequence.received(slot)
                report.num_blocks += 1
                self._counters.add("fetched_blocks")
        except BadFrame as bad:
            self._counters.add(f"bad_frame_{bad.kind}")
            raise FetchFailed(FetchFailureKind.BAD_FRAME.value, bad.message) from bad
        report.first_block_s = report.first_block_s if report.first_block_s is not None else now
        report.last_block_s = now
        report.num_bytes += len(frame.payload)
        self._counters.add("fetched_bytes", len(frame.payload))

    def _check_end(self, end: FetchEnd, sequence: Sequence, opening: FetchOpen) -> None:
        wanted = len(opening.tokens) // self._memory.format.block_size
        if end.reason is FetchEndReason.COMPLETE and sequence.num_sealed_blocks >= wanted:
            return
        kinds = {FetchEndReason.MISSING: FetchFailureKind.MISSING, FetchEndReason.REFUSED: FetchFailureKind.REFUSED}
        kind = kinds.get(end.reason, FetchFailureKind.SOURCE_ERROR)
        message = f"the source ended with {end.reason.value} at block {end.first_missing_block}: {end.detail}"
        raise FetchFailed(kind.value, message)

"""Which road two workers take, found out once: when a reader first meets a source, and again when either's memory is another.

The source says what it offers; the reader tries its own roads in their order with one frame of whatever the first slots hold, keeps
the first that works, and says in the log which that was, at what rate, and why not a better one. A road that breaks later comes last
for a while. Fetches that meet the same source at the same time share one meeting.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import BadFrame, FetchFailed, RoadFailed
from kvferry.kv.frame import PROBE_IDS, unpack_header
from kvferry.kv.memory import BlockFormat
from kvferry.kv.road import Inlet, Road
from kvferry.messages import (
    FetchAck,
    FetchDown,
    FetchEnd,
    FetchFailureKind,
    FetchMeet,
    FetchOffers,
    FetchProbe,
    FetchUp,
    Frame,
    Source,
)
from kvferry.streams import Dialer, Stream, StreamEnded
from kvferry.worker.rates import MeasuredRates

logger = logging.getLogger(__name__)

PROBE_BYTES = 2 * 1024 * 1024
"""Enough to tell roads apart; the first request of a pair on a slow line waits for it."""
MAX_PROBE_BLOCKS = 64
"""Blocks so small that more of them would fit are a simulated model's, whose link takes the time of the true ones."""
MAX_MEETINGS = 4096
BARRED_S = 60.0
"""A road that broke comes after all others for so long, and so does a meeting that took another road because of it."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a reader knows of a source, and how it takes blocks from it."""

    source: Source
    incarnation: str
    road: Road
    offer: bytes
    until_s: float
    """Then the two meet again: a better road broke, and may work again."""

    async def enter(self, ticket: bytes) -> Inlet:
        """Raises RoadFailed."""
        return await self.road.enter(self.offer, ticket)


class Meetings:
    """One reader's, by source address."""

    def __init__(
        self,
        dialer: Dialer,
        block_format: BlockFormat,
        roads: Sequence[Road],
        model_id: str,
        fidelity: str,
        silence_s: float,
        rates: MeasuredRates | None = None,
    ):
        self._rates = rates or MeasuredRates()
        self._dialer, self._format, self._roads, self._silence_s = dialer, block_format, roads, silence_s
        self._greeting = FetchMeet(model_id, fidelity)
        self._probe_blocks = min(max(PROBE_BYTES // block_format.block_bytes, 1), MAX_PROBE_BLOCKS)
        self._meetings: dict[str, Meeting] = {}
        self._barred: dict[tuple[str, str, str], float] = {}  # until when, by address, life and road
        self._ongoing: dict[str, asyncio.Future[FetchFailed | None]] = {}

    async def with_source(self, source: Source) -> Meeting:
        """Raises FetchFailed: it cannot be reached, or no road to it works."""
        address = source.address
        while (meeting := self._meetings.get(address)) is None or meeting.until_s <= self._now():
            ongoing = self._ongoing.get(address)
            if ongoing is None:
                return await self._meet_for_all(source)
            failed = await asyncio.shield(ongoing)
            if failed is not None:
                raise FetchFailed(failed.kind, failed.message)
        return meeting

    async def _meet_for_all(self, source: Source) -> Meeting:
        """Who wants to meet the same source meanwhile shares this meeting, or its failure."""
        ongoing: asyncio.Future[FetchFailed | None] = asyncio.get_running_loop().create_future()
        self._ongoing[source.address] = ongoing
        failed: FetchFailed | None = None
        try:
            meeting = self._meetings[source.address] = await self._meet(source)
            self._forget_the_oldest()
            return meeting
        except FetchFailed as error:
            failed = error
            raise
        finally:
            del self._ongoing[source.address]
            ongoing.set_result(failed)

    def forget(self, meeting: Meeting) -> None:
        """The source is not the one that was met."""
        if self._meetings.get(meeting.source.address) is meeting:
            del self._meetings[meeting.source.address]

    def bar(self, meeting: Meeting, why: str) -> None:
        """The road broke: another one is found at the next meeting."""
        logger.warning("%s to %s broke: %s; trying another road", meeting.road.name, meeting.source.worker_id, why)
        self._barred[meeting.source.address, meeting.incarnation, meeting.road.name] = self._now() + BARRED_S
        self.forget(meeting)

    def _forget_the_oldest(self) -> None:
        while len(self._meetings) > MAX_MEETINGS:
            del self._meetings[next(iter(self._meetings))]
        if len(self._barred) > MAX_MEETINGS:
            self._barred.clear()

    async def _meet(self, source: Source) -> Meeting:
        stream = self._dialer.fetch(source.address)
        try:
            async with asyncio.timeout(self._silence_s):
                await stream.send(self._greeting)
                answer = await stream.receive()
            if isinstance(answer, FetchEnd):
                kind = FetchFailureKind.REFUSED
                raise FetchFailed(kind.value, f"{source.worker_id} refused to meet: {answer.detail}")
            if not isinstance(answer, FetchOffers):
                raise FetchFailed(
                    FetchFailureKind.SOURCE_ERROR.value, f"{source.worker_id} does not say what it offers"
                )
            return await self._find_road(source, answer, stream)
        except (StreamEnded, TimeoutError) as error:
            message = f"{source.worker_id} at {source.address} cannot be reached: {str(error) or 'no answer'}"
            raise FetchFailed(FetchFailureKind.UNREACHABLE.value, message) from error
        finally:
            stream.close()

    async def _find_road(self, source: Source, answer: FetchOffers, stream: Stream[FetchUp, FetchDown]) -> Meeting:
        offers = {offer.road: offer.detail for offer in answer.offers}
        why_not: list[str] = []
        keys = {road.name: (source.address, answer.incarnation, road.name) for road in self._roads}
        barred = {name: until for name, key in keys.items() if (until := self._barred.get(key, 0.0)) > self._now()}
        why_not += [f"{name}: broke a moment ago" for name in barred]
        for road in sorted(self._roads, key=lambda road: road.name in barred):
            if road.name not in offers:
                why_not.append(f"{road.name}: not offered")
                continue
            try:
                rate = await self._probe(road, offers[road.name], stream)
            except (RoadFailed, BadFrame) as failed:
                why_not.append(f"{road.name}: {failed.message}")
                continue
            self._rates.probed(source.worker_id, rate)
            reasons = f" ({'; '.join(why_not)})" if why_not else ""
            logger.info("blocks of %s come over %s, %.2f GB/s%s", source.worker_id, road.name, rate / 1e9, reasons)
            until_s = min((until for name, until in barred.items() if name != road.name), default=float("inf"))
            return Meeting(source, answer.incarnation, road, offers[road.name], until_s)
        message = f"no road to {source.worker_id} works: {'; '.join(why_not)}"
        raise FetchFailed(FetchFailureKind.ROAD.value, message)

    async def _probe(self, road: Road, offer: bytes, stream: Stream[FetchUp, FetchDown]) -> float:
        """Bytes per second. Raises RoadFailed, BadFrame, StreamEnded, TimeoutError."""
        clock = asyncio.get_running_loop().time
        block_bytes, ticket = self._format.block_bytes, secrets.token_bytes(16)
        inlet = await road.enter(offer, ticket)
        try:
            began = clock()
            await stream.send(FetchProbe(road.name, ticket, self._probe_blocks))
            try:
                async with asyncio.timeout(self._silence_s):
                    frame = await stream.receive()
            except TimeoutError as error:
                raise RoadFailed(
                    f"{self._probe_blocks * block_bytes:,} bytes did not come within {self._silence_s:g} s"
                ) from error
            if not isinstance(frame, Frame):
                raise StreamEnded("the source sent no frame to try a road with")
            try:
                num_bytes = await self._copy(inlet, frame)
            finally:
                await stream.send(FetchAck(frame.frame_number))
            return num_bytes / max(clock() - began, 1e-6)
        finally:
            inlet.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _copy(self, inlet: Inlet, frame: Frame) -> int:
        """Bytes. Nothing is kept, so no digest is checked."""
        block_bytes = self._format.block_bytes
        blocks = unpack_header(frame.header, self._format, 0, PROBE_IDS)
        await inlet.arrive(frame, len(blocks), block_bytes)
        scratch = memoryview(bytearray(block_bytes))
        for number in range(len(blocks)):
            inlet.copy(number, scratch)
        return len(blocks) * block_bytes

"""The router's one stream to a decode worker: openings and cancellations up, tokens down, life both ways.

It dials again while the worker is a member; every end of the stream is told once, and the dispatcher then places what ran there
elsewhere. Knows no journal and no client.
"""

import asyncio
import logging
from collections import deque
from typing import Protocol

from kvferry.bell import Bell
from kvferry.messages import Beat, DecodeMessage, RouterMessage, StepOutput
from kvferry.racing import until_first
from kvferry.streams import Dialer, Stream, StreamEnded
from router.members import Member

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
SILENCE_S = 3.0
REDIAL_S = 0.5


class Listener(Protocol):
    """The dispatcher, as the link sees it."""

    def attached(self, member: Member) -> None: ...

    def output(self, member: Member, output: StepOutput) -> None: ...

    def detached(self, member: Member, reason: str) -> None: ...


class DecodeLink:
    def __init__(self, dialer: Dialer, member: Member, listener: Listener, silence_s: float = SILENCE_S):
        self._dialer, self._member, self._listener, self._silence_s = dialer, member, listener, silence_s
        self._outbox: deque[RouterMessage] = deque()
        self._has_mail = Bell()

    def send(self, message: RouterMessage) -> None:
        """Never waits: the outbox holds no more than the requests that were placed here, and their ends."""
        self._outbox.append(message)
        self._has_mail.ring()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            reason = await self._run_once()
            if self._member.is_attached:
                logger.warning("lost the stream to %s: %s", self._member.worker_id, reason)
            self._outbox.clear()
            self._listener.detached(self._member, reason)
            await asyncio.sleep(REDIAL_S)

    async def _run_once(self) -> str:
        """Returns why the stream ended."""
        stream = self._dialer.attach(self._member.description.address)
        try:
            await until_first(self._send(stream), self._receive(stream))
        except StreamEnded as ended:
            return str(ended)
        except TimeoutError:
            return f"silent for {self._silence_s:g} s"
        finally:
            stream.close()
        return "ended"

    async def _send(self, stream: Stream[RouterMessage, DecodeMessage]) -> None:
        loop = asyncio.get_running_loop()
        next_beat = loop.time()
        while True:
            if loop.time() >= next_beat:
                await stream.send(Beat())
                next_beat = loop.time() + BEAT_INTERVAL_S
            elif self._outbox:
                await stream.send(self._outbox.popleft())
            else:
                await self._has_mail.wait(max(next_beat - loop.time(), 0.001))

    async def _receive(self, stream: Stream[RouterMessage, DecodeMessage]) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                message = await stream.receive()
            if not self._member.is_attached:
                self._listener.attached(self._member)
            if isinstance(message, StepOutput):
                self._listener.output(self._member, message)

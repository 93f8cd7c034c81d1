"""The router's one stream to a decode worker: openings and cancellations up, tokens down, life both ways.

It dials again while the worker is a member; every end of the stream is told once, and the dispatcher then places what ran there
elsewhere. Knows no journal and no client.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvferry.bell import Bell
from kvferry.messages import Beat, DecodeMessage, RouterMessage, StepOutput
from kvferry.racing import until_first
from kvferry.streams import Dialer, Stream, StreamEnded
from router.begun import Begun
from router.members import Member

BEAT_INTERVAL_S = 1.0
SILENCE_S = 3.0
REDIAL_S = 0.5


class Listener(Protocol):
    """The dispatcher, as the link sees it."""

    def attached(self, member: Member) -> None: ...

    def output(self, member: Member, output: StepOutput) -> None: ...

    def detached(self, member: Member, reason: str, may_have_died: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkEnd:
    reason: str
    may_have_died: bool
    """The stream broke; a silent worker may be frozen, but its process is there."""


class DecodeLink:
    def __init__(
        self, dialer: Dialer, member: Member, listener: Listener, router_life: str, silence_s: float = SILENCE_S
    ):
        self._dialer, self._member, self._listener, self._silence_s = dialer, member, listener, silence_s
        self._beat = Beat(router_life=router_life)
        self._outbox: deque[RouterMessage] = deque()
        self._has_mail = Bell()
        self._idle: Stream[RouterMessage, DecodeMessage] | None = None
        """The stream whose sender has nothing to do."""
        self._begun: Begun | None = None
        """A message on its way there, which the sender does not know of yet."""

    def send(self, message: RouterMessage) -> None:
        """Never waits: the outbox holds no more than the requests that were placed here, and their ends."""
        if not self._begin(message):
            self._outbox.append(message)
        self._has_mail.ring()

    def _begin(self, message: RouterMessage) -> bool:
        """Puts it on the wire in this very turn: until the sender's, a front door would be at work for its client."""
        stream, self._idle = self._idle, None
        if stream is None:
            return False
        try:
            self._begun = Begun(stream.send(message))
        except (StreamEnded, asyncio.CancelledError):
            return False  # the sender meets the same end
        return True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            end = await self._run_once()
            self._outbox.clear()
            self._listener.detached(self._member, end.reason, end.may_have_died)
            await asyncio.sleep(REDIAL_S)

    async def _run_once(self) -> LinkEnd:
        """Returns why the stream ended."""
        stream = self._dialer.attach(self._member.description.address)
        try:
            await until_first(self._send(stream), self._show_life(), self._receive(stream))
        except StreamEnded as ended:
            return LinkEnd(str(ended), may_have_died=True)
        except TimeoutError:
            return LinkEnd(f"silent for {self._silence_s:g} s", may_have_died=False)
        finally:
            self._idle = None
            if self._begun is not None:
                self._begun.close()
                self._begun = None
            stream.close()
        return LinkEnd("ended", may_have_died=True)

    async def _send(self, stream: Stream[RouterMessage, DecodeMessage]) -> None:
        await stream.send(self._beat)
        while True:
            if self._begun is not None:
                begun, self._begun = self._begun, None
                await begun
            elif self._outbox:
                await stream.send(self._outbox.popleft())
            else:
                self._idle = stream
                await self._has_mail.wait()

    async def _show_life(self) -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            self.send(self._beat)

    async def _receive(self, stream: Stream[RouterMessage, DecodeMessage]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._silence_s) as patience:
            while True:
                message = await stream.receive()
                patience.reschedule(loop.time() + self._silence_s)
                if not self._member.is_attached:
                    self._listener.attached(self._member)
                if isinstance(message, StepOutput):
                    self._listener.output(self._member, message)

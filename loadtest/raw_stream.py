"""One HTTP connection that streams completions and reads no more of an answer than will time it.

For loads under which an ordinary client would be the limit: it counts events in the bytes as they come, and looks only at the last of
them for the usage. Speaks to any OpenAI-style server, so that all contenders meet the same client. A connection is kept, and carries
one request at a time.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

EVENT, DONE, LAST_CHUNK = b"data: {", b"data: [DONE]", b"\r\n0\r\n\r\n"
TAIL_BYTES = 2048
"""Kept of an answer's end: the usage chunk is in it."""
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
INSTANTS = re.compile(rb'"instants_ms": ?(\{[^}]*\})')
LOST = 0
"""In place of a status: the connection did not last until the end of the answer."""


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """Instants are seconds of `time.perf_counter()`, the same in all processes of a host."""

    status: int
    sent_s: float
    first_s: float
    """Of the first event, or of the first bytes of what is no stream."""
    ended_s: float
    num_events: int = 0
    """With text or token ids: the usage chunk is none."""
    num_tokens: int = 0
    """As the usage says; the events without one."""
    is_whole: bool = False
    """It ended with `[DONE]`."""
    worker_s: float | None = None
    """What a kvferry worker took, from the request's arrival there to its first token; None without the server's own instants."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.ended_s - self.first_s) / max(self.num_tokens - 1, 1)


class RawConnection(asyncio.Protocol):
    """`ask` after `open_connection`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[RawAnswer] | None = None
        self._begin()

    def _begin(self) -> None:
        self._sent_s = self._first_s = 0.0
        self._status = self._num_events = self._length = 0
        self._tail = b""
        self._is_chunked = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> RawAnswer:
        """Never raises for what the server does. Cancelled, it leaves the answer unread and the connection closed."""
        assert self._transport is not None
        self._begin()
        self._answered = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(request)
        try:
            return await self._answered
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._end(LOST)

    def data_received(self, data: bytes) -> None:
        if not self._status:
            data = self._after_head(data)
        seen = self._tail[-len(EVENT) + 1 :] + data if self._status else data
        if self._is_chunked and (count := seen.count(EVENT)):
            self._num_events += count
            self._first_s = self._first_s or time.perf_counter()
        self._length -= len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._status and (self._tail.endswith(LAST_CHUNK) if self._is_chunked else self._length <= 0):
            self._first_s = self._first_s or time.perf_counter()
            self._end(self._status)

    def _after_head(self, data: bytes) -> bytes:
        """What follows the head, once it is there; until then all that has come, to be looked at again."""
        head, found, rest = (self._tail + data).partition(b"\r\n\r\n")
        self._tail = b""
        if not found:
            return head
        fields = head.lower()
        self._status = int(head[9:12])
        self._is_chunked = b"transfer-encoding: chunked" in fields
        length = re.search(rb"content-length: ?(\d+)", fields)
        self._length = int(length[1]) if length else 0
        return rest

    def _end(self, status: int) -> None:
        answered, self._answered = self._answered, None
        if answered is None or answered.done():
            return
        ended_s, usage = time.perf_counter(), COMPLETION_TOKENS.search(self._tail)
        answered.set_result(
            RawAnswer(
                status,
                self._sent_s,
                self._first_s or ended_s,
                ended_s,
                self._num_events - 1 if usage else self._num_events,
                int(usage[1]) if usage else self._num_events,
                status != LOST and DONE in self._tail,
                _worker_s(self._tail),
            )
        )


def _worker_s(tail: bytes) -> float | None:
    found = INSTANTS.search(tail)
    if found is None:
        return None
    instants_ms: dict[str, float] = json.loads(found[1])
    if not instants_ms.keys() >= {"placed", "first_token"}:
        return None
    return (instants_ms["first_token"] - instants_ms["placed"]) / 1e3


async def open_connection(url: str) -> RawConnection:
    """Raises OSError if nothing listens there."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    _, connection = await asyncio.get_running_loop().create_connection(RawConnection, host, port)
    return connection


def completion_request(model: str, prompt: str | list[int], max_tokens: int, **more: Any) -> bytes:
    """Head and body of a streamed completion that has its usage in the end."""
    fixed = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    wanted = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    body = json.dumps({**fixed, **wanted, **more}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)

"""Many HTTP clients at once, on an event loop and a thread of their own, so that what a test does meanwhile does not delay them.

A client opens a connection for its request, reads the answer whole or event by event, notes when each event came, and never raises for
what the server does: an `Answer` says how it ended. Cancelled, it closes its connection, with FIN or RST.
"""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

MAX_LINE = 4 * 1024 * 1024


@dataclass(slots=True)
class Answer:
    """Dictionaries are by choice. Instants are of `time.monotonic()`."""

    sent_s: float
    status: int = 0
    """0: the connection did not last until the head of an answer."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: Any = None
    """Of an answer that is no stream."""
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    text: dict[int, str] = field(default_factory=dict[int, str])
    finish: dict[int, str] = field(default_factory=dict[int, str])
    logprobs: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    instants_s: list[float] = field(default_factory=list[float])
    """Of the events."""
    usage: dict[str, Any] | None = None
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    """kvferry's own, of the first prompt."""
    error: dict[str, Any] | None = None
    is_whole: bool = False
    ended_s: float = 0.0

    @property
    def said(self) -> tuple[Any, ...]:
        """What must not depend on what befell the workers."""
        return self.status, self.error, self.is_whole, self.tokens, self.text, self.finish, self.logprobs

    @property
    def longest_gap_s(self) -> float:
        """That a reader saw between two events."""
        return max((b - a for a, b in zip(self.instants_s, self.instants_s[1:], strict=False)), default=0.0)

    @property
    def tpot_s(self) -> float:
        return (self.instants_s[-1] - self.instants_s[0]) / max(len(self.instants_s) - 1, 1)

    @property
    def retry_after_s(self) -> int:
        return int(self.headers.get("retry-after", "0"))

    def take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        self.tokens.setdefault(index, []).extend(choice.get("token_ids", ()))
        self.text[index] = self.text.get(index, "") + choice["text"]
        if choice["logprobs"] is not None:
            self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"] is not None:
            assert index not in self.finish, "a choice ends twice"
            self.finish[index] = choice["finish_reason"]

    def take_end(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        if chunk.get("kvferry"):
            self.numbers = chunk["kvferry"][0]


def body_of(prompt: Any, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    """A greedy stream with everything in it that can be compared, unless `fields` say otherwise."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    if fields.get("stream", True):
        fixed["stream_options"] = {"include_usage": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **fixed, **fields}


def request_of(body: dict[str, Any], **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


class Crowd:
    """Use `crowd()`."""

    def __init__(self, url: str):
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def ask(self, body: dict[str, Any], url: str = "", reset: bool = False, **headers: str) -> Future[Answer]:
        """`url`: of another router. `reset`: a cancelled client says so with RST instead of FIN."""
        work = _ask(address_of(url or self.url), request_of(body, **headers), reset)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask_all(self, bodies: list[dict[str, Any]], **more: Any) -> list[Future[Answer]]:
        return [self.ask(body, **more) for body in bodies]

    @contextlib.contextmanager
    def running(self) -> Iterator["Crowd"]:
        self._thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def crowd(url: str) -> "contextlib.AbstractContextManager[Crowd]":
    return Crowd(url).running()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _ask(address: tuple[str, int], request: bytes, reset: bool) -> Answer:
    answer = Answer(time.monotonic())
    try:
        reader, writer = await asyncio.open_connection(*address, limit=MAX_LINE)
    except OSError:
        answer.ended_s = time.monotonic()
        return answer
    try:
        writer.write(request)
        await _read(reader, answer)
    except (OSError, asyncio.IncompleteReadError):
        pass
    except asyncio.CancelledError:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise
    finally:
        answer.ended_s = time.monotonic()
        writer.close()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in head[1:] if line)
    answer.headers = {name.lower(): value for name, _, value in pairs}
    answer.status = int(head[0].split()[1])
    if "content-length" in answer.headers:
        answer.body = json.loads(await reader.readexactly(int(answer.headers["content-length"])))
        answer.take_end(answer.body)
        for choice in answer.body.get("choices", ()):
            answer.take_choice(choice)
        answer.is_whole = True
        return
    while line := await reader.readline():  # an event is never split by a chunk's frame
        if line == b"data: [DONE]\n":
            answer.is_whole = True
        elif line.startswith(b"data: "):
            assert not answer.is_whole, "something follows [DONE]"
            chunk = json.loads(line[6:])
            answer.take_end(chunk)
            for choice in chunk.get("choices", ()):
                answer.take_choice(choice)
                answer.instants_s.append(time.monotonic())

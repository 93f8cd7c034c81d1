"""A made-up service over real sockets: ready, and each completion is answered in the way whose turn it is."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

FIRST_TEXT_S = 0.15
DONE = "data: [DONE]\n\n"


def event(text: str = "", finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish}]})}\n\n"


def usage(count: int) -> str:
    return f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': count}, 'kvferry': [{'seed': 1}]})}\n\n"


def parts_of(kind: str) -> list[str | float]:
    """What is written, and the seconds waited in between."""
    texts: list[str | float] = [event("a") for _ in range(5)]
    return {
        "good": [event(), FIRST_TEXT_S, *texts, event("z", "length"), FIRST_TEXT_S, usage(6), DONE],
        "korean": [event("서"), event("울"), event(".", "length"), usage(7), DONE],  # two or three tokens an event
        "error": [event(), *texts, 'data: {"error": {"message": "the worker was lost"}}\n\n'],
        "cut": [event(), *texts],
        "empty": [],
        "eos": [event("", "stop"), usage(1), DONE],
    }[kind]


BROKEN = ("good", "error", "good", "cut", "error", "429", "good", "empty", "error", "good")
"""Of ten: four are good."""


class StubService:
    """`kinds[n % len(kinds)]` answers the n-th request to arrive."""

    def __init__(self, kinds: Sequence[str]):
        self._kinds, self.num_requests = kinds, 0
        self.url = ""
        self.hold = asyncio.Event()
        self.hold.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        kind = self._kinds[self.num_requests % len(self._kinds)]
        self.num_requests += 1
        await self.hold.wait()
        status = b"429 Too Many Requests" if kind == "429" else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n")
        for part in [] if kind == "429" else parts_of(kind):
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part.encode())
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def stub_service(kinds: Sequence[str]) -> AsyncIterator[StubService]:
    stub = StubService(kinds)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    async with server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub

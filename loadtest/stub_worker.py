"""An engine's front without an engine: what other routers forward to when they are measured.

One clock for all streams, as a decode worker's steps: at the end of each, every live stream has one event; an idle one begins a step
when it is asked. So a router in front of it gets
what ours gets from a simulated worker, in its own protocol. `python -m loadtest.stub_worker PORT STEP_MS`; answers `/health`,
`/v1/models` and any POST, whose `max_tokens` it keeps to.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable

CHUNK = {"id": "x", "object": "text_completion", "created": 0, "model": "stub"}
MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "root": "stub", "max_model_len": 8192}]}
MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _event(text: str) -> bytes:
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    return _chunk(b"data: %s\n\n" % json.dumps({**CHUNK, "choices": choices}).encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _plain(body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


EVENT = _event(" token")
END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class StubConnection(asyncio.Protocol):
    def __init__(self, live: dict["StubConnection", int], has_begun: Callable[[], None]):
        self._live, self._has_begun = live, has_begun
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._live.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: ?(\d+)", head.lower())
        if not found or (length and len(body) < int(length[1])):
            return
        self._received = b""
        if head.startswith(b"GET"):
            self.write(_plain(MODELS if b"models" in head.partition(b"\r\n")[0] else {}))
            return
        asked = MAX_TOKENS.search(body)
        self._live[self] = int(asked[1]) if asked else 64
        self.write(STREAM_HEAD)
        self._has_begun()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def serve(port: int, step_s: float, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Until cancelled."""
    live: dict[StubConnection, int] = {}
    work, loop = asyncio.Event(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: StubConnection(live, work.set), "127.0.0.1", port, backlog=512)
    on_listening(server.sockets[0].getsockname()[1])
    async with server:
        while True:
            await work.wait()
            work.clear()
            ends_at = loop.time()
            while live:
                ends_at = max(ends_at + step_s, loop.time())
                await asyncio.sleep(ends_at - loop.time())
                _step(live)


def _step(live: dict[StubConnection, int]) -> None:
    for connection, left in list(live.items()):
        if left > 1:
            live[connection] = left - 1
            connection.write(EVENT)
        else:
            del live[connection]
            connection.write(EVENT + END)


def main() -> None:
    port, step_s = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    asyncio.run(serve(port, step_s))


if __name__ == "__main__":
    main()

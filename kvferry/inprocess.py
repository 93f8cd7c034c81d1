"""Links within one process and one event loop: the reference implementation of kvferry/streams.py.

Messages are handed over as they are. `Network` is a `Dialer` whose addresses are names; a served stream runs as a task of the
network's task group. Its faults (`kill`, `freeze`) are what a real network and real processes do: a killed address ends every
stream and refuses new ones, a frozen one lets nothing pass, either way, until it is thawed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from kvferry.bell import Bell
from kvferry.streams import DecodeServer, FetchServer, RegistryServer, StreamEnded

QUEUE_LENGTH = 64


class _Pipe:
    """One direction: a bounded queue that can end."""

    def __init__(self, can_pass: Callable[[], bool]):
        self._messages: deque[Any] = deque()
        self._can_pass = can_pass
        self._ended: StreamEnded | None = None
        self._changed = Bell()

    async def put(self, message: Any) -> None:
        while self._ended is None and len(self._messages) >= QUEUE_LENGTH:
            await self._changed.wait()
        if self._ended is not None:
            raise StreamEnded(self._ended.message, self._ended.status)
        self._messages.append(message)
        self._changed.ring()

    async def get(self) -> Any:
        while not (self._can_pass() and (self._messages or self._ended)):
            await self._changed.wait()
        self._changed.ring()
        if self._messages:
            return self._messages.popleft()
        assert self._ended is not None
        raise StreamEnded(self._ended.message, self._ended.status)

    def end(self, ended: StreamEnded) -> None:
        self._ended = self._ended or ended
        self._changed.ring()

    def wake(self) -> None:
        self._changed.ring()


class InProcessStream:
    """One side. Closing it ends both directions; what was sent before can still be received."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe, on_close: Callable[[StreamEnded], None]):
        self._outgoing, self._incoming, self._on_close = outgoing, incoming, on_close

    async def send(self, message: Any) -> None:
        await self._outgoing.put(message)

    async def receive(self) -> Any:
        return await self._incoming.get()

    def close(self) -> None:
        self._on_close(StreamEnded("closed", "CANCELLED"))


class _Link:
    """Both sides of one stream, and the task that serves it."""

    def __init__(self, network: "Network", address: str, serve: Callable[[InProcessStream], Awaitable[None]]):
        self.address = address
        self._up, self._down = (_Pipe(lambda: not network.is_frozen(address)) for _ in range(2))
        self.client = InProcessStream(self._up, self._down, self.end)
        self._server = InProcessStream(self._down, self._up, self.end)
        self._task = network.group.create_task(self._serve(serve))
        self._task.add_done_callback(lambda _: network.links.pop(self, None))

    async def _serve(self, serve: Callable[[InProcessStream], Awaitable[None]]) -> None:
        try:
            await serve(self._server)
            self._finish(StreamEnded("the server ended the stream"))
        except StreamEnded as ended:
            self._finish(ended)
        except TimeoutError:
            self._finish(StreamEnded("the server waited too long", "DEADLINE_EXCEEDED"))
        finally:
            self._finish(StreamEnded("the server ended the stream", "CANCELLED"))

    def _finish(self, ended: StreamEnded) -> None:
        self._up.end(ended)
        self._down.end(ended)

    def end(self, ended: StreamEnded) -> None:
        self._finish(ended)
        self._task.cancel()

    def wake(self) -> None:
        self._up.wake()
        self._down.wake()


class Network:
    """A `Dialer` over names. Use it as `async with asyncio.TaskGroup() as group: network = Network(group)`."""

    def __init__(self, group: asyncio.TaskGroup):
        self.group = group
        self.links: dict[_Link, None] = {}
        """In the order in which they were dialled: what happens to all happens in that order."""
        self._servers: dict[str, object] = {}
        self._frozen: set[str] = set()

    def listen(self, address: str, *servers: DecodeServer | FetchServer | RegistryServer) -> None:
        for server in servers:
            for method in ("serve_attach", "serve_fetch", "serve_join"):
                if hasattr(server, method):
                    self._servers[f"{method} {address}"] = getattr(server, method)

    def attach(self, address: str) -> Any:
        return self._dial("serve_attach", address)

    def fetch(self, address: str) -> Any:
        return self._dial("serve_fetch", address)

    def join(self, address: str) -> Any:
        return self._dial("serve_join", address)

    def _dial(self, method: str, address: str) -> InProcessStream:
        serve: Any = self._servers.get(f"{method} {address}")
        if serve is None:
            return _unreachable(address)
        link = _Link(self, address, serve)
        self.links[link] = None
        return link.client

    def kill(self, address: str) -> None:
        for key in [key for key in self._servers if key.endswith(f" {address}")]:
            del self._servers[key]
        self._frozen.discard(address)
        for link in [link for link in self.links if link.address == address]:
            link.end(StreamEnded(f"{address} is gone", "UNAVAILABLE"))

    def freeze(self, address: str) -> None:
        self._frozen.add(address)

    def thaw(self, address: str) -> None:
        self._frozen.discard(address)
        for link in self.links:
            link.wake()

    def is_frozen(self, address: str) -> bool:
        return address in self._frozen


def _unreachable(address: str) -> InProcessStream:
    pipe = _Pipe(lambda: True)
    pipe.end(StreamEnded(f"nothing listens at {address}", "UNAVAILABLE"))
    return InProcessStream(pipe, pipe, lambda ended: None)

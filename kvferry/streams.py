"""The three links between processes (generate, registry, fetch), each a two-way stream of messages.

A link is a `Stream` on either side; whoever serves one gets it as an argument of a coroutine, and what is held for it is
released when that coroutine returns or is cancelled. Implementations: kvferry/inprocess.py (the reference, and the tests'
double) and kvferry/rpc/links.py (gRPC). Standard library only.
"""

from typing import Protocol, TypeVar

from kvferry.errors import ElsewhereError
from kvferry.messages import DecodeMessage, FetchDown, FetchUp, JoinDown, JoinUp, RouterMessage

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class StreamEnded(ElsewhereError):
    """The other side ended the stream, orderly or not. `status` is a gRPC status name; "OK" is orderly."""

    def __init__(self, message: str, status: str = "OK"):
        super().__init__(message)
        self.status = status


class Stream(Protocol[Out, In]):
    """One side of a two-way stream. Sends may come from several tasks, receives from one."""

    async def send(self, message: Out) -> None:
        """Returns when the message is on its way; waits while the other side lags. Raises `StreamEnded`."""
        ...

    async def receive(self) -> In:
        """The next message. Raises `StreamEnded` when there will be none."""
        ...

    def close(self) -> None:
        """Ends the stream at once, both ways. Idempotent, and must be called on every way out by the side that dialled."""
        ...


class Dialer(Protocol):
    """Opens streams to other processes by address. Unreachable addresses show as `StreamEnded` on first use."""

    def attach(self, address: str) -> Stream[RouterMessage, DecodeMessage]: ...

    def fetch(self, address: str) -> Stream[FetchUp, FetchDown]: ...

    def join(self, address: str) -> Stream[JoinUp, JoinDown]: ...


class DecodeServer(Protocol):
    async def serve_attach(self, stream: Stream[DecodeMessage, RouterMessage]) -> None: ...


class FetchServer(Protocol):
    async def serve_fetch(self, stream: Stream[FetchDown, FetchUp]) -> None: ...


class RegistryServer(Protocol):
    async def serve_join(self, stream: Stream[JoinDown, JoinUp]) -> None: ...

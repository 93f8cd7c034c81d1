"""HTTP/2 by hand (RFC 9113): frames as they are, a peer that asks for what it likes, and a line between a client and a server.

`Peer` is a client over a bare socket; `Line` passes on what comes from both sides, frame by frame, notes what it was, and can say
something of its own to the client in the server's name. Header blocks are written as literals and never read (RFC 7541).
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x4, 0x6, 0x7
ACK, END_HEADERS = 0x1, 0x4
NO_ERROR, ENHANCE_YOUR_CALM = 0x0, 0xB


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int = 0
    stream: int = 0
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        return (
            struct.pack(">I", len(self.payload))[1:]
            + struct.pack(">BBI", self.kind, self.flags, self.stream)
            + self.payload
        )


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return Frame(kind, flags, stream & 0x7FFFFFFF, await reader.readexactly(int.from_bytes(head[:3])))


def go_away(last_stream: int, error: int = NO_ERROR, why: bytes = b"") -> Frame:
    return Frame(GOAWAY, payload=struct.pack(">II", last_stream, error) + why)


def _literal(name: str, value: str) -> bytes:
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


class Peer:
    """Of one server. `frames` is what it has said so far; what wants an acknowledgement has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.frames: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self._writer.write(frame.to_bytes())

    def call(self, stream: int, method: str, headers: dict[str, str], message: bytes) -> None:
        """Opens a gRPC call and sends the first message; the call stays open."""
        of_http = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "here", "te": "trailers"}
        block = b"".join(_literal(*pair) for pair in (of_http | {"content-type": "application/grpc"} | headers).items())
        self.send(Frame(HEADERS, END_HEADERS, stream, block))
        self.send(Frame(DATA, 0, stream, struct.pack(">BI", 0, len(message)) + message))

    async def until(self, has_come: Callable[[list[Frame]], bool]) -> None:
        """Raises IncompleteReadError if the server hangs up before."""
        while not has_come(self.frames):
            frame = await read_frame(self._reader)
            self.frames.append(frame)
            if frame.kind == SETTINGS and not frame.flags & ACK:
                self.send(Frame(SETTINGS, ACK))
            if frame.kind == PING and not frame.flags & ACK:
                self.send(Frame(PING, ACK, payload=frame.payload))


@contextlib.asynccontextmanager
async def peer_of(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + Frame(SETTINGS).to_bytes())
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


class Connection:
    """One of a line's. Frames by the side that they came from."""

    def __init__(self, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter):
        self._to_client, self._to_server = to_client, to_server
        self.from_client: list[Frame] = []
        self.from_server: list[Frame] = []

    @property
    def num_pings(self) -> int:
        """The client's own."""
        return sum(frame.kind == PING and not frame.flags & ACK for frame in self.from_client)

    @property
    def last_stream(self) -> int:
        return max(frame.stream for frame in self.from_client)

    def tell_client(self, frame: Frame) -> None:
        self._to_client.write(frame.to_bytes())

    def close(self) -> None:
        self._to_client.close()
        self._to_server.close()


class Line:
    def __init__(self, to_port: int):
        self._to_port = to_port
        self.connections: list[Connection] = []

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to_port)
        connection = Connection(to_client, to_server)
        self.connections.append(connection)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            to_server.write(await from_client.readexactly(len(PREFACE)))
            await asyncio.gather(
                _pass_on(from_client, to_server, connection.from_client),
                _pass_on(from_server, to_client, connection.from_server),
            )
        connection.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[Frame]) -> None:
    while True:
        frame = await read_frame(reader)
        seen.append(frame)
        writer.write(frame.to_bytes())


@contextlib.asynccontextmanager
async def line_to(port: int) -> AsyncIterator[tuple[Line, str]]:
    """And the address where it listens."""
    line = Line(port)
    async with await asyncio.start_server(line.serve, "127.0.0.1", 0) as server:
        try:
            yield line, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for connection in line.connections:
                connection.close()

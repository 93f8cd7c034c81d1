"""Links over real gRPC: an address that was down for a while (T038), a line that is pinged while it is idle and one on which the
server says that it goes away (T048), and bytes that are no message at the side that serves (T080)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc._cython import cygrpc

from kvferry.messages import Beat, FetchAck, FetchProgress, FetchState
from kvferry.rpc import frame_wire, links
from kvferry.rpc.links import (
    FETCH_METHOD,
    SECRET_KEY,
    GrpcDialer,
    add_decode_service,
    add_fetch_service,
    add_registry_service,
    bind,
    new_server,
)
from kvferry.streams import StreamEnded
from tests.http2_line import (
    ACK,
    DATA,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    NO_ERROR,
    PING,
    Frame,
    Line,
    go_away,
    line_to,
    peer_of,
)

SECRET = "cluster"


class Servant:
    """Answers whatever comes."""

    async def serve_fetch(self, stream: Any) -> None:
        while True:
            await stream.receive()
            await stream.send(FetchProgress(1, FetchState.SENDING, 0))

    async def serve_join(self, stream: Any) -> None:
        await stream.receive()
        await stream.send(Beat())

    serve_attach = serve_join


async def started(port: int = 0) -> tuple[aio.Server, int]:
    server = new_server()
    for add in (add_fetch_service, add_decode_service, add_registry_service):
        add(server, Servant(), SECRET)
    port = bind(server, "127.0.0.1", port)
    await server.start()
    return server, port


async def is_served(dialer: GrpcDialer, address: str) -> bool:
    stream = dialer.fetch(address)
    try:
        async with asyncio.timeout(5):
            await stream.send(FetchAck(1))
            await stream.receive()
        return True
    except StreamEnded:
        return False
    finally:
        stream.close()


@pytest.mark.parametrize("down_s", [0.2, 1.5])
async def test_who_was_missed_while_it_was_down_is_reached_as_soon_as_it_listens_again(down_s):
    """T038: a worker that restarts at its address is a member at once, and then the first fetch must find it."""
    dialer = GrpcDialer(SECRET)
    server, port = await started()
    address = f"127.0.0.1:{port}"
    try:
        assert await is_served(dialer, address)
        for _ in range(2):
            await server.stop(0)
            assert not await is_served(dialer, address)
            assert not await is_served(dialer, address)
            await asyncio.sleep(down_s)
            server, _ = await started(port)
            assert await is_served(dialer, address)
    finally:
        await dialer.close()
        await server.stop(0)


@pytest.mark.parametrize(
    "method",
    [
        "FetchService/Fetch",
        "DecodeService/Attach",
        "RegistryService/Join",
    ],
)
async def test_bytes_that_are_no_message_end_their_stream_without_an_unexpected_error(method, caplog):
    server, port = await started()
    try:
        async with asyncio.timeout(10), aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(f"/kvferry.v1.{method}")(metadata=((SECRET_KEY, SECRET),))
            await call.write(b"\x80\x04\x95\xff\xff")
            await call.done_writing()
            while await call.read() is not aio.EOF:
                pass
            assert await call.code() is not StatusCode.UNKNOWN
        assert "Traceback" not in caplog.text
    finally:
        await server.stop(0)


# ------------------------------------------------------------------------------------------------------------ T048: keepalive

IDLE_S = 900


@contextlib.asynccontextmanager
async def dialled_over_a_line() -> AsyncIterator[tuple[GrpcDialer, Line, str]]:
    """A client of ours, a server of ours, and between them a line that sees what they say."""
    server, port = await started()
    dialer = GrpcDialer(SECRET)
    try:
        async with asyncio.timeout(20), line_to(port) as (line, address):
            yield dialer, line, address
            await dialer.close()
    finally:
        await server.stop(0)


def test_both_ends_say_all_limits_of_pings_by_names_that_grpc_knows(monkeypatch):
    given = []
    monkeypatch.setattr(aio, "server", lambda options, **more: given.append(options))
    monkeypatch.setattr(aio, "insecure_channel", lambda address, options: given.append(options))
    monkeypatch.setattr(aio, "secure_channel", lambda address, credentials, options: given.append(options))
    new_server()
    GrpcDialer(SECRET).channel("here")
    GrpcDialer(SECRET, tls=links.TlsFiles(b"", b"", b"")).channel("here")
    assert len(given) == 3
    core = Path(cygrpc.__file__).read_bytes()
    for options in map(dict, given):
        assert not [name for name in options if name.encode() + b"\0" not in core]
        assert options["grpc.keepalive_time_ms"] >= options["grpc.http2.min_ping_interval_without_data_ms"]
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0, "of any number"
        assert options["grpc.http2.max_ping_strikes"] == 0, "none is one too many"


async def test_who_pings_without_calls_is_answered_each_time_and_not_sent_away():
    """As Go's clients do each ten seconds and ours each two; here a quarter of an hour's pings at once."""
    server, port = await started()
    try:
        async with asyncio.timeout(10), peer_of(port) as peer:
            for number in range(IDLE_S * 1000 // links.KEEPALIVE_MS):
                peer.send(Frame(PING, payload=number.to_bytes(8)))
                answer = Frame(PING, ACK, payload=number.to_bytes(8))
                await peer.until(lambda frames, answer=answer: answer in frames)
            peer.call(1, FETCH_METHOD, {SECRET_KEY: SECRET}, frame_wire.fetch_up_to_bytes(FetchAck(1)))
            await peer.until(lambda frames: any(frame.kind == DATA and frame.stream == 1 for frame in frames))
            assert not [frame for frame in peer.frames if frame.kind == GOAWAY]
    finally:
        await server.stop(0)


async def test_our_own_client_pings_without_calls_and_keeps_its_line():
    async with dialled_over_a_line() as (dialer, line, address):
        assert await is_served(dialer, address)
        (connection,) = line.connections
        before = connection.num_pings
        async with asyncio.timeout(1.4 * links.KEEPALIVE_MS / 1000):
            while connection.num_pings == before:
                await asyncio.sleep(0.02)
        assert await is_served(dialer, address)
        assert line.connections == [connection]
        assert not [frame for frame in connection.from_server if frame.kind == GOAWAY]


@pytest.mark.parametrize("error", [NO_ERROR, ENHANCE_YOUR_CALM])
async def test_of_a_server_that_goes_away_the_call_in_flight_finishes_and_the_next_one_has_another_line(error):
    async with dialled_over_a_line() as (dialer, line, address):
        in_flight = dialer.fetch(address)
        for number in range(20):
            await in_flight.send(FetchAck(number))
            assert (await in_flight.receive()).step == 1
            if number == 5:
                old = line.connections[0]
                old.tell_client(go_away(old.last_stream, error, b"too_many_pings"))
            if number > 5:
                assert await is_served(dialer, address)
        assert len(line.connections) == 2
        assert max(frame.stream for frame in old.from_client) == 1, "nothing new is sent to who goes away"
        in_flight.close()


async def test_a_call_that_the_server_goes_away_from_hears_it_at_once_and_the_next_one_is_served():
    async with dialled_over_a_line() as (dialer, line, address):
        for _ in range(3):
            in_flight = dialer.fetch(address)
            await in_flight.send(FetchAck(1))
            await in_flight.receive()
            connection = line.connections[-1]
            connection.tell_client(go_away(connection.last_stream, ENHANCE_YOUR_CALM, b"too_many_pings"))
            connection.close()
            began = asyncio.get_running_loop().time()
            with pytest.raises(StreamEnded) as ended:
                await in_flight.receive()
            assert ended.value.status == "UNAVAILABLE"
            assert await is_served(dialer, address)
            assert asyncio.get_running_loop().time() - began < 1

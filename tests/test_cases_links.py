"""Links over real gRPC: an address that was down for a while (T038), and bytes that are no message at the side that serves (T080)."""

import asyncio
from typing import Any

import pytest
from grpc import StatusCode, aio

from kvferry.messages import Beat, FetchAck, FetchProgress, FetchState
from kvferry.rpc.links import (
    SECRET_KEY,
    GrpcDialer,
    add_decode_service,
    add_fetch_service,
    add_registry_service,
    bind,
    new_server,
)
from kvferry.streams import StreamEnded

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

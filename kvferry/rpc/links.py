"""The three links over gRPC: `GrpcDialer` on the side that opens them, `add_*` on the side that serves them.

The one choke point for calls: options, keepalive, the cluster's secret, cancelling and the translation of a call's end into
`StreamEnded` are here and nowhere else. A call is cancelled on every way out (grpcio does not do it when one is dropped).
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kvferry.errors import ConfigurationError, InvalidRequest
from kvferry.rpc import converter, frame_wire
from kvferry.rpc.frame_wire import DONE_DOWN, DONE_UP
from kvferry.rpc.kept_calls import REST_S, KeptCalls
from kvferry.rpc.v1 import decode_pb2_grpc, registry_pb2_grpc
from kvferry.streams import DecodeServer, FetchServer, RegistryServer, StreamEnded

logger = logging.getLogger(__name__)

EOF: Any = getattr(aio, "EOF")  # noqa: B009 (its type is not declared)

SECRET_KEY = "kvferry-secret"
FETCH_METHOD = "/kvferry.v1.FetchService/Fetch"
MIN_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 2000
PING_TIMEOUT_MS = 6000
"""An answer waits behind the frames on the line, so a slow line needs some seconds; a peer that has stopped is found by it alone."""
MAX_CHANNELS = 4096
LINGER_S = 2.0
SETTLING_S = 0.05
"""Of a write whose task was cancelled: until it is through, grpc refuses to send how the call ended."""


def channel_options(block_bytes: int = 0) -> list[tuple[str, int]]:
    """For channels and servers alike. A frame has at least one block, so the limit follows from the block's size."""
    limit = max(MIN_MESSAGE_BYTES, 2 * block_bytes + 1024 * 1024)
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),  # also the time that a connection has to come up
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),  # a channel that is made anew does not wait for another one's backoff
    ]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM contents. `authority` is what peers' certificates must chain to."""

    certificate: bytes
    key: bytes
    authority: bytes


class _ClientStream:
    """The dialled side of a call."""

    def __init__(
        self,
        call: Any,
        to_wire: Callable[[Any], Any],
        from_wire: Callable[[Any], Any],
        on_unavailable: Callable[[], None] = lambda: None,
    ):
        self._call, self._to_wire, self._from_wire = call, to_wire, from_wire
        self._on_unavailable = on_unavailable
        self._sending = asyncio.Lock()

    async def send(self, message: Any) -> None:
        try:
            async with self._sending:
                await self._write(self._to_wire(message))
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended() from error
        except asyncio.CancelledError:
            _raise_unless_cancelled()
            raise

    async def _write(self, wire: Any) -> None:
        await self._call.write(wire)

    async def receive(self) -> Any:
        try:
            wire = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended() from error
        except asyncio.CancelledError:
            _raise_unless_cancelled()
            raise
        if wire is EOF:
            raise await self._ended()
        return _understood(wire, self._from_wire, self.close)

    def close(self) -> None:
        self._call.cancel()

    async def _ended(self) -> StreamEnded:
        code = await self._call.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            self._on_unavailable()
        return StreamEnded(f"{code.name}: {await self._call.details() or 'no details'}", code.name)


class _FetchStream(_ClientStream):
    """Where no read is under way when it is closed, its call is kept for another fetch."""

    def __init__(self, call: Any, on_unavailable: Callable[[], None], keep: Callable[[Any, Any], None]):
        super().__init__(call, frame_wire.fetch_up_to_bytes, frame_wire.fetch_down_from_bytes, on_unavailable)
        self._keep = keep
        self._writing: asyncio.Future[None] | None = None
        self._has_heard = self._is_reading = self._is_closed = False

    async def _write(self, wire: Any) -> None:
        """Goes on where its sender is cancelled: grpc would end the call."""
        if self._is_closed:
            raise StreamEnded("the stream is closed", "CANCELLED")
        self._writing = writing = asyncio.ensure_future(self._call.write(wire))
        writing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.shield(writing)

    async def receive(self) -> Any:
        """One that fails or is cut short leaves a call that has ended."""
        if self._is_closed:
            raise StreamEnded("the stream is closed", "CANCELLED")
        self._is_reading = True
        message = await super().receive()
        self._is_reading, self._has_heard = False, True
        return message

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._writing is not None and self._has_heard and not self._is_reading and not self._call.done():
            self._keep(self._call, self._writing)
        else:
            self._call.cancel()


def _understood(wire: Any, from_wire: Callable[[Any], Any], close: Callable[[], None]) -> Any:
    """A message that cannot be read ends the stream, and nothing else: the peer is broken or of another version."""
    try:
        if wire is None:  # what grpc makes of bytes that are no message
            raise InvalidRequest("bytes that are no message")
        return from_wire(wire)
    except InvalidRequest as error:
        close()
        raise StreamEnded(f"the peer sent what cannot be read: {error.message}", "INTERNAL") from error


def _raise_unless_cancelled() -> None:
    """grpc reports a call that was cancelled as if the task had been: told apart here."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise StreamEnded("the call was cancelled", "CANCELLED")


class GrpcDialer:
    """A `Dialer`. Channels are kept by address; one that fails reconnects by itself."""

    def __init__(self, secret: str, block_bytes: int = 0, tls: TlsFiles | None = None):
        self._metadata = ((SECRET_KEY, secret),)
        self._options = channel_options(block_bytes)
        self._tls = tls
        self._channels: dict[str, aio.Channel] = {}
        self._kept = KeptCalls()

    def attach(self, address: str) -> Any:
        call = decode_pb2_grpc.DecodeServiceStub(self.channel(address)).Attach(metadata=self._metadata)  # type: ignore[call-arg]
        return _ClientStream(
            call, converter.router_message_to_wire, converter.decode_message_from_wire, self._forget(address)
        )

    def fetch(self, address: str) -> Any:
        channel = self.channel(address)
        call = self._kept.take(channel)
        if call is None:
            call = channel.stream_stream(FETCH_METHOD)(metadata=self._metadata)
        return _FetchStream(call, self._forget(address), partial(self._kept.keep, channel))

    def join(self, address: str) -> Any:
        call = registry_pb2_grpc.RegistryServiceStub(self.channel(address)).Join(metadata=self._metadata)  # type: ignore[call-arg]
        return _ClientStream(call, converter.join_up_to_wire, converter.join_down_from_wire, self._forget(address))

    async def close(self) -> None:
        await self._kept.close()
        for channel in self._channels.values():
            await channel.close()

    def _forget(self, address: str) -> Callable[[], None]:
        """A channel that could not connect, or lost its connection, fails calls while it backs off: the next one has another."""
        channel = self._channels[address]

        def forget() -> None:
            if self._channels.get(address) is channel:
                del self._channels[address]
                self._kept.forget(channel)

        return forget

    def channel(self, address: str) -> aio.Channel:
        """The most recently used ones are kept; grpc closes a dropped channel once its calls have ended."""
        channel = self._channels.pop(address, None) or self._connect(address)
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            del self._channels[next(iter(self._channels))]
        return channel

    def _connect(self, address: str) -> aio.Channel:
        if self._tls is None:
            return aio.insecure_channel(address, options=self._options)
        tls = self._tls
        credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
        return aio.secure_channel(address, credentials, options=self._options)


class _ServerStream:
    """The served side of a call."""

    def __init__(self, context: Any, to_wire: Callable[[Any], Any], from_wire: Callable[[Any], Any], first: Any = None):
        """`first`: a message that was read already."""
        self._context, self._to_wire, self._from_wire, self._first = context, to_wire, from_wire, first
        self._sending = asyncio.Lock()
        self._has_sent = first is not None
        self._was_cut = self._is_done = False

    async def settle(self) -> None:
        """Before an error is told: the caller would not hear of it, and wait for a sign of life in vain."""
        if self._was_cut:
            await asyncio.sleep(SETTLING_S)

    async def send(self, message: Any) -> None:
        if self._is_done or self._context.done():
            raise StreamEnded("the caller has left", "CANCELLED")
        try:
            async with self._sending:
                write = self._context.write(self._to_wire(message))
                # The first one carries the call's head, of which grpc must come to know that it was sent.
                await (write if self._has_sent else asyncio.shield(write))
                self._has_sent = True
        except asyncio.CancelledError:
            self._was_cut = True
            raise
        except (aio.UsageError, aio.InternalError, asyncio.InvalidStateError) as error:
            raise StreamEnded(f"the caller has left: {error}", "CANCELLED") from error

    async def receive(self) -> Any:
        wire, self._first = self._first, None
        try:
            if wire is None:
                wire = DONE_UP if self._is_done else await self._context.read()
        except DecodeError as error:
            raise StreamEnded(f"the peer sent what cannot be read: {error}", "INTERNAL") from error
        except (aio.UsageError, aio.InternalError, asyncio.InvalidStateError) as error:
            raise StreamEnded(f"the caller has left: {error}", "CANCELLED") from error
        if wire is EOF:
            raise StreamEnded("the caller ended the stream")
        if wire == DONE_UP:
            self._is_done = True
            raise StreamEnded("the caller is through with the stream", "CANCELLED")
        return _understood(wire, self._from_wire, self.close)

    def close(self) -> None:
        """Nothing to do: the call ends when its handler returns."""

    async def let_the_caller_read(self) -> None:
        """It closes the stream once it has read the last message: a status that is there before hides it from grpc.aio."""
        with contextlib.suppress(TimeoutError, StreamEnded):
            async with asyncio.timeout(LINGER_S):
                while True:
                    await self.receive()

    async def next_of_call(self) -> "_ServerStream | None":
        """Nothing is held for this one any more. None where the call ends with it."""
        if not self._is_done:
            return None
        await self.settle()
        try:
            await self._context.write(DONE_DOWN)
            async with asyncio.timeout(2 * REST_S):
                first = await self._context.read()
        except (TimeoutError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError):
            return None
        return None if first is EOF else _ServerStream(self._context, self._to_wire, self._from_wire, first)


class _Served:
    """A handler of one bidirectional method: checks the secret, wraps the call, translates the end."""

    def __init__(self, serve: Callable[[Any], Awaitable[None]], secret: str, to_wire: Any, from_wire: Any):
        self._serve, self._secret, self._to_wire, self._from_wire = serve, secret, to_wire, from_wire

    async def __call__(self, request_iterator: Any, context: Any) -> None:
        del request_iterator
        given = dict(context.invocation_metadata() or ()).get(SECRET_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        stream: _ServerStream | None = _ServerStream(context, self._to_wire, self._from_wire)
        while stream is not None:
            await self._serve_one(stream, context)
            stream = await stream.next_of_call()

    async def _serve_one(self, stream: _ServerStream, context: Any) -> None:
        try:
            await self._serve(stream)
            await stream.let_the_caller_read()
        except StreamEnded:
            return
        except TimeoutError:
            await stream.settle()
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a message that had to come did not come in time")
        except InvalidRequest as error:
            await stream.settle()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except Exception:  # a fault of ours, which grpc logs and tells
            await stream.settle()
            raise


def add_decode_service(server: aio.Server, service: DecodeServer, secret: str) -> None:
    class Servicer(decode_pb2_grpc.DecodeServiceServicer):
        Attach = staticmethod(  # type: ignore[assignment]
            _handler(service.serve_attach, secret, converter.decode_message_to_wire, converter.router_message_from_wire)
        )

    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Servicer(), server)


def add_fetch_service(server: aio.Server, service: FetchServer, secret: str) -> None:
    """Without grpc's own (de)serializing, so that a frame's blocks are not copied for it."""
    handle = _handler(service.serve_fetch, secret, frame_wire.fetch_down_to_bytes, frame_wire.fetch_up_from_bytes)
    name, method = FETCH_METHOD.strip("/").split("/")
    methods = {method: grpc.stream_stream_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


def add_registry_service(server: aio.Server, service: RegistryServer, secret: str) -> None:
    class Servicer(registry_pb2_grpc.RegistryServiceServicer):
        Join = staticmethod(  # type: ignore[assignment]
            _handler(service.serve_join, secret, converter.join_down_to_wire, converter.join_up_from_wire)
        )

    registry_pb2_grpc.add_RegistryServiceServicer_to_server(Servicer(), server)


def _handler(serve: Callable[[Any], Awaitable[None]], secret: str, to_wire: Any, from_wire: Any) -> Any:
    served = _Served(serve, secret, to_wire, from_wire)

    async def handle(request_iterator: Any, context: Any) -> None:
        await served(request_iterator, context)

    return handle


def new_server(block_bytes: int = 0) -> aio.Server:
    return aio.server(options=channel_options(block_bytes), maximum_concurrent_rpcs=None)


def bind(server: aio.Server, host: str, port: int, tls: TlsFiles | None = None) -> int:
    """Returns the real port. Raises ConfigurationError naming a port that is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            real = server.add_insecure_port(address)
        else:
            pairs = [(tls.key, tls.certificate)]
            credentials = grpc.ssl_server_credentials(pairs, tls.authority, require_client_auth=True)
            real = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen at {address}: {error}; choose another --port, or 0 for any") from error
    if real == 0:
        raise ConfigurationError(f"cannot listen at {address}: it is taken; choose another --port, or 0 for any")
    return real

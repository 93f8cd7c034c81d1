"""The gRPC door over real calls: a small deployment beside it, in the same event loop and in real time."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from router.grpc_api import GrpcApi
from router.request_maker import Defaults, RequestMaker
from tests.in_process import Deployment, deployment, limits_of

OPTIONS = [("grpc.http2.bdp_probe", 0)]
"""What is on its way unread does not grow beyond 64 KiB."""


@contextlib.asynccontextmanager
async def door(*names: str, **more: Any) -> AsyncIterator[tuple[Deployment, Any]]:
    async with deployment(*names, **more) as d:
        server = aio.server()
        GrpcApi(d.dispatcher, RequestMaker(d.dispatcher._text, d.dispatcher, Defaults("fake"))).add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
                yield d, generation_pb2_grpc.GenerationServiceStub(channel)
        finally:
            await server.stop(0.2)


def asked(max_tokens: int = 4, **more: Any) -> generation_pb2.GenerateRequest:
    tokens = generation_pb2.TokenIds(ids=range(1, 20))
    return generation_pb2.GenerateRequest(token_ids=tokens, max_tokens=max_tokens, temperature=0, **more)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


def test_who_is_to_try_later_is_told_when_in_the_trailing_metadata():
    async def main() -> None:
        async with door("p1") as (_, stub):
            with pytest.raises(aio.AioRpcError) as caught:
                [piece async for piece in stub.Generate(asked())]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1

    run(main)


@pytest.mark.parametrize(
    ("timeout_ms", "key", "most_s"), [(0, False, 5), (60_000, False, 5), (2000, False, 2), (0, True, 600)]
)
def test_the_calls_own_deadline_is_the_requests_if_it_is_shorter_and_nobody_else_may_join(timeout_ms, key, most_s):
    async def main() -> None:
        async with door("d1") as (d, stub):
            metadata = (("idempotency-key", "k"),) if key else ()
            call = stub.Generate(asked(2000, timeout_ms=timeout_ms), timeout=5, metadata=metadata)
            await call.read()
            (live,) = d.dispatcher.lives
            assert most_s - 1 < live.deadline_s - live.accepted_s < most_s + 0.1  # on its way, a deadline is rounded up
            call.cancel()
            while d.dispatcher.lives:
                await asyncio.sleep(0.01)

    run(main)


def test_a_call_with_more_time_than_the_server_gives_has_the_servers():
    async def main() -> None:
        async with door("d1") as (d, stub):
            call = stub.Generate(asked(2000), timeout=86_400)
            await call.read()
            (live,) = d.dispatcher.lives
            assert live.deadline_s == live.accepted_s + d.dispatcher.limits.request_timeout_s
            call.cancel()

    run(main)


def test_a_finished_answer_of_which_nothing_is_read_is_dropped_after_a_while():
    """More than the buffers on the way hold."""

    async def main() -> None:
        limits = replace(limits_of(16), reader_timeout_s=0.5)
        async with door("d1", limits=limits, step=dict(base_s=0.0, s_per_token=0.0), num_slots=3000) as (d, stub):
            call = stub.Generate(asked(1000, n=16))
            await call.read()
            dropped = [weakref.ref(live) for live in d.dispatcher.lives]
            assert dropped
            while d.dispatcher.lives:
                await asyncio.sleep(0.05)
            assert not d.dispatcher.counters["readers_given_up"]
            await asyncio.sleep(1.0)
            assert d.dispatcher.counters["readers_given_up"] == 1
            gc.collect()
            assert [live() for live in dropped] == [None]
            with pytest.raises(aio.AioRpcError) as caught:  # who reads after all is not told that this was all
                while await call.read() is not aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(main)

"""The three links over real gRPC: what is sent is what arrives, whoever lacks the secret is refused, an end is told."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import messages as m
from kvferry.racing import until_first
from kvferry.rpc import converter
from kvferry.rpc.links import GrpcDialer, add_fetch_service, add_registry_service, bind, new_server
from kvferry.streams import StreamEnded

IDS = st.binary(min_size=16, max_size=16)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**63)
TOKENS = st.lists(U32, max_size=20).map(tuple)
SOURCES = st.lists(st.builds(m.Source, st.text(max_size=5), st.text(max_size=5)), max_size=3).map(tuple)
SECONDS = st.none() | st.integers(1, 10**6).map(lambda ms: ms / 1000)
SAMPLING = st.builds(
    m.Sampling, U64, U32, st.floats(0, 2), U32, st.floats(0.1, 1), st.floats(0, 1), st.floats(-2, 2), st.floats(-2, 2),
    st.floats(0.1, 9), st.lists(st.tuples(U32, st.floats(-100, 100, width=32)), max_size=3).map(tuple), U32, TOKENS,
    st.none() | U32, st.none() | U32,
)  # fmt: skip
LOGPROBS = st.lists(
    st.builds(
        m.TokenLogprobs, st.floats(-99, 0), U32, st.lists(st.tuples(U32, st.floats(-99, 0)), max_size=2).map(tuple)
    ),
    max_size=3,
).map(tuple)
RATES = st.dictionaries(U32, st.floats(0, 1e12), max_size=3)
MICRO = st.none() | st.integers(0, 10**9).map(lambda us: us / 1e6)
CASES = {
    "fetch_up": st.builds(m.FetchAck, U32)
    | st.builds(m.FetchOpen, st.text(max_size=9), st.text(max_size=9), TOKENS, U32, st.binary(max_size=9), st.booleans(),
                st.integers(-9, 9), SECONDS, SOURCES, st.text(max_size=5), st.binary(max_size=9), st.text(max_size=5),
                st.booleans(), U32)
    | st.builds(m.FetchMeet, st.text(max_size=9), st.text(max_size=9), U32)
    | st.builds(m.FetchProbe, st.text(max_size=5), st.binary(max_size=9), U32),
    "fetch_down": st.builds(m.Frame, U32, st.binary(max_size=9), st.binary(max_size=9), st.binary(max_size=9))
    | st.builds(m.FetchOffers, st.text(max_size=5), st.lists(st.builds(m.RoadOffer, st.text(max_size=5), st.binary(max_size=9)),
                                                            max_size=3).map(tuple))
    | st.builds(m.FetchEnd, st.sampled_from(m.FetchEndReason), U32, st.text(max_size=9))
    | st.builds(m.FetchProgress, U64, st.sampled_from(m.FetchState), U32),
    "router_message": st.builds(m.Beat, router_life=st.text(max_size=5))
    | st.builds(m.RequestCancel, U64, U32, TOKENS)
    | st.builds(m.RequestOpen, U64, U32, TOKENS, st.lists(st.builds(m.ChoiceStart, U32, TOKENS), max_size=3).map(tuple),
                SAMPLING, st.binary(max_size=9), SOURCES, SOURCES, st.integers(-9, 9), SECONDS, U32),
    "decode_message": st.builds(m.Beat, U64)
    | st.builds(m.StepOutput, U64, st.lists(st.builds(m.NewTokens, U64, U32, U32, U32, TOKENS, LOGPROBS),
                                                   max_size=3).map(tuple),
                st.lists(st.builds(m.PromptLogprobs, U64, U32, U32, LOGPROBS), max_size=2).map(tuple),
                st.lists(st.builds(m.StartReport, U64, U32, MICRO, MICRO, MICRO, MICRO, MICRO, U32, U32, U32, U32, U32, U64,
                                   st.text(max_size=5), st.text(max_size=5)), max_size=2).map(tuple),
                st.lists(st.builds(m.ChoiceEnd, U64, U32, U32, st.sampled_from(m.ChoiceEndReason), st.text(max_size=5),
                                   st.lists(st.text(max_size=4), max_size=2).map(tuple)), max_size=2).map(tuple),
                st.lists(U64, max_size=3).map(tuple), st.lists(U64, max_size=3).map(tuple)),
    "join_up": st.builds(m.WorkerDescription, *[st.text(max_size=5)] * 2, st.sampled_from(m.Role), *[st.text(max_size=5)] * 4,
                         U32, U64, U64, U32, U32, U32, U32, U32, st.floats(0, 1e12), st.floats(0, 1e12), st.text(max_size=5), U32)
    | st.builds(m.WorkerProgress, U64, U32, U32, U32, U32, st.builds(m.SlotCounts, U64, U64, U64, U64),
                st.dictionaries(st.text(max_size=5), U64, max_size=3), st.lists(IDS, max_size=3).map(tuple),
                st.lists(IDS, max_size=3).map(tuple), U64, st.booleans(), st.floats(0, 1e12), st.floats(0, 1e12), U64, U64,
                st.dictionaries(U32, U64, max_size=3), U32, U64, RATES, RATES, st.dictionaries(st.text(max_size=5), st.floats(0, 1e12), max_size=3), st.booleans()),
    "join_down": st.just(m.SnapshotWanted()) | st.builds(m.Welcome, st.text(max_size=5), st.text(max_size=5)) | st.builds(m.Refusal, st.text(max_size=5), st.text(max_size=5))
    | st.just(m.Beat()),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(CASES))
def test_what_is_sent_is_what_arrives(kind):
    to_wire, from_wire = getattr(converter, f"{kind}_to_wire"), getattr(converter, f"{kind}_from_wire")

    @given(CASES[kind])
    def check(value):
        wire = to_wire(value)
        back = from_wire(type(wire).FromString(wire.SerializeToString()))
        if isinstance(value, m.StepOutput):
            assert (back.step, back.tokens, back.ends, back.begun, back.paused) == (
                value.step,
                value.tokens,
                value.ends,
                value.begun,
                value.paused,
            )
            assert back.prompt_logprobs == value.prompt_logprobs
            for one, two in zip(back.starts, value.starts, strict=True):
                assert one.first_token_s == pytest.approx(two.first_token_s, abs=2e-6)
                assert (one.source_worker_id, one.fetched_bytes) == (two.source_worker_id, two.fetched_bytes)
        else:
            assert back == value

    check()


class Echo:
    """Serves fetches: answers acknowledgement k with progress k, ends after 99; counts who is being served."""

    def __init__(self):
        self.num_serving = 0

    async def serve_fetch(self, stream):
        self.num_serving += 1
        try:
            while (ack := await stream.receive()).frame_number != 99:
                await stream.send(m.FetchProgress(ack.frame_number, m.FetchState.SENDING, 0))
        finally:
            self.num_serving -= 1

    async def serve_join(self, stream):
        await stream.send(m.Beat())


@contextlib.asynccontextmanager
async def listening(secret="right", serve_fetch=None):
    echo, server = Echo(), new_server()
    echo.serve_fetch = serve_fetch or echo.serve_fetch
    add_fetch_service(server, echo, "right")
    add_registry_service(server, echo, "right")
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    dialer = GrpcDialer(secret)
    try:
        yield echo, dialer, f"127.0.0.1:{port}"
    finally:
        await dialer.close()
        await server.stop(0)


async def test_messages_go_both_ways_and_an_orderly_end_is_ok():
    async with listening() as (_, dialer, address):
        stream = dialer.fetch(address)
        for k in range(3):
            await stream.send(m.FetchAck(k))
            assert (await stream.receive()).step == k
        await stream.send(m.FetchAck(99))
        with pytest.raises(StreamEnded) as ended:
            await stream.receive()
        assert ended.value.status == "OK"


async def test_what_was_sent_before_the_end_is_read_however_late():
    class Brief:
        async def serve_fetch(self, stream):
            for k in range(5):
                await stream.send(m.FetchProgress(k, m.FetchState.SENDING, 0))

    server = new_server()
    add_fetch_service(server, Brief(), "right")
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    dialer = GrpcDialer("right")
    for delay_s in (0, 0.01, 0.1):
        stream = dialer.fetch(f"127.0.0.1:{port}")
        for k in range(5):
            await asyncio.sleep(delay_s)
            assert (await stream.receive()).step == k
        stream.close()
    await dialer.close()
    await server.stop(0)


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_handler_that_fails_while_it_sends_is_heard_of_at_once(num_turns):
    """T009: grpc refuses to say how a call ended while a write that was cancelled is under way."""

    async def chatter(stream):
        while True:
            await stream.send(m.FetchProgress(1, m.FetchState.COMPUTING, 0))

    async def fail():
        for _ in range(num_turns):
            await asyncio.sleep(0)
        raise OSError("out of luck")

    async with listening(serve_fetch=lambda stream: until_first(chatter(stream), fail())) as (_, dialer, address):
        for _ in range(5):
            stream = dialer.fetch(address)
            await stream.send(m.FetchAck(1))
            with pytest.raises(StreamEnded, match="OSError"):
                async with asyncio.timeout(2):
                    while True:
                        await stream.receive()


async def test_a_wrong_secret_is_refused_without_detail():
    async with listening("wrong") as (echo, dialer, address):
        for dial in (dialer.fetch, dialer.join):
            with pytest.raises(StreamEnded) as ended:
                await dial(address).receive()
            assert ended.value.status == "UNAUTHENTICATED"
            assert "right" not in str(ended.value)
        assert echo.num_serving == 0


async def test_an_address_where_nobody_listens_is_told_at_once():
    dialer = GrpcDialer("right")
    began = asyncio.get_running_loop().time()
    with pytest.raises(StreamEnded) as ended:
        stream = dialer.fetch("127.0.0.1:1")
        await stream.send(m.FetchAck(1))
        await stream.receive()
    assert ended.value.status == "UNAVAILABLE"
    assert asyncio.get_running_loop().time() - began < 3
    await dialer.close()


async def test_closing_many_streams_ends_their_handlers_and_leaves_room_for_the_next():
    async with listening() as (echo, dialer, address):
        streams = [dialer.fetch(address) for _ in range(64)]
        for stream in streams:
            await stream.send(m.FetchAck(1))
            await stream.receive()
        assert echo.num_serving == 64
        for stream in streams:
            stream.close()
        async with asyncio.timeout(2):
            while echo.num_serving:
                await asyncio.sleep(0.01)
        stream = dialer.fetch(address)
        await stream.send(m.FetchAck(5))
        assert (await stream.receive()).step == 5
        stream.close()


async def test_a_message_larger_than_grpcs_default_passes():
    class Large:
        async def serve_fetch(self, stream):
            await stream.send(m.Frame(0, b"", bytes(6 * 1024 * 1024)))
            with contextlib.suppress(StreamEnded):
                await stream.receive()

    server = new_server()
    add_fetch_service(server, Large(), "right")
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    dialer = GrpcDialer("right")
    stream = dialer.fetch(f"127.0.0.1:{port}")
    assert len((await stream.receive()).payload) == 6 * 1024 * 1024
    stream.close()
    await dialer.close()
    await server.stop(0)


async def test_a_port_that_is_taken_is_named():
    from kvferry.errors import ConfigurationError

    async with listening() as (_, _, address):
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=str(port)):
            bind(new_server(), "127.0.0.1", port)


class Raw:
    """Serves whatever bytes it is told to, as a broken or newer peer would."""

    def __init__(self, answer):
        self._answer = answer

    def service(self, details):
        import grpc

        async def handle(request_iterator, context):
            await context.write(self._answer)
            await context.read()

        return grpc.stream_stream_rpc_method_handler(handle) if details.method.endswith("/Fetch") else None


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff", b"\x1a\x02\x08\x63"])
async def test_a_message_that_cannot_be_read_ends_the_stream_and_nothing_else(answer):
    import grpc

    class Handler(grpc.GenericRpcHandler):
        service = Raw(answer).service

    server = new_server()
    server.add_generic_rpc_handlers((Handler(),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    dialer = GrpcDialer("right")
    stream = dialer.fetch(f"127.0.0.1:{port}")
    with pytest.raises(StreamEnded) as ended:
        await stream.receive()
    assert ended.value.status == "INTERNAL"
    await dialer.close()
    await server.stop(0)

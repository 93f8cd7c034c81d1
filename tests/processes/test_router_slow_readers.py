"""Readers slower than the model (T057): tokens never wait for them, others keep their pace, memory is bounded, leaving frees it."""

import contextlib
import socket
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.crowd import Crowd, address_of, body_of, crowd, request_of
from tests.processes.service import Service, wait_until
from tests.processes.simulated import Footprint, expected_of, ids, rss_mib, simulated, wait_streaming

pytestmark = [pytest.mark.model, pytest.mark.processes]
NORMAL_TOKENS = 70
TINY_BYTES = 2048
MAX_GROWTH_MIB = 120


@dataclass(frozen=True)
class Size:
    num_slow: int
    num_normal: int
    slow_tokens: int
    num_logprobs: int | None
    """Of each token: twenty are a kilobyte and more of answer, so that buffers fill within seconds."""
    done_s: float
    """By then all tokens are there, although nobody has read them."""


SHORT, WHOLE = Size(20, 10, 300, 20, 30.0), Size(50, 50, 4000, None, 300.0)


@pytest.fixture(scope="module")
def service(model_directory) -> Iterator[Service]:
    extra = {"decode": ["--max-sequences=192"]}
    with simulated(model_directory, kv_tokens=600_000, extra=extra) as running:
        yield running


@pytest.fixture
def clients(service) -> Iterator[Crowd]:
    with crowd(service.url) as running:
        yield running


class Dribble:
    """Streams over HTTP, each read by a byte a second, through the smallest buffer that there is."""

    def __init__(self, service: Service, bodies: list[dict[str, Any]]):
        self._sockets = [self._open(service, body) for body in bodies]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.num_bytes = 0

    @staticmethod
    def _open(service: Service, body: dict[str, Any]) -> socket.socket:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BYTES)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer grows with the segments
        one.connect(address_of(service.url))
        one.sendall(request_of(body))
        return one

    def _read(self) -> None:
        while not self._stop.wait(1.0):
            for one in self._sockets:
                self.num_bytes += len(one.recv(1))

    def __enter__(self) -> "Dribble":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def stalled_calls(service: Service, bodies: list[dict[str, Any]], num_logprobs: int | None) -> Iterator[list[Any]]:
    """gRPC calls of which one message is read, on a channel each."""
    with contextlib.ExitStack() as stack:
        calls: list[Any] = []
        for number, body in enumerate(bodies):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
            channel = stack.enter_context(grpc.insecure_channel(service.grpc, options))
            request = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=body["prompt"]),
                max_tokens=body["max_tokens"],
                temperature=0,
                ignore_eos=True,
                num_logprobs=num_logprobs,
                n=2,
            )
            calls.append(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
            stack.callback(calls[number].cancel)
        for call in calls:
            next(call)
        yield calls


def normal_pace_s(clients: Crowd, count: int, seed: object) -> float:
    """The median time per token of normal streams, which must be exact."""
    bodies = [body_of(ids(40 + k, (seed, k)), NORMAL_TOKENS) for k in range(count)]
    answers = [one.result(60) for one in clients.ask_all(bodies)]
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.is_whole
        assert answer.tokens == {0: expected_of(body)}
    return statistics.median(answer.tpot_s for answer in answers)


def num_connections(service: Service) -> int:
    """Of clients to the router's doors."""
    doors = {address_of(service.url)[1], int(service.grpc.rpartition(":")[2])}
    found = psutil.Process(service.pid("router")).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port in doors for one in found)


def check_rest(body: dict[str, Any], call: Any) -> None:
    """Who reads after all has everything, but for the message that was read before."""
    rest: dict[int, list[int]] = {0: [], 1: []}
    for piece in call:
        rest[piece.choice] += piece.token_ids
    for tokens in rest.values():
        assert tokens == expected_of(body)[-len(tokens) :]
        assert len(tokens) >= body["max_tokens"] - 4


@pytest.mark.parametrize("size", [SHORT, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["short", "whole"])
@pytest.mark.parametrize("door", ["http", "grpc"])
def test_slow_readers_hold_up_nobody_and_nothing(service, clients, door, size):
    def pace_s(when: str) -> float:
        return normal_pace_s(clients, size.num_normal, (when, door, size.num_normal))

    alone_s = pace_s("alone")
    service.wait_idle()
    at_rest, rss = Footprint(service), rss_mib(service)
    prompts = [ids(30, ("slow", door, k)) for k in range(size.num_slow)]
    bodies = [body_of(prompt, size.slow_tokens, logprobs=size.num_logprobs) for prompt in prompts]
    slowly = Dribble(service, bodies) if door == "http" else stalled_calls(service, bodies, size.num_logprobs)
    with slowly as slow:
        wait_streaming(service, size.num_slow)
        beside_s = pace_s("beside")
        print(f"{door}: {alone_s * 1e3:.1f} ms a token alone, {beside_s * 1e3:.1f} ms beside slow readers")
        assert beside_s < 3 * alone_s + 0.02
        # their tokens are done, and their slots free, although nobody has read them
        wait_until(lambda: not service.num_held, size.done_s, "the workers to be done with what nobody reads")
        generated = service.total("kvferry_request_events_total", event="finished")
        assert generated >= size.num_slow
        assert num_connections(service) >= size.num_slow, "nobody was slow: the answers fitted into buffers"
        growth = rss_mib(service) - rss
        print(f"{door}: the router has grown by {growth:.1f} MiB")
        assert growth < MAX_GROWTH_MIB
        assert pace_s("after") < 3 * alone_s + 0.02
        if door == "grpc":
            check_rest(bodies[0], slow[0])
    at_rest.wait_back(spare=8)
    service.wait_idle()

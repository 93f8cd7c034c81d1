"""Clients that leave, at every phase and by every door (T026 to T030, T032): nothing is held, nothing more is computed."""

import contextlib
import json
import random
import socket
import struct
import time

import grpc
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.service import completion_body, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes]


def ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


@contextlib.contextmanager
def raw_request(service, body, reset=False):
    """A socket with a request sent; leaving the body closes it with FIN, or RST."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield connection
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def all_released_soon(service, step_s=1.0):
    """After the running step and half a second (and a scrape of what the workers report)."""
    began = time.monotonic()
    service.wait_idle(step_s + 0.5 + 1.0)
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_s", [0.02, 0.3, 1.5])
def test_a_client_that_leaves_during_a_long_prefill_stops_it(service, stream, after_s):
    before = service.total("kvferry_worker_events_total", name="computed_tokens")
    with raw_request(service, {**completion_body(ids(1900, (stream, after_s)), 50), "stream": stream}):
        time.sleep(after_s)
    all_released_soon(service)
    began = time.monotonic()
    service.tokens(ids(20, after_s), 1)
    assert time.monotonic() - began < 2
    assert service.total("kvferry_worker_events_total", name="computed_tokens") - before < 1500


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_mid_stream_stops_the_decoding(service, stream, reset):
    with contextlib.ExitStack() as stack:
        for k in range(8):
            body = {**completion_body(ids(20, k), 1500), "stream": stream}
            connection = stack.enter_context(raw_request(service, body, reset))
            if stream:
                assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: service.total("kvferry_requests", phase="decoding") >= 8, 20, "all to decode")
    all_released_soon(service)
    generated = service.total("kvferry_worker_events_total", name="generated_tokens")
    time.sleep(0.5)
    assert service.total("kvferry_worker_events_total", name="generated_tokens") == generated


def test_queued_requests_of_clients_that_left_are_never_computed(service):
    with contextlib.ExitStack() as running:
        for k in range(4):
            running.enter_context(raw_request(service, {**completion_body(ids(1500, ("run", k)), 500), "stream": True}))
        with contextlib.ExitStack() as queued:
            for k in range(30):
                queued.enter_context(raw_request(service, completion_body(ids(1500, ("queue", k)), 500)))
            wait_until(lambda: service.total("kvferry_requests") >= 34, 10, "all to be accepted")
            assert service.total("kvferry_requests", phase="queued") > 10
        wait_until(lambda: service.total("kvferry_requests") <= 4, 2, "the queue to empty")
    all_released_soon(service)
    assert service.total("kvferry_worker_events_total", name="computed_tokens") < 60_000


def test_clients_that_leave_between_prefill_and_decode_leave_nothing(service):
    for k in range(12):
        with raw_request(service, {**completion_body(ids(60, ("gap", k)), 50), "stream": bool(k % 2)}):
            time.sleep(0.05 + 0.02 * k)
    all_released_soon(service)


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_dropped_grpc_call_ends_its_request(service, num_read):
    with grpc.insecure_channel(service.grpc) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=ids(30, num_read)),
                max_tokens=1000,
                temperature=0,
                ignore_eos=True,
            )
        )
        for _ in range(num_read):
            next(call)
        if not num_read:
            wait_until(lambda: service.total("kvferry_requests") >= 1, 5, "the request to arrive")
        call.cancel()
    all_released_soon(service)
    assert service.total("kvferry_worker_sequences", state="serving") == 0


def test_a_time_limit_ends_a_request_with_its_own_error(service):
    body = {**completion_body(ids(50, "limit"), 1500), "timeout_s": 1.0}
    response = service.http.post("/v1/completions", json=body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    with (
        service.streaming(ids(50, "limit"), 1500, timeout_s=1.0) as events,
        pytest.raises(AssertionError, match="time limit"),
    ):
        list(events)
    all_released_soon(service)

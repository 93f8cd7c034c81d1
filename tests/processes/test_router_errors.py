"""What clients are told when nobody can go on with their requests (T039, T040), and that an id which they bring means nothing (T054).

One decode worker, so that there is no spare one; it is stopped, so that none comes in its place.
"""

import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.crowd import Crowd, address_of, body_of, crowd, request_of
from tests.processes.service import Service, wait_until
from tests.processes.simulated import event, expected_of, ids, simulated, states, stopped, wait_streaming

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
SILENCE_S = 1.5
LIMIT_S = 3.0
"""Of the requests: they are longer than that, and last longer than it takes to see that nobody goes on with them."""


@pytest.fixture(scope="module")
def lone(model_directory) -> Iterator[Service]:
    silence = [f"--silence-s={SILENCE_S:g}"]
    with simulated(model_directory, extra={"router": silence, "decode": silence}) as running:
        yield running


@pytest.fixture
def clients(lone) -> Iterator[Crowd]:
    with crowd(lone.url) as running:
        yield running


@pytest.fixture(autouse=True)
def _leaves_nothing(lone) -> Iterator[None]:
    yield
    wait_until(lambda: states(lone).get("decode-1") == "ready", 10, "the decode worker to be well")
    lone.wait_idle()


def limited(seed: object, **fields: Any) -> dict[str, Any]:
    return body_of(ids(40, seed), 2000, timeout_s=LIMIT_S, **fields)


def call_grpc(channel: grpc.Channel, body: dict[str, Any], metadata: Any = ()) -> Any:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=body["prompt"]),
        max_tokens=body["max_tokens"],
        temperature=0,
        ignore_eos=True,
        timeout_ms=round(body.get("timeout_s", 0) * 1000),
    )
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)


def begun_with_the_openai_client(lone: Service) -> Any:
    client = openai.OpenAI(base_url=f"{lone.url}/v1", api_key="none", max_retries=0)
    extra = {"timeout_s": LIMIT_S, "ignore_eos": True}
    stream: Any = client.completions.create(
        model="SmolLM2-135M-Instruct", prompt="Once", max_tokens=2000, stream=True, extra_body=extra
    )
    next(iter(stream))
    return stream


def test_a_stream_that_breaks_half_way_cannot_be_taken_for_a_whole_one_at_any_door(lone, clients):
    """T040."""
    with (
        grpc.insecure_channel(lone.grpc) as channel,
        lone.streaming(ids(30, "raw"), 2000, timeout_s=LIMIT_S) as raw,
    ):
        lines = raw.response.iter_lines()
        assert next(lines).startswith("data: ")
        ours = clients.ask(limited("two choices", n=2))
        theirs, call = begun_with_the_openai_client(lone), call_grpc(channel, limited("grpc"))
        next(call)
        wait_streaming(lone, 4)
        with stopped(lone, "decode-1"):
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
            answer = ours.result(2 * LIMIT_S)
            with pytest.raises(openai.APIError, match="time limit"):
                list(theirs)
            with pytest.raises(grpc.RpcError) as broken:
                list(call)
    error = events.pop()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "deadline_exceeded"
    assert "decode" in error["message"] or "queued" in error["message"], "it says where the request was"
    assert all(choice["finish_reason"] is None for chunk in events for choice in chunk["choices"])
    assert broken.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (answer.status, answer.is_whole, answer.finish) == (200, False, {}), "no [DONE], and no choice has an end"
    assert answer.error == error
    truth = expected_of(limited("two choices"))
    for tokens in answer.tokens.values():
        assert 0 < len(tokens) < 2000
        assert tokens == truth[: len(tokens)], "what came before is right"


def test_what_fails_before_its_first_token_has_a_status_and_an_error_of_its_own(lone, clients):
    """T039: while the only decode worker stands still, and when it is known to."""
    failed = event(lone, "failed")
    with stopped(lone, "decode-1"), grpc.insecure_channel(lone.grpc) as channel:
        stuck = clients.ask_all([limited(("stuck", stream), stream=stream) for stream in (True, False)])
        call = call_grpc(channel, limited("stuck grpc"))
        wait_until(lambda: lone.http.get("/health/ready").status_code == 503, SILENCE_S + 3, "it to be missed")
        refused = [one.result(1) for one in clients.ask_all([limited("late"), limited("late", stream=False)])]
        answers = [one.result(2 * LIMIT_S) for one in stuck]
        with pytest.raises(grpc.RpcError) as broken:
            next(call)
    assert broken.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [answer.status for answer in (*answers, *refused)] == [504, 504, 503, 503]
    for answer in (*answers, *refused):
        assert answer.error is not None
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.tokens == {}
    assert all(answer.retry_after_s for answer in refused)
    assert event(lone, "failed") - failed == 3, "who is refused was never accepted"


def test_ten_requests_with_one_id_are_ten_and_leaving_one_ends_one(lone, clients):
    """T054: in the header, in the body and in gRPC's metadata."""
    bodies = [body_of(ids(30 + k, ("same", k)), 60, request_id="same", id="same") for k in range(10)]
    cancelled = event(lone, "cancelled")
    answers = clients.ask_all(bodies, x_request_id="same")
    with grpc.insecure_channel(lone.grpc) as channel:
        call = call_grpc(channel, bodies[0], [("x-request-id", "same"), ("request-id", "same")])
        wait_streaming(lone, 11)
        answers.pop(3).cancel()
        del bodies[3]
        assert [token for piece in call for token in piece.token_ids] == expected_of(body_of(ids(30, ("same", 0)), 60))
    own: set[str] = set()
    for body, one in zip(bodies, answers, strict=True):
        answer = one.result(20)
        assert (answer.is_whole, answer.tokens) == (True, {0: expected_of(body)})
        own.add(answer.headers["x-request-id"])
    assert len(own) == 9
    assert "same" not in own
    assert event(lone, "cancelled") - cancelled == 1


@pytest.mark.parametrize("id_", ["x" * 10_000, "\u00e9\x01", "a\nset-cookie: b=c", "%0d%0aset-cookie: b=c"])
def test_an_id_that_no_header_should_have_is_refused_or_ignored_and_never_said_again(lone, clients, id_):
    """T054."""
    body = body_of(ids(20, "id"), 3)
    with socket.create_connection(address_of(lone.url), timeout=5) as connection:
        connection.sendall(request_of(body, x_request_id=id_))
        with connection.makefile("rb") as answer:
            head, _, rest = answer.read().partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status in (200, 400, 431)
    assert (b"[DONE]" in rest) == (b"x-request-id: cmpl-" in head) == (status == 200)
    assert id_.encode() not in head + rest
    assert b"set-cookie" not in head
    assert clients.ask(body).result(5).tokens == {0: expected_of(body)}

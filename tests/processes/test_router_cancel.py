"""Clients that leave (T026 to T033), against the queue that places late: what waits vanishes, what runs stops, nothing stays."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvferry.rpc.v1 import generation_pb2, generation_pb2_grpc
from tests.processes.crowd import Crowd, body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import (
    Footprint,
    choices_of,
    counted,
    event,
    expected_of,
    ids,
    sequences,
    simulated,
    wait_streaming,
)

pytestmark = [pytest.mark.model, pytest.mark.processes]
MAX_SEQUENCES = 8


@pytest.fixture(scope="module")
def service(model_directory) -> Iterator[Service]:
    """A prompt's token takes the prefill worker about 80 microseconds; few streams fit at once."""
    extra = {"decode": [f"--max-sequences={MAX_SEQUENCES}"]}
    with simulated(model_directory, extra=extra) as running:
        yield running


@pytest.fixture
def clients(service) -> Iterator[Crowd]:
    with crowd(service.url) as running:
        yield running


@pytest.fixture(autouse=True)
def _leaves_nothing(service) -> Iterator[None]:
    yield
    service.wait_idle(3)
    assert not any(
        value < 0 for name, value in service.metrics().items() if "kvferry_" in name and "_bucket" not in name
    )


def computed_for_prompts(service: Service) -> float:
    return counted(service, "computed_tokens", role="prefill")


def test_fifty_queued_clients_vanish_within_a_second_and_are_never_prefilled(service, clients):
    running = clients.ask_all([body_of(ids(64, ("run", k)), 2000) for k in range(MAX_SEQUENCES)])
    wait_streaming(service, MAX_SEQUENCES)
    time.sleep(1.1)  # the workers have told what they computed
    before, opened = computed_for_prompts(service), counted(service, "requests_opened")
    bodies = [body_of(ids(1000, ("queue", k)), 100, stream=bool(k % 2)) for k in range(50)]
    queued = [clients.ask(body, reset=bool(k % 3)) for k, body in enumerate(bodies)]
    wait_until(lambda: service.total("kvferry_requests", phase="queued") == 50, 5, "all to wait")
    assert service.total("kvferry_queued_tokens") == 50 * 1100
    for one in queued:
        one.cancel()
    wait_until(lambda: service.total("kvferry_requests", phase="queued") == 0, 1, "the queue to empty")
    assert service.total("kvferry_queued_tokens") == 0
    for one in running:
        one.cancel()
    service.wait_idle(2)
    body = body_of(ids(32, "next"), 4)
    assert clients.ask(body).result(3).tokens == {0: expected_of(body)}
    time.sleep(1.1)
    assert computed_for_prompts(service) - before < 1000
    assert counted(service, "requests_opened") - opened == 1


def call_grpc(channel: grpc.Channel, body: dict[str, Any]) -> Any:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=body["prompt"]),
        max_tokens=body["max_tokens"],
        temperature=0,
        ignore_eos=True,
    )
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


PHASES = ("queued", "prefilling", "decoding")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["fin", "rst whole", "grpc"])
def test_a_client_that_leaves_in_any_phase_by_any_door_ends_its_request(service, clients, phase, way):
    """Prefilling includes the hand-over and the wait for the first step of decode."""
    fillers = clients.ask_all(
        [body_of(ids(20, (phase, way, k)), 3000) for k in range(MAX_SEQUENCES if phase == "queued" else 0)]
    )
    wait_streaming(service, len(fillers))
    cancelled = event(service, f"cancelled_{phase}")
    length = 7000 if phase == "prefilling" else 100
    body = body_of(ids(length, (phase, way)), 1000, stream=way != "rst whole")
    with grpc.insecure_channel(service.grpc) as channel:
        asked: Any = call_grpc(channel, body) if way == "grpc" else clients.ask(body, reset=way == "rst whole")
        wanted = 1 + len(fillers) * (phase == "decoding")
        wait_until(lambda: service.total("kvferry_requests", phase=phase) >= wanted, 5, f"it to be {phase}")
        asked.cancel()
        wait_until(lambda: event(service, f"cancelled_{phase}") == cancelled + 1, 1, "it to be cancelled")
    for one in fillers:
        one.cancel()
    service.wait_idle(2)
    if phase == "prefilling":
        began = time.monotonic()
        small = body_of(ids(20, (way, "small")), 1)
        assert clients.ask(small).result(3).tokens == {0: expected_of(small)}
        assert time.monotonic() - began < 0.45, "the long prompt was still being computed"


def test_tokens_that_come_for_one_that_has_left_are_dropped_and_counted(service, clients):
    late = event(service, "late_messages")
    for turn in range(10):
        streams = clients.ask_all([body_of(ids(30, ("late", turn, k)), 500) for k in range(MAX_SEQUENCES)])
        wait_streaming(service, MAX_SEQUENCES)
        for one in streams:
            one.cancel()
        service.wait_idle(2)
        if event(service, "late_messages") > late:
            break
    assert event(service, "late_messages") > late


@pytest.mark.parametrize("num_rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_two_hundred_cancelled_at_once_leave_nothing(service, clients, num_rounds):
    """T031, T033: in all phases, by both doors; then the service has its full capacity."""
    at_rest: Footprint | None = None
    for turn in range(num_rounds):
        bodies = [body_of(ids(20 + 17 * (k % 60), ("many", turn, k)), 200, n=1 + k % 2) for k in range(150)]
        asked: list[Any] = clients.ask_all(bodies, reset=bool(turn % 2))
        with grpc.insecure_channel(service.grpc) as channel:
            asked += [call_grpc(channel, body_of(ids(40, ("grpc", turn, k)), 200)) for k in range(50)]
            wait_until(lambda: service.total("kvferry_requests") >= 190, 10, "all to arrive")
            wait_streaming(service, 2)
            for one in asked:
                one.cancel()
            service.wait_idle(3)
            after = body_of(ids(40, ("after", turn)), 5)
            began = time.monotonic()
            got = [token for piece in call_grpc(channel, after) for token in piece.token_ids]
            assert got == expected_of(after)
            assert time.monotonic() - began < 1
        full = [body_of(ids(30, ("full", turn, k)), 20) for k in range(MAX_SEQUENCES)]
        answers = [one.result(5) for one in clients.ask_all(full)]
        assert all(answer.tokens == {0: expected_of(body)} for body, answer in zip(full, answers, strict=True))
        assert max(answer.numbers["instants_ms"]["placed"] for answer in answers) < 100
        service.wait_idle(3)
        if at_rest is None:
            at_rest = Footprint(service)
        else:
            at_rest.wait_back(spare=8)
    assert not sequences(service, "prefill-1")


def test_a_burst_well_inside_the_limits_is_answered_whole(service, clients):
    """T058: 300 at once from idle, each choice right."""
    bodies = [body_of(ids(10 + 7 * (k % 40), ("inside", k)), 1 + k % 3, n=1 + (k % 4 == 3)) for k in range(300)]
    answers = [one.result(60) for one in clients.ask_all(bodies)]
    assert Counter(answer.status for answer in answers) == {200: 300}
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.tokens == choices_of(body)

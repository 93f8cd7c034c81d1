"""SIGTERM to a worker under streams (T086): no client notices, what runs there ends there or goes on elsewhere, it exits in order."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes.crowd import Answer, Crowd, body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import (
    choices_of,
    counted,
    event,
    ids,
    sequences,
    simulated,
    states,
    wait_restarted,
    wait_streaming,
)

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
NUM_STREAMS = 20
SHORT_GRACE_S = 1.0


@pytest.fixture(scope="module")
def drained(model_directory) -> Iterator[Service]:
    """The second decode worker has little time to end."""
    extra = {"decode-2": [f"--drain-s={SHORT_GRACE_S:g}"]}
    with simulated(model_directory, num_prefill=2, num_decode=2, extra=extra) as running:
        yield running


@pytest.fixture
def clients(drained) -> Iterator[Crowd]:
    drained.wait_ready()
    with crowd(drained.url) as running:
        yield running
    drained.wait_idle()


def streams(clients: Crowd, seed: object, num_tokens: int) -> tuple[list[dict[str, Any]], list[Any]]:
    kinds = [{}, {"n": 2}, {"temperature": 0.8, "seed": 3}, {"logprobs": 0}]
    bodies = [body_of(ids(40 + 9 * k, (seed, k)), num_tokens, **kinds[k % 4]) for k in range(NUM_STREAMS)]
    return bodies, clients.ask_all(bodies)


def check(bodies: list[dict[str, Any]], asked: list[Any]) -> list[Answer]:
    answers = [one.result(60) for one in asked]
    for body, answer in zip(bodies, answers, strict=True):
        assert (answer.status, answer.error, answer.is_whole) == (200, None, True), answer
        assert answer.tokens == choices_of(body), answer.numbers
    return answers


def terminate(service: Service, name: str) -> float:
    service.signal(name, signal.SIGTERM)
    return time.monotonic()


def wait_gone(service: Service, name: str, timeout_s: float) -> None:
    child = service.deployment.children[name]
    wait_until(lambda: child.state.startswith("died") or child.num_starts > 1, timeout_s, f"{name} to exit")
    assert child.previous_end == "code 0"


def test_a_decode_worker_that_drains_ends_what_it_has_and_gets_nothing_new(drained, clients):
    bodies, asked = streams(clients, "drain", 200)
    wait_streaming(drained, NUM_STREAMS)
    wait_until(lambda: sequences(drained, "decode-1") >= 2, 1, "it to have streams, and to have told so")
    losses, moved = event(drained, "worker_losses"), event(drained, "continuations")
    began = terminate(drained, "decode-1")
    wait_until(lambda: states(drained).get("decode-1") == "draining", 2, "readiness to show it")
    assert drained.total("kvferry_worker_state", worker="decode-1", state="draining") == 1
    more, asked_more = streams(clients, "meanwhile", 10)
    assert {answer.numbers["decode_worker"] for answer in check(more, asked_more)} == {"decode-2"}
    answers = check(bodies, asked)
    assert {answer.numbers["attempts"] for answer in answers} == {1}
    assert (event(drained, "worker_losses"), event(drained, "continuations")) == (losses, moved)
    wait_gone(drained, "decode-1", 5)
    assert time.monotonic() - began < 15
    wait_restarted(drained, "decode-1", 2)


def test_what_has_not_ended_within_the_grace_goes_on_elsewhere(drained, clients):
    bodies, asked = streams(clients, "short", 250)
    wait_streaming(drained, NUM_STREAMS)
    wait_until(lambda: sequences(drained, "decode-2") >= 2, 1, "it to have streams, and to have told so")
    began = terminate(drained, "decode-2")
    wait_gone(drained, "decode-2", SHORT_GRACE_S + 3)
    print(f"a grace of {SHORT_GRACE_S:g} s: gone after {time.monotonic() - began:.2f} s")
    answers = check(bodies, asked)
    moved = [answer for answer in answers if answer.numbers["attempts"] > 1]
    assert moved
    print(f"{len(moved)} streams moved, longest gap {max(answer.longest_gap_s for answer in moved):.3f} s")
    wait_restarted(drained, "decode-2", 2)


def test_a_prefill_worker_that_drains_in_mid_hand_off_hands_over_what_it_has(drained, clients):
    failed = fetches_failed(drained)
    bodies = [body_of(ids(3000 + 16 * k, ("hand-off", k)), 20) for k in range(8)]
    asked = clients.ask_all(bodies)
    wait_until(
        lambda: drained.total("kvferry_worker_sequences", worker="prefill-1", state="serving") >= 2, 5, "fetches"
    )
    computed = counted(drained, "computed_tokens", worker="prefill-1")
    began = terminate(drained, "prefill-1")
    wait_until(lambda: states(drained).get("prefill-1") == "draining", 2, "readiness to show it")
    answers = check(bodies, asked)
    assert {answer.numbers["attempts"] for answer in answers} == {1}
    assert {answer.numbers["source_worker"] for answer in answers} == {"prefill-1", "prefill-2"}
    assert fetches_failed(drained) == failed
    wait_gone(drained, "prefill-1", 5)
    assert time.monotonic() - began < 15
    assert computed < 8 * 3000, "the hand-off was over before it began to drain"
    wait_restarted(drained, "prefill-1", 2)
    more = [body_of(ids(500, ("after", k)), 5) for k in range(8)]
    check(more, clients.ask_all(more))


def fetches_failed(service: Service) -> float:
    return sum(value for name, value in service.metrics().items() if "fetch_failed_" in name)


def test_a_second_signal_ends_a_draining_worker_at_once(drained, clients):
    bodies, asked = streams(clients, "twice", 150)
    wait_streaming(drained, NUM_STREAMS)
    num_starts = drained.deployment.children["decode-1"].num_starts
    terminate(drained, "decode-1")
    wait_until(lambda: states(drained).get("decode-1") == "draining", 2, "it to drain")
    began = terminate(drained, "decode-1")
    wait_until(
        lambda: (
            drained.deployment.children["decode-1"].state.startswith("died")
            or drained.deployment.children["decode-1"].num_starts > num_starts
        ),
        2,
        "it to exit",
    )
    assert time.monotonic() - began < 2
    check(bodies, asked)
    wait_restarted(drained, "decode-1", num_starts + 1)

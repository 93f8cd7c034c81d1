"""More than the service can do (T046, T055, T058): the surplus is told so at once, what was accepted ends exactly, nothing stays behind."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes.crowd import Answer, Crowd, body_of, crowd
from tests.processes.service import Service, serving, wait_until
from tests.processes.simulated import Footprint, choices_of, event, ids, rss_mib, simulated, wait_streaming

pytestmark = [pytest.mark.model, pytest.mark.processes]
MAX_SEQUENCES, MAX_QUEUED, QUEUE_TIMEOUT_S = 8, 16, 2.0
QUICKLY_S = 1.5
"""Loose: hundreds of clients share two cores with the router."""


@pytest.fixture(scope="module")
def service(model_directory) -> Iterator[Service]:
    extra = {
        "router": [f"--max-queued={MAX_QUEUED}", f"--queue-timeout-s={QUEUE_TIMEOUT_S:g}"],
        "decode": [f"--max-sequences={MAX_SEQUENCES}"],
    }
    with simulated(model_directory, extra=extra) as running:
        yield running


@pytest.fixture
def clients(service) -> Iterator[Crowd]:
    with crowd(service.url) as running:
        yield running


def check_refusal(answer: Answer, *words: str) -> None:
    assert answer.status in (429, 503), answer
    assert 1 <= answer.retry_after_s <= 60
    assert answer.error is not None
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert "decode pool" in answer.error["message"]
    assert all(word in answer.error["message"] for word in words), answer.error["message"]


def check_answer(body: dict[str, Any], answer: Answer) -> None:
    assert answer.is_whole, answer
    assert answer.tokens == choices_of(body)


def burst(round_number: int) -> list[dict[str, Any]]:
    """300 of mixed sizes, with one to three choices, whole and streamed."""
    bodies: list[dict[str, Any]] = []
    for k in range(300):
        prompt = ids(10 + 13 * (k % 20), ("burst", round_number, k))
        bodies.append(body_of(prompt, 5 + k % 11, n=1 + k % 3, stream=bool(k % 2)))
    return bodies


@pytest.mark.parametrize("num_rounds", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_bursts_of_300_are_answered_exactly_or_refused_at_once_and_leave_nothing(service, clients, num_rounds):
    at_rest: Footprint | None = None
    for round_number in range(num_rounds):
        bodies = burst(round_number)
        answers = [one.result(60) for one in clients.ask_all(bodies)]
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) <= {200, 429}, statuses
        assert statuses[200] >= MAX_SEQUENCES // 3 + MAX_QUEUED
        assert statuses[429] >= 200
        for body, answer in zip(bodies, answers, strict=True):
            if answer.status == 200:
                check_answer(body, answer)
            else:
                check_refusal(answer)
        took = [answer.ended_s - answer.sent_s for answer in answers if answer.status == 429]
        print(f"{dict(statuses)}, refused within {statistics.median(took):.3f} s, at most {max(took):.3f} s")
        assert statistics.median(took) < QUICKLY_S
        service.wait_idle()
        if at_rest is None:
            at_rest = Footprint(service)  # the first round has started the threads that there will be
        else:
            at_rest.wait_back(spare=8)
    assert all(child.num_starts == 1 for child in service.deployment.children.values())


def test_a_full_queue_refuses_at_once_and_the_accepted_are_served_in_time(service, clients):
    """T055: five times what it can do, open loop."""
    bodies = [body_of(ids(40, ("flood", k)), 40) for k in range(160)]
    answers, rss = [], rss_mib(service)
    for body in bodies:
        answers.append(clients.ask(body))
        time.sleep(0.012)  # 80 a second; about 16 can be done
    done = [one.result(20) for one in answers]
    refused = [answer for answer in done if answer.status != 200]
    accepted = [(body, answer) for body, answer in zip(bodies, done, strict=True) if answer.status == 200]
    assert len(accepted) >= 24
    assert len(refused) >= 80
    for answer in refused:
        check_refusal(answer)
    for body, answer in accepted:
        check_answer(body, answer)
        assert answer.numbers["instants_ms"]["placed"] / 1000 < QUEUE_TIMEOUT_S + 0.5
    unqueued = [answer for answer in refused if "waited" not in str(answer.error)]
    took = sorted(answer.ended_s - answer.sent_s for answer in unqueued)
    median_ms, last_ms = statistics.median(took) * 1e3, took[-1 - len(took) // 50] * 1e3
    print(
        f"{len(accepted)} accepted, {len(refused)} refused, {len(unqueued)} of them in {median_ms:.0f}, {last_ms:.0f} ms"
    )
    assert len(unqueued) > len(refused) / 2
    assert median_ms < 100
    assert last_ms < 500
    assert rss_mib(service) < rss + 60
    service.wait_idle()
    check_answer(bodies[0], clients.ask(bodies[0]).result(5))


def test_one_that_has_waited_for_as_long_as_it_may_hears_which_pool_is_full(service, clients):
    running = clients.ask_all([body_of(ids(30, ("holds", k)), 400) for k in range(MAX_SEQUENCES)])
    wait_streaming(service, MAX_SEQUENCES)
    waiting = clients.ask_all([body_of(ids(30, ("waits", k)), 5, stream=bool(k)) for k in range(2)])
    for one in waiting:
        answer = one.result(QUEUE_TIMEOUT_S + 3)
        check_refusal(answer, "waited")
        assert answer.status == 429
        assert QUEUE_TIMEOUT_S - 0.2 < answer.ended_s - answer.sent_s < QUEUE_TIMEOUT_S + 1.5
    for one in running:
        one.cancel()
    service.wait_idle()


def test_a_request_whose_time_to_the_first_token_cannot_be_kept_is_refused_when_it_comes(service, clients):
    """The queue moves at a pace that is known: one that names a time beyond it does not wait until that is over."""
    flowing = clients.ask_all([body_of(ids(30, ("flows", k)), 60) for k in range(MAX_SEQUENCES + MAX_QUEUED)])
    wait_until(lambda: 0 < service.total("kvferry_requests", phase="queued") <= MAX_QUEUED - 6, 10, "it to flow")
    hurried = clients.ask(body_of(ids(30, "hurried"), 5), x_slo_ttft_ms="5").result(2)
    check_refusal(hurried, "would wait")
    assert hurried.status == 429
    assert hurried.ended_s - hurried.sent_s < 0.5
    assert all(one.result(10).is_whole for one in flowing)
    service.wait_idle()


def test_a_pause_between_two_bursts_is_not_taken_for_the_pace_of_the_queue(service, clients):
    """What a request would wait is foretold from the times in which others waited."""
    for burst_number in range(2):
        time.sleep(2.0 * burst_number)
        bodies = [body_of(ids(30, ("paused", burst_number, k)), 40) for k in range(MAX_SEQUENCES + MAX_QUEUED)]
        for body, one in zip(bodies, clients.ask_all(bodies), strict=True):
            check_answer(body, one.result(10))
    service.wait_idle()


def test_without_a_decode_worker_the_answer_is_503_at_once_and_the_next_one_serves(service, clients):
    child = service.deployment.children["decode-1"]
    num_starts = child.num_starts
    service.kill("decode-1")
    wait_until(lambda: service.http.get("/health/ready").status_code == 503, 3, "readiness to turn false")
    answer = clients.ask(body_of(ids(20, "none"), 5)).result(2)
    check_refusal(answer, "empty")
    assert answer.status == 503
    assert answer.ended_s - answer.sent_s < 0.5
    wait_until(lambda: child.num_starts > num_starts, 10, "it to start again")
    wait_until(lambda: service.http.get("/health/ready").status_code == 200, 20, "it to be back")
    body = body_of(ids(20, "some"), 5)
    check_answer(body, clients.ask(body).result(10))


@pytest.mark.soak
def test_the_packaged_model_under_five_times_its_load(model_directory, reference):
    with (
        serving(model_directory, kv_tokens=600, extra={"router": ["--max-queued=8", "--queue-timeout-s=5"]}) as small,
        crowd(small.url) as clients,
    ):
        bodies = [body_of(ids(40, ("model", k)), 16) for k in range(60)]
        done = [one.result(120) for one in clients.ask_all(bodies)]
        assert event(small, "rejected_overloaded") == sum(answer.status == 429 for answer in done) > 0
        for body, answer in zip(bodies, done, strict=True):
            if answer.status == 200:
                reference.check(body["prompt"], answer.tokens[0], 16)
        small.wait_idle()

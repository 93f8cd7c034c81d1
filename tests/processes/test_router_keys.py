"""`Idempotency-Key` at one router: a request that comes again joins what runs, and nobody's leaving ends another's answer."""

import time
from collections.abc import Iterator

import pytest

from router.idempotency import seed_of
from tests.processes.crowd import Crowd, body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import counted, event, expected, ids, simulated, wait_streaming

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]
NUM_TOKENS = 90


@pytest.fixture(scope="module")
def service(model_directory) -> Iterator[Service]:
    with simulated(model_directory) as running:
        yield running


@pytest.fixture
def clients(service) -> Iterator[Crowd]:
    with crowd(service.url) as running:
        yield running


def truth(prompt: list[int], key: str, choice: int = 0) -> list[int]:
    return expected(prompt, NUM_TOKENS, seed_of(key, b""), 1, choice)


def settled(service: Service, name: str) -> float:
    service.wait_idle()
    time.sleep(1.1)  # a worker tells what it has counted at least once a second
    return counted(service, name)


def test_requests_with_one_key_run_once_and_each_gets_everything(service, clients):
    prompt, before, joined = ids(70, "once"), settled(service, "generated_tokens"), event(service, "joined")
    body = body_of(prompt, NUM_TOKENS, temperature=1)
    answers = [clients.ask(body, idempotency_key="once")]
    wait_streaming(service, 1)
    time.sleep(0.3)  # the later ones find tokens there already
    answers += [clients.ask(body, idempotency_key="once") for _ in range(2)]
    answers += [clients.ask({**body_of(prompt, NUM_TOKENS, temperature=1, stream=False)}, idempotency_key="once")]
    for one in answers:
        answer = one.result(20)
        assert answer.status == 200
        assert answer.is_whole
        assert answer.tokens == {0: truth(prompt, "once")}
        assert answer.finish == {0: "length"}
        assert answer.text == answers[0].result().text
    assert event(service, "joined") - joined == 3
    assert settled(service, "generated_tokens") - before == NUM_TOKENS


def test_two_that_come_at_the_same_instant_run_once(service, clients):
    prompt, before = ids(70, "instant"), (event(service, "accepted"), event(service, "joined"))
    body = body_of(prompt, NUM_TOKENS, temperature=1, n=2)
    for one in [clients.ask(body, idempotency_key="instant") for _ in range(2)]:
        assert one.result(20).tokens == {choice: truth(prompt, "instant", choice) for choice in range(2)}
    assert (event(service, "accepted"), event(service, "joined")) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(("leaver", "reset"), [(0, False), (1, True)])
def test_one_that_leaves_does_not_end_the_other_and_the_last_does(service, clients, leaver, reset):
    key, cancelled = f"leaves {leaver} {reset}", event(service, "cancelled")
    prompt = ids(70, key)
    body = body_of(prompt, NUM_TOKENS, temperature=1)
    pair = [clients.ask(body, idempotency_key=key, reset=reset) for _ in range(2)]
    wait_streaming(service, 1)
    pair[leaver].cancel()
    assert pair[1 - leaver].result(20).tokens == {0: truth(prompt, key)}
    assert event(service, "cancelled") == cancelled
    body = body_of(prompt, 3000, temperature=1)
    pair = [clients.ask(body, idempotency_key=key, reset=reset) for _ in range(2)]
    wait_streaming(service, 1)
    pair[leaver].cancel()
    time.sleep(0.3)
    assert service.total("kvferry_requests") == 1
    pair[1 - leaver].cancel()
    service.wait_idle(2)
    assert event(service, "cancelled") == cancelled + 1


@pytest.mark.parametrize("stream", [False, True])
def test_another_request_under_a_key_that_is_in_use_is_a_conflict(service, clients, stream):
    prompt, key = ids(70, "conflict"), f"conflict {stream}"
    body = body_of(prompt, NUM_TOKENS, temperature=1)
    running = clients.ask(body, idempotency_key=key)
    wait_streaming(service, 1)
    for other in ({"prompt": prompt[1:]}, {"max_tokens": 7}, {"temperature": 0.5}, {"seed": 3}, {"n": 2}):
        answer = clients.ask(
            {**body_of(prompt, NUM_TOKENS, temperature=1, stream=stream), **other}, idempotency_key=key
        )
        answer = answer.result(5)
        assert answer.status == 409
        assert answer.error is not None
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.error["code"] == "idempotency_key_in_use"
        assert "Idempotency-Key" in answer.error["message"]
    elsewhere = clients.ask({**body, "cache_salt": "another tenant"}, idempotency_key=key).result(20)
    assert elsewhere.is_whole
    assert elsewhere.tokens[0] != truth(prompt, key)
    assert running.result(20).tokens == {0: truth(prompt, key)}
    again = clients.ask({**body, "max_tokens": 7}, idempotency_key=key).result(20)  # the key is free when it has ended
    assert again.tokens == {0: truth(prompt, key)[:7]}
    wait_until(lambda: not service.num_held, 5, "everything to be released")

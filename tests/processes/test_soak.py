"""The long forms of cases that `make test` runs shortened. `make soak` runs them."""

import contextlib
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.service import completion_body, serving, wait_until
from tests.processes.test_cancel import raw_request
from tests.processes.test_exact import ids
from tests.processes.test_kill import streamed

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.soak]
MIX_S = 600


def test_concurrent_answers_are_never_mixed_for_minutes(service, reference):
    """T053: joins and leaves at random, mixed lengths and parameters."""
    rng, ends = random.Random(53), time.monotonic() + MIX_S
    known = [ids(rng.randrange(1, 600), f"soak {k}") for k in range(60)]

    def one(number):
        prompt = known[number % len(known)]
        if number % 5 == 4:
            return prompt, service.tokens(prompt, 8, temperature=1.0, seed=number)
        return prompt, service.tokens(prompt, 4 + number % 13)

    number = 0
    while time.monotonic() < ends:
        with ThreadPoolExecutor(64) as pool:
            for k, (prompt, answer) in enumerate(pool.map(one, range(number, number + 64))):
                if (number + k) % 5 != 4:
                    reference.check(prompt, answer)
        number += 64


def test_eight_long_streams_survive_the_death_of_a_decode_worker(model_directory, reference):
    """T034: 300 tokens, killed after about 50."""
    with serving(model_directory, num_decode=2, kv_tokens=8000) as service:
        prompts = [ids(100 + k, f"long {k}") for k in range(8)]
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(streamed, service, prompt, 300) for prompt in prompts]
            wait_until(
                lambda: service.total("kvferry_worker_events_total", name="generated_tokens") > 400,
                120,
                "50 tokens each",
            )
            service.signal("decode-1", signal.SIGKILL)
            for prompt, stream in zip(prompts, streams, strict=True):
                reference.check(prompt, stream.result()[0])
        service.wait_idle()


def test_five_hundred_at_once_cancelled_at_random_leave_no_survivor(service):
    """T031."""
    import httpx

    rng = random.Random(31)

    def brief(number):
        body = {"prompt": ids(rng.randrange(1, 300), number), "max_tokens": 100, "stream": True, "temperature": 0}
        try:
            httpx.post(f"{service.url}/v1/completions", json=body, timeout=rng.random() * 0.3 + 0.01, trust_env=False)
        except httpx.TransportError:
            pass

    for turn in range(10):
        with ThreadPoolExecutor(100) as pool:
            list(pool.map(brief, range(turn * 500, turn * 500 + 500)))
        service.wait_idle(8)
    assert len(service.tokens(ids(50, "after"), 10)) == 10


def test_the_models_own_context_ends_at_the_wall_and_a_long_prefill_survives_its_worker(model_directory, reference):
    """T078 at 8,192 tokens, and T036 with a prompt of 6,000."""
    with serving(model_directory, num_prefill=2, kv_tokens=9000) as service:
        for length in (8190, 8191, 8192):
            choice = service.complete(ids(length, "wall"), 50)["choices"][0]
            assert len(choice["token_ids"]) == 8193 - length
            assert choice["finish_reason"] == "length"
        assert service.http.post("/v1/completions", json={"prompt": ids(8193, "wall")}).status_code == 400
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(service.tokens, ids(6000, "long"), 8)
            time.sleep(8)
            victim = max(
                ("prefill-1", "prefill-2"), key=lambda name: service.total("kvferry_worker_active", worker=name)
            )
            service.kill(victim)
            reference.check(ids(6000, "long"), answer.result())
        service.wait_idle()


def test_two_hundred_clients_leave_between_prefill_and_decode_and_a_hundred_in_mid_stream(service):
    """T028 and T029 in full."""
    rng = random.Random(28)
    for k in range(200):
        with raw_request(service, {**completion_body(ids(60, ("gap", k)), 50), "stream": bool(k % 2)}):
            time.sleep(rng.random() * 0.3)
    service.wait_idle()
    for reset in (False, True):
        with contextlib.ExitStack() as stack:
            for k in range(100):
                stack.enter_context(raw_request(service, {**completion_body(ids(20, k), 1900), "stream": True}, reset))
            wait_until(lambda: service.total("kvferry_requests", phase="decoding") >= 40, 60, "many to decode")
        service.wait_idle()

"""The long forms of cases that `make test` runs shortened. `make soak` runs them."""

import contextlib
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.processes.crowd import body_of, crowd
from tests.processes.service import completion_body, serving, wait_until
from tests.processes.test_cancel import raw_request
from tests.processes.test_exact import ids
from tests.processes.test_kill import streamed

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.soak]
MIX_S = 1200
BUSY_S = 180


def test_concurrent_answers_are_never_mixed_for_minutes(service, reference):
    """T053: joins and leaves at random, mixed lengths and parameters."""
    rng, ends = random.Random(53), time.monotonic() + MIX_S
    known = [ids(rng.randrange(1, 600), f"soak {k}") for k in range(60)]

    def one(number):
        prompt = known[number % len(known)]
        if number % 5 == 4:
            return prompt, tokens_when_there_is_room(service, prompt, 8, temperature=1.0, seed=number)
        return prompt, tokens_when_there_is_room(service, prompt, 4 + number % 13)

    number = 0
    while time.monotonic() < ends:
        with ThreadPoolExecutor(64) as pool:
            for k, (prompt, answer) in enumerate(pool.map(one, range(number, number + 64))):
                if (number + k) % 5 != 4:
                    reference.check(prompt, answer, 4 + (number + k) % 13)
        number += 64


def tokens_when_there_is_room(service, prompt, max_tokens, **fields):
    """Whoever is told to come back does."""
    body = completion_body(prompt, max_tokens, **fields)
    while (response := service.http.post("/v1/completions", json=body)).status_code == 429:
        time.sleep(int(response.headers["retry-after"]))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


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
                reference.check(prompt, stream.result()[0], 300)
        service.wait_idle()


def test_five_hundred_at_once_cancelled_at_random_leave_no_survivor(service):
    """T031: twenty times; then ten normal ones have the service for themselves."""
    rng = random.Random(31)
    afterwards = [body_of(ids(50, ("after", k)), 10) for k in range(10)]

    def took_s(clients):
        began = time.monotonic()
        answers = [
            one.result(60) for one in clients.ask_all([{**body, "cache_salt": str(began)} for body in afterwards])
        ]
        assert all(answer.is_whole and len(answer.tokens[0]) == 10 for answer in answers)
        return time.monotonic() - began

    with crowd(service.url) as clients:
        before_s = min(took_s(clients) for _ in range(3))
        for turn in range(20):
            bodies = [body_of(ids(rng.randrange(1, 300), (turn, k)), 100, stream=bool(k % 2)) for k in range(500)]
            leaving = sorted((rng.random() * 0.3, k) for k in range(500))
            asked, began = clients.ask_all(bodies, reset=bool(turn % 2)), time.monotonic()
            for delay_s, k in leaving:
                time.sleep(max(began + delay_s - time.monotonic(), 0))
                asked[k].cancel()
            service.wait_idle(3)
        after_s = min(took_s(clients) for _ in range(3))
    print(f"ten normal ones: {before_s:.2f} s before, {after_s:.2f} s after")
    assert after_s < 1.5 * before_s + 0.2


def test_workers_that_compute_long_prompts_for_minutes_are_not_taken_for_dead(service, reference):
    """T042: both cores have more than they can do, in each prefill and decode process, and no stream is dropped or moved."""
    known = [ids(length, ("busy", length)) for length in (600, 900, 1200)]
    restarts = {name: child.num_starts for name, child in service.deployment.children.items()}
    ends = time.monotonic() + BUSY_S

    def lane(number):
        answers, turn = [], 0
        while time.monotonic() < ends:
            turn += 1
            prompt = known[turn % 3]
            with service.streaming(
                prompt, 12, cache_salt=f"{number} {turn}", stream_options={"include_usage": True}
            ) as events:
                chunks = list(events)
            assert chunks[-1]["kvferry"][0]["attempts"] == 1
            answers.append(
                (prompt, [t for chunk in chunks for choice in chunk["choices"] for t in choice["token_ids"]])
            )
        return answers

    with ThreadPoolExecutor(8) as pool:
        answers = [one for found in pool.map(lane, range(8)) for one in found]
    for prompt, answer in answers:
        reference.check(prompt, answer, 12)
    assert len(answers) > 3 * 8
    assert {name: child.num_starts for name, child in service.deployment.children.items()} == restarts
    for name in ("worker_losses", "continuations"):
        assert service.total("kvferry_request_events_total", event=name) == 0


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
            reference.check(ids(6000, "long"), answer.result(), 8)
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


def test_prompts_on_either_side_of_grpcs_bounds_go_over_it_whole_and_none_needs_its_room_twice(
    model_directory, reference
):
    """T017: 4 MiB are passed near 91 tokens."""
    kv_bytes = 8000 * 46_080
    with serving(model_directory, kv_tokens=9000, transport="grpc") as service:
        for length in (80, 90, 91, 92, 100, 181, 183, 2000):
            check_over_grpc(service, reference, length)
        workers = [psutil.Process(service.pid(name)) for name in ("prefill-1", "decode-1")]
        before = [worker.memory_info().rss for worker in workers]
        check_over_grpc(service, reference, 8000)
        for worker, rss in zip(workers, before, strict=True):
            growth = peak_bytes(worker.pid) - rss
            print(f"{growth / kv_bytes:.2f} times the bytes of the prompt's KV")
            assert growth < 1.5 * kv_bytes
        service.wait_idle()


def check_over_grpc(service, reference, length):
    prompt = ids(length, ("grpc", length))
    answer = service.complete(prompt, 8)
    reference.check(prompt, answer["choices"][0]["token_ids"], 8)
    (numbers,) = answer["kvferry"]
    assert (numbers["road"], numbers["fetched_blocks"], numbers["attempts"]) == ("grpc", (length - 1) // 16, 1)


def peak_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

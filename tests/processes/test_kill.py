"""kill -9 and SIGSTOP on real workers (T022, T034, T036, and the issue's own words): the answer still comes, right."""

import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.service import completion_body, serving, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes]


def ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def crossed(values):
    """Each value with one of the signals; `make soak` has the other pairs."""
    pairs = itertools.product(range(len(values)), range(len(SIGNALS)))
    return [pytest.param(values[v], SIGNALS[s], marks=[pytest.mark.soak] if (v + s) % 2 else []) for v, s in pairs]


LONG, BYSTANDER = ids(900, "long"), ids(25, "by")
"""The long one is asked for again under another salt: nobody has its blocks, and the reference is computed once."""

FACTS = (
    "Water boils at a lower temperature on a mountain than it does at the sea.",
    "The days in June are longer in Norway than they are in Egypt, and in December they are shorter.",
    "A ship of iron swims, although iron sinks, and a ship that is full of water does not.",
    "Of two clocks, one is right twice a day, and the other one is late by a minute.",
)
CHAT_TOKENS = 24

MID_TOKENS = 60
MID_SIMULATED_TOKENS = 150
"""Of streams that are to be in the middle when a worker is lost: they decode for more than a second."""


@pytest.fixture(scope="module")
def pair(model_directory):
    """Two prefill and two decode workers, with different hash seeds by chance; each test mends what it broke."""
    os.environ.pop("PYTHONHASHSEED", None)
    with serving(model_directory, num_prefill=2, num_decode=2, kv_tokens=6000) as running:
        yield running


def after(delay_s, action):
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


def used(service, event_count_name):
    return service.total("kvferry_worker_events_total", name=event_count_name)


def test_blocks_are_shared_between_processes_by_content(pair, reference):
    """The router's prediction of hits is what the workers find, whichever worker computed."""
    prompt = ids(300, "share")
    first = pair.complete(prompt, 4)["kvferry"][0]
    for _ in range(3):
        time.sleep(0.5)  # the workers have told the router
        answer = pair.complete(prompt, 4)
        reference.check(prompt, answer["choices"][0]["token_ids"], 4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
        assert answer["kvferry"][0]["decode_worker"] == first["decode_worker"]
    pair.wait_idle()
    child = pair.deployment.children[first["decode_worker"]]
    num_starts = child.num_starts
    pair.kill(child.name)
    wait_until(lambda: child.num_starts > num_starts and child.state == "ready", 60, "it to start again")
    pair.wait_ready()
    before, predicted = computed(pair), predicted_hits(pair, prompt)
    assert predicted[0] == 0, "no decode worker has its blocks any more"
    assert predicted[1] == (288 if first["source_worker"] else 0)
    assert len(prompt) + 4 - 1 - (computed(pair) - before) == predicted[1]
    pair.wait_idle()


def predicted_hits(service, prompt):
    """As the router explains it: tokens held where the answer is to decode, and by whomever blocks are to come from."""
    body = completion_body(prompt, 4)
    answer = service.http.post("/v1/completions", json=body, headers={"x-kvferry-explain": "1"}).json()
    explained = answer["kvferry"][0]["explain"]
    held = {one["worker"]: one["cached_tokens"] for one in explained["candidates"]}
    here = held[answer["kvferry"][0]["decode_worker"]]
    return here, max(here, *(held[name] for name in (*explained["sources"], *explained["holders"])))


def test_a_second_turn_computes_only_what_is_new_wherever_it_lands(pair):
    """Four conversations at once; counted over all workers, so that what any of them computes again would show."""
    pair.wait_idle()
    first = [[{"role": "user", "content": " ".join([fact] * 4)}] for fact in FACTS]
    said, told = take_turns(pair, first)
    second = [
        [*turn, {"role": "assistant", "content": words}, {"role": "user", "content": "And what does not?"}]
        for turn, words in zip(first, said, strict=True)
    ]
    before = computed(pair)
    _, found = take_turns(pair, second)
    new = [now["prompt_tokens"] - (was["prompt_tokens"] - 1) // 16 * 16 for was, now in zip(told, found, strict=True)]
    assert computed(pair) - before <= sum(new) + len(FACTS) * (CHAT_TOKENS - 1)
    pair.wait_idle()


def take_turns(service, conversations):
    """All at once. What was said, and each one's usage."""
    with ThreadPoolExecutor(len(conversations)) as pool:
        answers = list(pool.map(lambda messages: chat(service, messages), conversations))
    return [answer["choices"][0]["message"]["content"] for answer in answers], [answer["usage"] for answer in answers]


def chat(service, messages):
    body = {"messages": messages, "max_tokens": CHAT_TOKENS, "temperature": 0, "ignore_eos": True}
    return service.http.post("/v1/chat/completions", json=body).json()


def computed(service):
    """By all workers, for prompts and answers."""
    time.sleep(1.1)  # a worker tells what it has counted at least once a second
    return used(service, "computed_tokens")


@pytest.mark.parametrize(("delay_s", "number"), crossed([0.2, 1.5]))
def test_a_prefill_worker_lost_in_a_long_prefill_costs_no_token(pair, reference, delay_s, number):
    pair.wait_ready()
    salt = f"{number} {delay_s}"
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(pair.complete, LONG, 6, cache_salt=salt), pool.submit(pair.complete, BYSTANDER, 30)]
        time.sleep(delay_s)
        sources = {name: used_by(pair, name) for name in ("prefill-1", "prefill-2")}
        victim = max(sources, key=lambda name: sources[name])
        pair.signal(victim, number)
        began = time.monotonic()
        try:
            tokens = [one.result()["choices"][0]["token_ids"] for one in answers]
            assert time.monotonic() - began < 5 + 8  # five seconds to notice, and the prefill itself
        finally:
            if number is signal.SIGSTOP:
                pair.signal(victim, signal.SIGCONT)
    for asked, answered, num_tokens in zip((LONG, BYSTANDER), tokens, (6, 30), strict=True):
        reference.check(asked, answered, num_tokens)
    pair.wait_ready()
    pair.wait_idle()


def used_by(service, name):
    return service.total("kvferry_worker_active", worker=name)


@pytest.mark.parametrize(("fields", "number"), crossed([dict(), dict(temperature=0.9, seed=77, n=2)]))
def test_a_decode_worker_lost_in_mid_stream_costs_no_token_and_repeats_none(pair, reference, fields, number):
    pair.wait_ready()
    prompts = [ids(40 + k, ("mid", k)) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        undisturbed = list(pool.map(lambda prompt: streamed(pair, prompt, MID_TOKENS, **fields), prompts))
        streams = [pool.submit(streamed, pair, prompt, MID_TOKENS, **fields) for prompt in prompts]
        wait_until(lambda: pair.total("kvferry_requests", phase="decoding") >= 4, 20, "all to decode")
        victim = max(("decode-1", "decode-2"), key=lambda name: used_by(pair, name))
        assert used_by(pair, victim) > 0
        losses_before = num_losses(pair)
        pair.signal(victim, number)
        began = time.monotonic()
        try:
            gaps = [one.result() for one in streams]
            assert gaps == undisturbed
            assert time.monotonic() - began < 5 + 15
        finally:
            if number is signal.SIGSTOP:
                pair.signal(victim, signal.SIGCONT)
    if not fields:
        reference.check(prompts[0], undisturbed[0][0], MID_TOKENS)
    assert num_losses(pair) > losses_before, "the streams were over before their worker was lost"
    pair.wait_ready()
    pair.wait_idle()


def num_losses(service):
    return service.total("kvferry_request_events_total", event="worker_losses")


def streamed(service, prompt, max_tokens, **fields):
    """Token ids by choice."""
    tokens: dict[int, list[int]] = {}
    with service.streaming(prompt, max_tokens, **fields) as events:
        for chunk in events:
            for choice in chunk["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tokens


def test_without_prefill_workers_the_service_is_degraded_but_answers(model_directory, either):
    start, truth = either
    with start(model_directory, num_prefill=0, num_decode=1, kv_tokens=3000) as lone:
        assert lone.http.get("/health/ready").json()["status"] == "degraded"
        truth.check(ids(100, "lone"), lone.tokens(ids(100, "lone"), 6), 6)
        lone.wait_idle()


def test_the_only_decode_worker_is_killed_and_its_successor_finishes_the_streams(model_directory, either):
    start, truth = either
    with start(model_directory, kv_tokens=3000) as lone:
        prompt, num_tokens = ids(60, "only"), MID_TOKENS if start is serving else MID_SIMULATED_TOKENS
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(streamed, lone, prompt, num_tokens)
            wait_until(lambda: lone.total("kvferry_requests", phase="decoding") >= 1, 20, "the stream to decode")
            lone.kill("decode-1")
            wait_until(lambda: lone.http.get("/health/ready").status_code == 503, 5, "readiness to turn false")
            refused = lone.http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert "decode pool" in refused.json()["error"]["message"]
            truth.check(prompt, stream.result()[0], num_tokens)
        assert num_losses(lone) == 1, "the stream was over before its worker was lost"
        lone.wait_idle()

"""What is counted must add up whatever happens (T089), and one sick worker must not show at the doors that ask about all (T047)."""

import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from router.idempotency import seed_of
from tests.processes.crowd import Answer, Crowd, body_of, crowd
from tests.processes.service import Service, wait_until
from tests.processes.simulated import Footprint, choices_of, event, expected_of, ids, simulated, states, stopped

pytestmark = [pytest.mark.model, pytest.mark.processes]
SILENCE_S = 2.0
QUICKLY_S = 0.5
ROUTES = ("/v1/models", "/health", "/health/ready", "/metrics")


@pytest.fixture(scope="module")
def rig(model_directory) -> Iterator[Service]:
    silence = f"--silence-s={SILENCE_S:g}"
    extra = {
        "router": [silence, "--max-queued=12", "--queue-timeout-s=3"],
        "prefill": [silence],
        "decode": [silence, "--max-sequences=12"],
    }
    with simulated(model_directory, num_prefill=2, num_decode=2, extra=extra) as running:
        yield running


def test_a_sick_worker_of_each_kind_does_not_show_in_what_is_asked_of_the_router(rig):
    models = rig.http.get("/v1/models").json()
    with stopped(rig, "decode-2"), stopped(rig, "prefill-2"):
        until = time.monotonic() + SILENCE_S + 1.0
        while time.monotonic() < until:
            for route in ROUTES:
                began = time.monotonic()
                response = rig.http.get(route)
                assert response.status_code == 200, route
                assert time.monotonic() - began < QUICKLY_S, route
            assert rig.http.get("/v1/models").json() == models
            time.sleep(0.1)
    wait_until(lambda: set(states(rig).values()) == {"ready"} and len(states(rig)) == 4, 10, "them to heal")


class Chaos:
    """Clients of every kind that come, are refused, leave and come twice; workers that are killed and stopped."""

    def __init__(self, service: Service, clients: Crowd, seed: int):
        self._service, self._clients, self._rng = service, clients, random.Random(seed)
        self._numbers = itertools.count()
        self.asked: list[tuple[dict[str, Any], dict[int, list[int]], Future[Answer]]] = []
        """With what its choices must be."""
        self._stopped: dict[str, float] = {}

    def step(self) -> None:
        """One client more, and perhaps one less."""
        rng, number = self._rng, next(self._numbers)
        prompt, num_tokens = ids(rng.randrange(1, 900), ("chaos", number)), rng.randrange(1, 120)
        body = body_of(prompt, num_tokens, n=rng.choice((1, 1, 2)), stream=rng.random() < 0.7)
        kind = rng.random()
        if kind < 0.1:
            self._ask({**body, "temperature": rng.choice((-1, "hot"))}, {})
        elif kind < 0.2:
            self._ask({**body, "timeout_s": rng.random()}, choices_of(body))
        elif kind < 0.35:
            key = f"key {number}"
            keyed = {**body, "temperature": 1}
            truth = choices_of({**keyed, "seed": seed_of(key, b"")})
            for twin in (keyed, keyed, {**keyed, "max_tokens": num_tokens + 1})[: rng.randrange(2, 4)]:
                self._ask(twin, truth if twin is keyed else {}, idempotency_key=key)
        else:
            self._ask(body, choices_of(body), reset=rng.random() < 0.5)
        if rng.random() < 0.4:
            rng.choice(self.asked[-40:])[2].cancel()

    def _ask(self, body: dict[str, Any], truth: dict[int, list[int]], **more: Any) -> None:
        if not body["stream"]:
            body = {name: value for name, value in body.items() if name != "stream_options"}
        self.asked.append((body, truth, self._clients.ask(body, **more)))

    def harm(self) -> None:
        """One worker of those that are well."""
        well = [name for name, state in states(self._service).items() if state == "ready" and name not in self._stopped]
        if len(well) < 3:
            return
        name = self._rng.choice(well)
        if self._rng.random() < 0.4:
            self._service.signal(name, signal.SIGSTOP)
            self._stopped[name] = time.monotonic() + self._rng.uniform(0.5, SILENCE_S + 1)
        else:
            self._service.kill(name)

    def heal(self, is_over: bool = False) -> None:
        for name, until in list(self._stopped.items()):
            if is_over or time.monotonic() > until:
                self._service.signal(name, signal.SIGCONT)
                del self._stopped[name]


class Watch:
    """Scrapes all the time; no gauge may ever be negative."""

    def __init__(self, service: Service):
        self._service = service
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_scrapes = 0
        self.negative: dict[str, float] = {}

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.negative.update({name: value for name, value in self._service.metrics().items() if value < 0})
            self.num_scrapes += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def run_chaos(service: Service, clients: Crowd, seconds: float) -> Chaos:
    """Longer if all workers that were harmed by then had nothing to lose."""
    chaos, began = Chaos(service, clients, 89), time.monotonic()
    harms = itertools.count(began + 0.7, 1.3)
    next_harm = next(harms)
    while (now := time.monotonic()) < began + seconds or (
        now < began + 3 * seconds and not event(service, "worker_losses")
    ):
        chaos.step()
        chaos.heal()
        if now > next_harm:
            chaos.harm()
            next_harm = next(harms)
        time.sleep(0.03)
    chaos.heal(is_over=True)
    return chaos


def check_answers(chaos: Chaos) -> Counter[str]:
    """Whoever did not leave has a whole and right answer, or an error that says why."""
    kinds: Counter[str] = Counter()
    for body, truth, one in chaos.asked:
        try:
            answer = one.result(60)
        except CancelledError:
            kinds["left"] += 1
            continue
        if answer.status == 200 and answer.error is None:
            assert answer.is_whole
            assert answer.tokens == truth, answer.numbers
        else:
            assert answer.error is not None, f"{answer} of {body['max_tokens']}"
            assert answer.error["message"]
            assert answer.status in (200, 400, 409, 429, 503, 504), answer
            in_time = answer.status != 504 and answer.error["code"] != "deadline_exceeded"
            assert answer.status != 200 or "timeout_s" in body, f"an accepted stream failed: {answer.error}"
            assert in_time or "timeout_s" in body
        kinds[str(answer.error["code"] if answer.error else answer.status)] += 1
    return kinds


@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.soak)])
def test_after_chaos_everything_is_zero_and_adds_up(rig, seconds):
    at_rest = Footprint(rig)
    names = set(rig.deployment.children) - {"router"}
    with Watch(rig) as watch, crowd(rig.url) as clients:
        chaos = run_chaos(rig, clients, seconds)
        kinds = check_answers(chaos)
        rig.wait_ready(timeout_s=90)
        wait_until(lambda: set(states(rig).values()) == {"ready"} and set(states(rig)) == names, 30, "all to be well")
        rig.wait_idle(5)
        starts = sum(child.num_starts - 1 for child in rig.deployment.children.values())
        losses, moved = event(rig, "worker_losses"), event(rig, "continuations")
        print(f"{len(chaos.asked)} asked: {dict(kinds)}; {starts} restarts, {losses:g} losses, {moved:g} continuations")
        assert starts >= 1
        assert losses > 0
        assert kinds["200"] > 20
        assert {"left", "idempotency_key_in_use", "deadline_exceeded"} <= set(kinds)
        body = body_of(ids(100, "after"), 10)
        assert clients.ask(body).result(10).tokens == {0: expected_of(body)}
    assert not watch.negative
    assert watch.num_scrapes > 10 * seconds / 2
    assert event(rig, "accepted") == event(rig, "finished") + event(rig, "failed") + event(rig, "cancelled")
    by_phase = sum(event(rig, f"cancelled_{phase}") for phase in ("queued", "prefilling", "decoding"))
    assert by_phase == event(rig, "cancelled")
    assert rig.total("kvferry_queued_tokens") == 0
    at_rest_router = {"router": at_rest.at_rest["router"]}
    at_rest.at_rest = at_rest_router  # the others have been started anew
    at_rest.wait_back(spare=8)

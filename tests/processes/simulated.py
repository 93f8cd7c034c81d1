"""A deployment whose workers take a model's time and compute none of it, and what it must answer (kvferry/engine/fake.py).

Any lost, stale, swapped or doubled block, and any token that a disturbance lost or repeated, changes such an answer.
"""

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kvferry.engine.fake import fake_answer
from kvferry.messages import Sampling
from tests.processes.service import Service, serving, wait_until

VOCABULARY = 49_152
SHAPE, ACCELERATOR = "llama-3.1-8b", "a100"
"""About 11 ms a token, and 80 microseconds a token of a prompt."""
SLOW_SHAPE, SLOW_ACCELERATOR = "llama-3.1-8b", "l4"
"""About 72 ms a token."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def ids(length: int, seed: object) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(100, 40_000) for _ in range(length)]


def expected(
    prompt: list[int], max_tokens: int, seed: int = 0, temperature: float = 0, choice: int = 0, **penalties: float
) -> list[int]:
    """What a choice must be."""
    sampling = Sampling(seed=seed, max_tokens=max_tokens, temperature=temperature, **penalties)
    return fake_answer(prompt, sampling, VOCABULARY, choice=choice)


def expected_of(body: dict[str, Any], choice: int = 0) -> list[int]:
    penalties = {name: body[name] for name in PENALTIES if name in body}
    return expected(body["prompt"], body["max_tokens"], body.get("seed", 0), body["temperature"], choice, **penalties)


def choices_of(body: dict[str, Any]) -> dict[int, list[int]]:
    """What all of them must be: greedy ones are equal, sampled ones are not."""
    if not body["temperature"]:
        return dict.fromkeys(range(body.get("n", 1)), expected_of(body))
    return {choice: expected_of(body, choice) for choice in range(body.get("n", 1))}


class Truth:
    """What `reference` is to the real model."""

    def check(self, tokens: list[int], answer: list[int], num_tokens: int) -> None:
        assert answer == expected(tokens, num_tokens)


@contextlib.contextmanager
def simulated(model: Path, is_slow: bool = False, **plan: Any) -> Iterator[Service]:
    shape, accelerator = (SLOW_SHAPE, SLOW_ACCELERATOR) if is_slow else (SHAPE, ACCELERATOR)
    fixed = {"engine": "sim", "sim_shape": shape, "sim_accelerator": accelerator, "kv_tokens": 100_000}
    with serving(model, **{**fixed, **plan}) as service:
        yield service


def event(service: Service, name: str) -> float:
    """Of the router's requests."""
    return service.total("kvferry_request_events_total", event=name)


def counted(service: Service, name: str, **labels: str) -> float:
    """By the workers."""
    return service.total("kvferry_worker_events_total", name=name, **labels)


def sequences(service: Service, worker: str) -> float:
    return service.total("kvferry_worker_sequences", worker=worker)


def states(service: Service) -> dict[str, str]:
    """Of the members, as readiness shows them."""
    return {one["name"]: one["state"] for one in service.http.get("/health/ready").json()["workers"]}


def wait_streaming(service: Service, count: int, timeout_s: float = 20) -> None:
    wait_until(
        lambda: service.total("kvferry_requests", phase="decoding") >= count, timeout_s, f"{count} streams to decode"
    )


def wait_restarted(service: Service, name: str, num_starts: int, timeout_s: float = 60) -> None:
    """It has been started so often, and is a member again."""
    child = service.deployment.children[name]
    wait_until(lambda: child.num_starts >= num_starts and child.state == "ready", timeout_s, f"{name} to start again")
    wait_until(lambda: states(service).get(name) == "ready", timeout_s, f"{name} to be ready")


@contextlib.contextmanager
def stopped(service: Service, name: str) -> Iterator[None]:
    """SIGSTOP inside, SIGCONT after."""
    service.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        service.signal(name, signal.SIGCONT)


class Footprint:
    """File descriptors and threads of all processes of a deployment."""

    def __init__(self, service: Service):
        self._service = service
        self.at_rest = self._now()

    def _now(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for name, child in self._service.deployment.children.items():
            process = psutil.Process(child.pid)
            found[name] = (process.num_fds(), process.num_threads())
        return found

    def wait_back(self, timeout_s: float = 8, spare: int = 0, spare_descriptors: int = 0) -> None:
        """No more than at rest; `spare`: threads that a pool of them may have made since, and descriptors for new acquaintances."""

        def is_back() -> bool:
            now = self._now()
            return all(
                now[name][0] <= fds + spare_descriptors and now[name][1] <= threads + spare
                for name, (fds, threads) in self.at_rest.items()
            )

        wait_until(is_back, timeout_s, f"descriptors and threads to be back at {self.at_rest}, not {self._now()}")


def rss_mib(service: Service, name: str = "router") -> float:
    return psutil.Process(service.pid(name)).memory_info().rss / 2**20

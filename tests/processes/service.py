"""Real processes for tests: a local deployment on a thread of its own, and a small client of its HTTP door."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from deploy.deployments import deployment_of
from deploy.local import LocalDeployment, LocalPlan


class Service:
    """A running deployment. Signals go to processes that it started."""

    def __init__(self, deployment: LocalDeployment):
        self.deployment = deployment
        self.url, self.grpc = deployment.url, deployment.grpc_address
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    # ------------------------------------------------------------------------------------------------------ processes

    def pid(self, name: str) -> int:
        return self.deployment.children[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def wait_ready(self, *names: str, timeout_s: float = 60) -> None:
        """All of `names` (or every worker) are members, and requests can be answered."""
        wanted = set(names) or {name for name in self.deployment.children if name != "router"}
        wait_until(lambda: wanted <= self._members(), timeout_s, f"{wanted} to join")

    def _members(self) -> set[str]:
        response = self.http.get("/health/ready")
        return {one["name"] for one in response.json()["workers"]} if response.status_code == 200 else set()

    # -------------------------------------------------------------------------------------------------------- metrics

    def metrics(self) -> dict[str, float]:
        """Sample name with labels -> value."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def total(self, sample: str, **labels: str) -> float:
        """The sum of all samples of that name that have those labels."""
        found = 0.0
        for key, value in self.metrics().items():
            if re.match(rf"{sample}({{|$)", key) and all(f'{k}="{v}"' in key for k, v in labels.items()):
                found += value
        return found

    @property
    def num_held(self) -> float:
        """Whatever is live anywhere: requests, sequences, slots."""
        held = (
            self.total("kvferry_requests")
            + self.total("kvferry_worker_sequences")
            + self.total("kvferry_worker_active")
        )
        return held + sum(self.total("kvferry_worker_slots", state=state) for state in ("live", "filling"))

    def wait_idle(self, timeout_s: float = 5) -> None:
        wait_until(lambda: self.num_held == 0, timeout_s, "everything to be released")
        assert self.total("kvferry_worker_events_total", name="leaked_slots") == 0

    # -------------------------------------------------------------------------------------------------------- requests

    def complete(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json=completion_body(prompt, max_tokens, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    def tokens(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> list[int]:
        return self.complete(prompt, max_tokens, **fields)["choices"][0]["token_ids"]

    @contextlib.contextmanager
    def streaming(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> Iterator["Events"]:
        body = {**completion_body(prompt, max_tokens, **fields), "stream": True}
        with (
            httpx.Client(base_url=self.url, timeout=120, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            yield Events(response)

    def stream_tokens(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> list[int]:
        with self.streaming(prompt, max_tokens, **fields) as events:
            return [token for chunk in events for choice in chunk["choices"] for token in choice["token_ids"]]


class Events:
    """The chunks of a stream; checks that it ends properly."""

    def __init__(self, response: httpx.Response):
        self.response = response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.response.status_code == 200, self.response.read()
        is_done = False
        for line in self.response.iter_lines():
            assert not (is_done and line), f"something follows [DONE]: {line}"
            if line == "data: [DONE]":
                is_done = True
            elif line and not line.startswith(":"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk
        assert is_done, "the stream was cut"


def completion_body(prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
    base = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**base, **fields}


def wait_until(what_is_true: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Returns what was true: asked a second time, it may be so no more."""
    ends = time.monotonic() + timeout_s
    while not (found := what_is_true()):
        assert time.monotonic() < ends, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def serving(model: Path, **plan: Any) -> Iterator[Service]:
    """A deployment for as long as the body runs."""
    started: list[Any] = []
    is_started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        try:
            deployment = deployment_of(LocalPlan(model, **plan))
            async with deployment.running():
                started.append(deployment)
                is_started.set()
                await stop.wait()
        except BaseException as error:
            started.append(error)
            raise
        finally:
            is_started.set()

    def run() -> None:
        with contextlib.suppress(Exception):
            loop.run_until_complete(main())

    thread = threading.Thread(target=run)
    thread.start()
    is_started.wait()
    try:
        if isinstance(started[0], BaseException):
            raise started[0]
        yield Service(started[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

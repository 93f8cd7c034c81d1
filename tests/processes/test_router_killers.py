"""A prompt that crashes whoever computes it, in real processes: it is found out and refused, and nobody else is."""

import os
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.processes.crowd import body_of, crowd
from tests.processes.service import Service, completion_body, wait_until
from tests.processes.simulated import choices_of, event, ids, simulated, states

pytestmark = [pytest.mark.model, pytest.mark.processes]
MARKED = 77
KILLER = [*ids(64, "killer"), *[MARKED] * 64, *ids(20, "its end")]
NUM_BESIDE = 6
DEADLY = f"""
import os, signal, sys
if {{"prefill_worker", "decode_worker"}} & set(sys.orig_argv):
    from kvferry.engine.fake import FakeRunner
    run = FakeRunner.run
    def run_or_die(self, plan):
        if any(chunk.tokens.count({MARKED}) >= 16 for chunk in plan.chunks):
            os.kill(os.getpid(), signal.SIGSEGV)
        return run(self, plan)
    FakeRunner.run = run_or_die
"""
"""What each worker's interpreter does first."""


class Watch:
    """The fewest prefill workers that were ready at once."""

    def __init__(self, service: Service):
        self._service, self._is_over = service, threading.Event()
        self.fewest = 99
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.is_set():
            ready = [name for name, state in states(self._service).items() if state == "ready"]
            self.fewest = min(self.fewest, sum(name.startswith("prefill") for name in ready))
            time.sleep(0.02)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("deadly")
def test_a_prompt_that_crashes_whoever_computes_it_is_refused_and_takes_no_pool_with_it(model_directory):
    with simulated(model_directory, num_prefill=3, num_decode=3) as service, crowd(service.url) as clients:
        watch = Watch(service)
        bodies = [body_of(ids(200 + 40 * k, ("beside", k)), 150) for k in range(NUM_BESIDE)]
        beside = [(body, clients.ask(body)) for body in bodies]
        answers: list[httpx.Response] = []

        def ask_killer() -> None:
            answers.append(service.http.post("/v1/completions", json=completion_body(KILLER, 8)))

        killer, turn = threading.Thread(target=ask_killer), 0
        killer.start()

        def are_done() -> bool:
            return not killer.is_alive() or all(one.done() for _, one in beside)

        while killer.is_alive():
            turn += 1
            for body in bodies:
                salted = {**body, "cache_salt": f"turn {turn}"}
                beside.append((salted, clients.ask(salted)))
            wait_until(are_done, 60, "those beside it")
        watch.stop()
        (answer,) = answers
        assert answer.status_code == 500
        assert "killed the worker" in answer.json()["error"]["message"]
        again = service.http.post("/v1/completions", json=completion_body(KILLER, 8))
        assert (again.status_code, again.json()["error"]["code"]) == (400, "request_refused")
        for body, one in beside:
            assert one.result(60).tokens == choices_of(body)
        assert watch.fewest >= 1
        assert event(service, "source_losses") >= 2
        service.wait_ready()
        service.wait_idle()

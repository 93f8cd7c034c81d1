"""How fast an engine is, before its first request: a worker's first steps keep their time, too."""

import pytest

from decode_worker.worker import DecodeWorker
from kvferry.engine import load
from kvferry.engine.engine import WARM_UP_TOKENS
from kvferry.engine.plan import StepResult
from kvferry.engine.sim import Accelerator, sim_worker
from kvferry.shape import SHAPES
from kvferry.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker
from tests.engine.test_native import make_checkpoint


class Runner:
    """20 ms a token, and a minute the first time."""

    def __init__(self):
        self.now = 0.0

    def run(self, plan):
        self.now += (0 if self.now else 60) + 0.02 * plan.num_tokens
        return StepResult({})


def test_the_rate_is_that_of_the_large_chunk_once_it_is_warm(monkeypatch):
    runner = Runner()
    monkeypatch.setattr(load, "perf_counter", lambda: runner.now)
    assert load._warm_up(runner, 100, 16, WARM_UP_TOKENS) == pytest.approx(50)
    assert load._warm_up(runner, 2, 16, WARM_UP_TOKENS) == pytest.approx(50), "a pool that holds less"


@pytest.mark.parametrize("form", ["native", "modules"])
def test_a_loaded_engine_tells_its_rate(tmp_path, monkeypatch, form):
    if form == "modules":
        monkeypatch.setattr(load, "load_library", lambda: None)
    monkeypatch.setattr(load, "_warm_up", lambda *_: 50.0)
    assert load.load_engine(make_checkpoint(tmp_path), load.EngineSettings(512)).tokens_per_s == 50.0


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
def test_the_first_step_of_a_slow_worker_keeps_its_time(kind):
    """Also below the rate at which a first step of many tokens would be taken for a hang."""
    shape = SHAPES["smollm2-135m"]
    for tokens_per_s in (4.0, 50.0, 1000.0):
        slow = Accelerator("slow", 2.2e8 * tokens_per_s, 1e12, 1e12, 1e9, step_s=0.0)
        parts = sim_worker(shape, slow, kv_tokens=4096)
        assert parts.engine.tokens_per_s == pytest.approx(0.6 * tokens_per_s, rel=0.2)
        worker = kind(parts.engine, parts.executor, None, WorkerSettings("w", "w", "w-1", ("router",)))
        most = 0.4 * parts.engine.tokens_per_s
        assert most - 16 < worker._scheduler._budget.num_tokens() <= max(most, 16)

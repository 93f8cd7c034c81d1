"""One deployment of one prefill and one decode process for the tests that break nothing, and the reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.reference import Reference
from kvferry.text.model_text import ModelText
from tests.processes.service import Service, serving
from tests.processes.simulated import Truth, simulated


@pytest.fixture(scope="package")
def service(model_directory: Path) -> Iterator[Service]:
    extra = {role: ["--context-tokens=2048"] for role in ("prefill", "decode")}
    with serving(model_directory, kv_tokens=6000, extra=extra) as running:
        yield running


@pytest.fixture(autouse=True)
def _leaves_nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared deployment: nothing is held, no worker was lost."""
    yield
    if "service" in request.fixturenames:
        running: Service = request.getfixturevalue("service")
        running.wait_idle()
        assert running.total("kvferry_request_events_total", event="worker_losses") == 0
        failed = {key: value for key, value in running.metrics().items() if "fetch_failed_" in key and value}
        assert not failed, "fetches fail on a quiet machine: answers are right, but computed twice"


class CachedReference:
    """Greedy answers of transformers: one pass over a prompt and its answer, and none over what was checked before."""

    def __init__(self, directory: Path):
        torch.set_num_threads(1)  # two wait for each other wherever a worker has one of the cores
        self._reference = Reference(directory)
        self._checked: dict[tuple[int, ...], list[int]] = {}

    def check(self, tokens: list[int], answer: list[int], num_tokens: int) -> None:
        """As many ids as were asked for, and equal ones, but for a step where the two best logits are closer than 1e-3.

        What follows each beginning of the answer is what it generates for as long as all are equal.
        """
        assert len(answer) == num_tokens, f"{len(answer)} of {num_tokens} tokens after a prompt of {len(tokens)}"
        checked = self._checked.get(tuple(tokens), [])
        if answer == checked[: len(answer)]:
            return
        best = self._best_two(tokens, answer)
        expected = best.indices[:, 0].tolist()
        different = next((k for k, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), len(answer))
        self._checked[tuple(tokens)] = answer[:different]
        if different < len(answer):
            gap = float(best.values[different, 0] - best.values[different, 1])
            assert gap < 1e-3, f"step {different} of a prompt of {len(tokens)}: {answer} is not {expected}"
            print(f"excused: step {different}, gap {gap:.1e}")

    @torch.inference_mode()
    def _best_two(self, tokens: list[int], answer: list[int]) -> torch.return_types.topk:
        """[answer, 2]: logits and ids of what is likeliest at each of its steps."""
        given = torch.tensor([[*tokens, *answer[:-1]]])
        return self._reference._model(given, logits_to_keep=len(answer)).logits[0].topk(2)


@pytest.fixture(params=["sim", pytest.param("native", marks=pytest.mark.soak)])
def either(request: pytest.FixtureRequest) -> Any:
    """How to start a deployment whose workers are simulated, or in `make soak` real; and what checks its answers."""
    return (simulated, Truth()) if request.param == "sim" else (serving, request.getfixturevalue("reference"))


@pytest.fixture(scope="session")
def reference(model_directory: Path) -> CachedReference:
    return CachedReference(model_directory)


@pytest.fixture(scope="session")
def text(model_directory: Path) -> ModelText:
    return ModelText(model_directory)

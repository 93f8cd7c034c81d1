"""How much a kind of weights, or of KV, costs in quality: its distributions over a text of our own, beside those of float32.

Every position is teacher-forced: it sees the text's own tokens before it in its window, and is judged on the text's
next one. Both engines stay loaded and go window by window, so that memory does not grow with the text. Knows nothing of
sampling or of requests.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvferry.engine.checkpoint import read_config
from kvferry.engine.load import WEIGHTS, EngineSettings, load_engine
from kvferry.engine.modules_shape import modules_shape
from kvferry.engine.plan import Chunk
from kvferry.errors import ConfigurationError, EngineFailure
from kvferry.text.model_text import ModelText

REFERENCE = "float32"
WINDOW_TOKENS = 512
BLOCK_SIZE = 16
ROWS_AT_ONCE = 64
"""Rows of logits that are held as float64 at a time."""

Rows = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


@runtime_checkable
class LogitsRunner(Protocol):
    """What is asked of a runner: the logits [tokens, vocabulary] after each token of a chunk."""

    def all_logits(self, chunk: Chunk) -> Logits: ...


@dataclass(frozen=True, slots=True)
class Quality:
    kind: str
    num_tokens: int
    """Tokens that were predicted: all of the text's but its first."""
    perplexity: float
    agreement: float
    """Share of positions whose most likely token is float32's."""
    mean_kl: float
    """Kullback-Leibler divergence from float32's distribution, in nats a position."""
    max_logit_difference: float
    kv: str = "float32"


@dataclass(slots=True)
class _Sums:
    """Over the positions seen so far."""

    num_tokens: int = 0
    surprise: float = 0.0
    num_agreeing: int = 0
    kl: float = 0.0
    max_difference: float = 0.0

    def add(self, expected: Rows, got: Rows, targets: npt.NDArray[np.int64]) -> None:
        """Logits [rows, vocabulary] of the reference and of the kind, and the tokens that follow [rows]."""
        expected_log, got_log = _log_softmax(expected), _log_softmax(got)
        self.num_tokens += len(targets)
        self.surprise -= float(got_log[np.arange(len(targets)), targets].sum())
        self.num_agreeing += int((expected.argmax(axis=1) == got.argmax(axis=1)).sum())
        self.kl += float((np.exp(expected_log) * (expected_log - got_log)).sum())
        self.max_difference = max(self.max_difference, float(np.abs(expected - got).max()))

    def quality(self, kind: str, kv: str) -> Quality:
        count = self.num_tokens
        perplexity = math.exp(self.surprise / count)
        return Quality(kind, count, perplexity, self.num_agreeing / count, self.kl / count, self.max_difference, kv)


def quality_text() -> str:
    return Path(__file__).with_name("quality_text.txt").read_text(encoding="utf-8")


def measure_quality(
    directory: Path,
    kinds: Sequence[str],
    num_threads: int,
    tokens: Sequence[int] | None = None,
    kv: str = REFERENCE,
    device: str = "cpu",
) -> Iterator[Quality]:
    """float32 first, asked for or not, then each of `kinds` with that KV; over `tokens`, or else over our text; all on `device`.

    Raises ConfigurationError for an unknown kind, and for one that this model or machine cannot have.
    """
    for kind in kinds:
        if kind not in WEIGHTS:
            raise ConfigurationError(f"weights {kind!r}: choose one of {', '.join(WEIGHTS)}")
    if tokens is None:
        tokens = ModelText(directory).encode(quality_text())
    window_tokens = min(WINDOW_TOKENS, modules_shape(directory, read_config(directory)).context_tokens)
    reference = _load(directory, REFERENCE, REFERENCE, num_threads, device)
    yield compare(REFERENCE, reference, reference, tokens, window_tokens)
    for kind in dict.fromkeys(kinds):
        if (kind, kv) != (REFERENCE, REFERENCE):
            yield compare(kind, reference, _load(directory, kind, kv, num_threads, device), tokens, window_tokens, kv)


def compare(
    kind: str,
    reference: LogitsRunner,
    runner: LogitsRunner,
    tokens: Sequence[int],
    window_tokens: int,
    kv: str = REFERENCE,
) -> Quality:
    """Windows of `window_tokens` that follow one another, each computed as one chunk with nothing before it.

    Raises EngineFailure for logits that are not finite.
    """
    assert len(tokens) > 1, "nothing to predict"
    sums = _Sums()
    for start in range(0, len(tokens) - 1, window_tokens):
        window = tuple(tokens[start : min(start + window_tokens, len(tokens) - 1)])
        targets = np.array(tokens[start + 1 : start + 1 + len(window)], np.int64)
        chunk = Chunk(0, window, 0, tuple(range(1, 1 + -(-len(window) // BLOCK_SIZE))))
        expected = reference.all_logits(chunk)
        got = expected if runner is reference else runner.all_logits(chunk)
        if not (np.isfinite(expected).all() and np.isfinite(got).all()):
            raise EngineFailure(
                f"{kind} or {REFERENCE} weights: logits that are not finite in the window at token {start}"
            )
        for first in range(0, len(window), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            sums.add(expected[rows].astype(np.float64), got[rows].astype(np.float64), targets[rows])
    return sums.quality(kind, kv)


def _load(directory: Path, kind: str, kv: str, num_threads: int, device: str) -> LogitsRunner:
    settings = EngineSettings(WINDOW_TOKENS, BLOCK_SIZE, num_threads=num_threads, weights=kind, kv=kv, device=device)
    engine = load_engine(directory, settings)
    assert isinstance(engine.runner, LogitsRunner), "every engine of a checkpoint has it"
    return engine.runner


def _log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

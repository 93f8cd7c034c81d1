"""When requests come and what they ask: open-loop arrivals, made before anything is sent. The service cannot slow them.

Pure: randomness comes from a seed, the same for every service that is compared. Lengths are of a model with a long context;
`Fit` scales them to the one at hand. Used by loadtest/open_loop.py over HTTP, and in virtual time by deploy/pd_sim.py.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigurationError
from loadtest.lengths import Draw
from loadtest.load import FIRST_ID, LAST_ID
from loadtest.request_trace import TOKENS_PER_HASH, TraceRow


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int
    at_s: float
    """Since the run began."""
    num_prompt: int
    num_output: int
    kind: str = "request"
    hash_ids: tuple[int, ...] = ()
    """The prompt's beginning: each stands for the same `tokens_per_hash` tokens wherever it occurs."""
    tokens_per_hash: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Lengths for the model at hand: scaled, then cut."""

    scale: float = 1.0
    max_prompt: int = 100_000
    max_output: int = 10_000
    num_output: int | None = None
    """Of every answer, whatever the shape says."""

    def prompt(self, tokens: int) -> int:
        return min(max(round(tokens * self.scale), 1), self.max_prompt)

    def output(self, tokens: int) -> int:
        if self.num_output is not None:
            return self.num_output
        return min(max(round(tokens * self.scale), 1), self.max_output)


def poisson_arrivals(rate: float, seconds: float, draw: Draw, fit: Fit, seed: int) -> tuple[Arrival, ...]:
    """A Poisson process given its count, so that a short run has the rate that was asked for: so many instants, each anywhere.

    The rate changes no length, nor their order.
    """
    times, sizes = random.Random(f"times {seed} {rate}"), random.Random(f"lengths {seed}")
    arrivals: list[Arrival] = []
    for at_s in sorted(times.uniform(0.0, seconds) for _ in range(count_of(rate, seconds))):
        lengths = draw(sizes, len(arrivals))
        prompt, output = fit.prompt(lengths.num_prompt), fit.output(lengths.num_output)
        arrivals.append(Arrival(len(arrivals), at_s, prompt, output, lengths.kind))
    return tuple(arrivals)


def count_of(rate: float, seconds: float) -> int:
    return max(round(rate * seconds), 1)


def replayed_arrivals(rows: Sequence[TraceRow], rate: float, seconds: float, fit: Fit) -> tuple[Arrival, ...]:
    """The trace's first rows, their time stretched so that `rate` of them come a second. Raises ConfigurationError if it is short."""
    count = count_of(rate, seconds)
    if count > len(rows):
        raise ConfigurationError(
            f"the trace has {len(rows)} rows, but {rate:g} requests/s for {seconds:g} s need {count}: lower the rate or the seconds"
        )
    span_s = rows[min(count, len(rows) - 1)].at_s
    stretch = seconds / span_s if span_s else 0.0  # all at once, as recorded
    tokens_per_hash = max(round(TOKENS_PER_HASH * fit.scale), 1)
    return tuple(
        Arrival(
            number,
            min(row.at_s * stretch, seconds),
            fit.prompt(row.num_prompt),
            fit.output(row.num_output),
            hash_ids=row.hash_ids,
            tokens_per_hash=tokens_per_hash,
        )
        for number, row in enumerate(rows[:count])
    )


def prompt_of(arrival: Arrival, run: object) -> list[int]:
    """Its token ids. `run` tells runs apart that must find nothing of each other in a cache."""
    tokens: list[int] = []
    for hash_id in arrival.hash_ids:
        if len(tokens) >= arrival.num_prompt:
            break
        tokens += _ids(f"{run} hash {hash_id}", arrival.tokens_per_hash)
    tokens += _ids(f"{run} own {arrival.number}", max(arrival.num_prompt - len(tokens), 0))
    return tokens[: arrival.num_prompt]


def _ids(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, LAST_ID), k=count)

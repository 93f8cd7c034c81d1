"""A contest of engines on the same work: rounds in which each contender takes one turn, medians over the rounds, ratios, verdicts.

Knows the names of contenders and the targets set for ours against theirs; not how one is run (loadtest/contenders.py) nor how the
outcome is shown (deploy/contest_report.py). No I/O and no clock: a turn is taken by the function that is passed in.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WORKLOADS = ("prefill_128", "prefill_1024", *(f"decode_c{c}_b{b}" for c in (128, 1024) for b in (1, 8, 16)))
"""`prefill_N`: one prompt of N tokens; `decode_cC_bB`: one step of B sequences that hold C tokens each."""


@dataclass(frozen=True, slots=True)
class Duel:
    """One of ours and one of theirs, compared in tokens/s."""

    ours: str
    theirs: str
    at_least: Mapping[str, float] = field(default_factory=dict[str, float])
    """Targets: the least ratio of ours to theirs, by workload. The others are shown without a verdict."""


# Targets: what the engine is to reach at least, set by the project beforehand.
_FLOAT16_TO_F16 = {
    "prefill_1024": 1.4,
    "decode_c128_b1": 0.95,
    "decode_c128_b8": 1.5,
    "decode_c128_b16": 1.6,
    "decode_c1024_b8": 4.0,
    "decode_c1024_b16": 5.5,
}
_FLOAT16_TO_TRANSFORMERS = {
    "prefill_1024": 1.25,
    "decode_c128_b1": 2.3,
    "decode_c128_b8": 2.5,
    "decode_c128_b16": 2.5,
    "decode_c1024_b8": 3.0,
    "decode_c1024_b16": 2.7,
}
_INT8_TO_Q8_0 = {
    "prefill_1024": 1.6,
    "decode_c128_b1": 0.85,
    "decode_c128_b8": 2.0,
    "decode_c128_b16": 2.2,
    "decode_c1024_b8": 4.0,
    "decode_c1024_b16": 5.5,
}

DUELS = (
    Duel("kvferry-float16", "llama.cpp-F16", _FLOAT16_TO_F16),
    Duel("kvferry-float16", "llama.cpp-F16-split"),
    Duel("kvferry-float16-kv-bfloat16", "llama.cpp-F16"),
    Duel("kvferry-float16-kv-bfloat16", "llama.cpp-F16-split"),
    Duel("kvferry-bfloat16", "llama.cpp-F16"),
    Duel("kvferry-bfloat16-kv-bfloat16", "llama.cpp-F16"),
    Duel("kvferry-bfloat16-kv-bfloat16", "llama.cpp-F16-split"),
    Duel("kvferry-bfloat16", "transformers"),
    Duel("kvferry-bfloat16", "vllm-2-threads"),
    Duel("kvferry-float16", "transformers", _FLOAT16_TO_TRANSFORMERS),
    Duel("kvferry-float16", "vllm-2-threads", {"decode_c128_b16": 1.3}),
    Duel("kvferry-float16", "vllm-1-thread"),
    Duel("kvferry-int8", "llama.cpp-Q8_0", _INT8_TO_Q8_0),
    Duel("kvferry-int8", "llama.cpp-Q8_0-split"),
    Duel("kvferry-int8-kv-bfloat16", "llama.cpp-Q8_0"),
    Duel("kvferry-int8-kv-bfloat16", "llama.cpp-Q8_0-split"),
    Duel("kvferry-int8", "vllm-2-threads"),
    Duel("kvferry-float32", "transformers"),
    Duel("kvferry-float32", "vllm-2-threads"),
    Duel("kvferry-float32", "vllm-1-thread"),
)


@dataclass(frozen=True, slots=True)
class Timing:
    workload: str
    step_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's run in one round. One that failed keeps what it had timed until then."""

    contender: str
    timings: tuple[Timing, ...]
    failure: str = ""
    """What went wrong; empty for a success."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio` is ours to theirs in tokens/s; `target` the least that it should be, if one is set."""

    duel: Duel
    workload: str
    ratio: float
    target: float | None

    @property
    def holds(self) -> bool | None:
        """None where no target is set."""
        return None if self.target is None else self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class Outcome:
    turns: tuple[Turn, ...]

    @property
    def contenders(self) -> list[str]:
        """Those with any timing, in the order of their first turns."""
        return list(dict.fromkeys(turn.contender for turn in self.turns if turn.timings))

    @property
    def failures(self) -> dict[str, str]:
        """By contender."""
        return {turn.contender: turn.failure for turn in self.turns if turn.failure}

    def samples_s(self, contender: str, workload: str) -> list[float]:
        """One step time for each round that has it."""
        turns = (turn for turn in self.turns if turn.contender == contender)
        return [timing.step_s for turn in turns for timing in turn.timings if timing.workload == workload]

    def step_s(self, contender: str, workload: str) -> float | None:
        """The median over the rounds; None if no round has it."""
        samples = self.samples_s(contender, workload)
        return statistics.median(samples) if samples else None

    def verdicts(self, duels: Sequence[Duel] = DUELS) -> list[Verdict]:
        """Of each duel and workload that both sides have."""
        found: list[Verdict] = []
        for duel in duels:
            for workload in WORKLOADS:
                ours, theirs = self.step_s(duel.ours, workload), self.step_s(duel.theirs, workload)
                if ours and theirs:
                    found.append(Verdict(duel, workload, theirs / ours, duel.at_least.get(workload)))
        return found


def hold(contenders: Sequence[str], num_rounds: int, take_turn: Callable[[str, int], Turn]) -> Outcome:
    """Every contender once, then every contender again: what drifts on the machine meets all alike.

    `take_turn` is given a contender and the round's number, from 1. Who fails once sits out the rounds that are left.
    """
    turns: list[Turn] = []
    out: set[str] = set()
    for number in range(1, num_rounds + 1):
        for contender in contenders:
            if contender not in out:
                turns.append(turn := take_turn(contender, number))
                out |= {contender} if turn.failure else set()
    return Outcome(tuple(turns))


def read_timings(printed: str) -> tuple[Timing, ...]:
    """From a contender's JSON lines; lines that are not such a one, as peers print some, are passed over."""
    return tuple(_timings(printed.splitlines()))


def _timings(lines: Sequence[str]) -> Iterator[Timing]:
    for line in lines:
        try:
            said: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("workload") in WORKLOADS:
            step_ms = said.get("step_ms")
            if isinstance(step_ms, (int, float)) and step_ms > 0:
                yield Timing(said["workload"], step_ms / 1e3)

"""A plan is what one engine step shall compute: a frozen value, made by a scheduler, run by a runner.

A step has no phases. Each chunk catches one sequence up from the tokens that have KV to a target; with a `Draw` it also wants
the token that follows. Knows nothing of requests, pools, torch or time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose the token with this `index` of its choice (kvferry/engine/sampling.py)."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    index: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Computes KV for `tokens` at positions `start`..., reading and writing `slots` (the blocks of [0, start + len))."""

    sequence_id: int
    tokens: tuple[int, ...]
    start: int
    slots: tuple[int, ...]
    draw: Draw | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    step: int
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens` has one entry per chunk with a draw, unless it failed; `failures` says why, by sequence id."""

    tokens: Mapping[int, int]
    failures: Mapping[int, str] = field(default_factory=dict[int, str])
    duration_s: float = 0.0


class Runner(Protocol):
    """Runs plans over a block memory. Called by one thread at a time."""

    def run(self, plan: Plan) -> StepResult: ...


class Scheduler(Protocol):
    """What the loop asks of a policy. No I/O, no clock, no torch."""

    def plan(self, step: int, now: float) -> Plan | None:
        """The next step's work, or None if there is nothing to do now."""
        ...

    def commit(self, plan: Plan, result: StepResult, now: float) -> None: ...

    @property
    def is_idle(self) -> bool:
        """Nothing is admitted: nothing may be held."""
        ...

    def next_deadline(self) -> float | None:
        """When `plan` should be asked again although nothing happened."""
        ...

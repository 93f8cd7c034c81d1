"""A plan is what one engine step shall compute: a frozen value, made by a scheduler, run by a runner.

A step has no phases. Each chunk catches one sequence up from the tokens that have KV to a target; with a `Draw` it also wants
the token that follows. Knows nothing of requests, pools, torch or time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.engine.history import History
from kvferry.messages import Sampling, TokenLogprobs

NON_FINITE = "the model's logits are not finite"
"""The failure of a sequence whose row is: the only one that the model itself is to blame for."""
GREEDY = Sampling(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Draw:
    """Choose the token with this `index` of its choice (kvferry/engine/sampling.py)."""

    sampling: Sampling
    choice: int = 0
    index: int = 0
    history: History | None = None
    """Only where penalties need it. It grows with the choice: between a step's plan and its commit it stands still."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities are wanted of `targets`: the k-th one follows the chunk's k-th token. As many, or one fewer."""

    targets: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Computes KV for `tokens` at positions `start`..., reading and writing `slots` (the blocks of [0, start + len))."""

    sequence_id: int
    tokens: tuple[int, ...]
    start: int
    slots: tuple[int, ...]
    draw: Draw | None = None
    scoring: Scoring | None = None


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
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    """Of the tokens drawn, where asked for."""
    scores: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict[int, tuple[TokenLogprobs, ...]])
    """Of the targets of each chunk with a scoring."""


class Runner(Protocol):
    """Runs plans over a block memory. Called by one thread at a time."""

    def run(self, plan: Plan) -> StepResult:
        """What it raises fails the plan's chunks that are to blame, one by one; EngineLost ends the worker."""
        ...


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

"""A live request: its journal, where it is, and the instants of its life. Owned by the dispatcher, read by the front doors."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from kvferry.bell import Bell
from kvferry.errors import KvferryError
from kvferry.kv.block_id import chain
from kvferry.messages import Sampling, StartReport, WorkerDescription
from kvferry.text.model_text import ModelText
from router.index import keys_of
from router.journal import Delta, Journal
from router.request import GenerationRequest, Summary
from router.suspicion import Suspicion


class LiveState(Enum):
    QUEUED = "queued"
    PLACED = "placed"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS = frozenset(
    {
        (LiveState.QUEUED, LiveState.PLACED),
        (LiveState.QUEUED, LiveState.FAILED),
        (LiveState.QUEUED, LiveState.CANCELLED),
        (LiveState.PLACED, LiveState.QUEUED),  # its worker was lost, or handed it back
        (LiveState.PLACED, LiveState.FINISHED),
        (LiveState.PLACED, LiveState.FAILED),
        (LiveState.PLACED, LiveState.CANCELLED),
    }
)
TERMINAL = frozenset({LiveState.FINISHED, LiveState.FAILED, LiveState.CANCELLED})


class Live:
    def __init__(self, number: int, request: GenerationRequest, text: ModelText, now: float, deadline_s: float):
        self.number, self.request, self.deadline_s = number, request, deadline_s
        after = request.prompt_tokens if request.continues_prompt else ()
        self.journal = Journal(
            request.num_choices,
            request.sampling,
            lambda: text.stream(after),
            request.stops,
            request.is_stop_included,
        )
        self.state = LiveState.QUEUED
        self.error: KvferryError | None = None
        self.changed = Bell()
        self.at_end: list[Callable[[], None]] = []
        """Called once it has ended."""
        self.accepted_s = now
        self.queued_s = now
        self.instants_s: dict[str, float] = {}
        self.decode_id = ""
        self.decodes_on: WorkerDescription | None = None
        """The worker that its first tokens came from, or will."""
        self.has_changed_numerics = False
        """Some of its tokens came from a worker of another numerics id than the first."""
        self.source_ids: tuple[str, ...] = ()
        self.placed_choices = 0
        self.placed_tokens = 0
        self.failed_worker_ids: set[str] = set()
        self.suspicion = Suspicion()
        self.runs_apart = False
        """It was placed where nobody else is, and nobody else may be."""
        self.has_begun = False
        """It takes part in the steps of its worker."""
        self.num_readers = 1
        self.predicted_ttft_s: float | None = None
        self.explanation: dict[str, Any] | None = None
        self.num_passed = 0
        self.first_report: StartReport | None = None
        self._placed_s = now
        self._block_ids: list[bytes] = []
        self._keys: list[int] = []

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def longest_tokens(self) -> int:
        """Prompt and emitted tokens of the longest choice."""
        return len(self.request.prompt_tokens) + max(len(choice.tokens) for choice in self.journal.choices)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some are still lacking."""
        lacking = len(self.request.prompt_tokens) - 1 - len(self.journal.prompt_logprobs)
        return self.request.sampling.num_prompt_logprobs is not None and lacking > 0

    @property
    def sampling(self) -> Sampling:
        """For the next attempt: what has come is not asked for again."""
        sampling = self.request.sampling
        if sampling.num_prompt_logprobs is None or self.wants_prompt_logprobs:
            return sampling
        return replace(sampling, num_prompt_logprobs=None)

    @property
    def size(self) -> int:
        """Tokens that its choices may come to have."""
        return (len(self.request.prompt_tokens) + self.request.sampling.max_tokens) * len(self.journal.choices)

    @property
    def used_tokens(self) -> int:
        """Of `size`."""
        return len(self.request.prompt_tokens) * len(self.journal.choices) + self.journal.num_tokens

    @property
    def num_bytes(self) -> int:
        """That it keeps while it waits, roughly: eight for each token, and its texts."""
        request = self.request
        return (
            8 * len(request.prompt_tokens) + len(request.echo or "") + sum(len(stop) for stop in request.stops) + 1024
        )

    @property
    def priority(self) -> int:
        return self.request.priority

    def move(self, state: LiveState) -> None:
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"request {self.number} cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.changed.ring()
        if self.has_ended:
            for call in self.at_end:
                call()

    def block_ids(self, root: bytes, block_size: int) -> list[bytes]:
        """Of the prompt's whole blocks; computed once."""
        if not self._block_ids:
            self._block_ids = chain(root, self.request.prompt_tokens, block_size)
        return self._block_ids

    def block_keys(self, root: bytes, block_size: int) -> list[int]:
        """What the index calls them; computed once."""
        if not self._keys:
            self._keys = keys_of(self.block_ids(root, block_size))
        return self._keys

    @property
    def has_yielded(self) -> bool:
        """Something of its answer has come."""
        return bool(self.journal.num_tokens or self.journal.prompt_logprobs)

    def fits(self, worker: WorkerDescription) -> bool:
        """What has come of its answer could have come from that worker."""
        began = self.decodes_on
        if began is None or not self.has_yielded:
            return True
        return (began.model_id, began.fidelity) == (worker.model_id, worker.fidelity)

    def is_bit_equal_on(self, worker: WorkerDescription) -> bool:
        began = self.decodes_on
        return began is None or not self.has_yielded or began.numerics_id == worker.numerics_id

    def placed(self, now: float) -> None:
        self._placed_s = now
        self.instants_s.setdefault("placed", now - self.accepted_s)

    def started(self, report: StartReport) -> None:
        """The first attempt's report counts: later ones are continuations."""
        if self.first_report is not None:
            return
        self.first_report = report
        base = self._placed_s - self.accepted_s
        for name in ("fetch_opened", "first_block", "last_block", "tail_planned", "first_token"):
            seconds = getattr(report, f"{name}_s")
            if seconds is not None:
                self.instants_s[name] = base + seconds

    def summary(self) -> Summary:
        report = self.first_report or StartReport(self.number, 0)
        return Summary(
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_completion_tokens=self.journal.num_tokens,
            num_cached_tokens=report.num_local_tokens + report.num_source_cached_tokens,
            num_fetched_blocks=report.num_fetched_blocks,
            fetched_bytes=report.fetched_bytes,
            num_attempts=self.journal.attempt,
            decode_worker_id=self.decode_id,
            source_worker_id=report.source_worker_id,
            road=report.road,
            instants_s=dict(self.instants_s),
            seed=self.request.sampling.seed,
            explanation=self._explained(),
            has_changed_numerics=self.has_changed_numerics,
        )

    def _explained(self) -> dict[str, Any] | None:
        """The prediction of the first placement beside what came of it, in milliseconds."""
        if self.explanation is None:
            return None
        predicted, first_token_s = self.predicted_ttft_s, self.instants_s.get("first_token")
        if predicted is None or first_token_s is None or self.journal.attempt != 1:
            return self.explanation
        actual_ms = (first_token_s - self.instants_s["placed"]) * 1e3
        return {
            **self.explanation,
            "actual_ttft_ms": round(actual_ms, 3),
            "prediction_error_ms": round(actual_ms - predicted * 1e3, 3),
        }


@dataclass(frozen=True, slots=True)
class NumberedDelta:
    """`index` numbers the choices of several requests through."""

    index: int
    delta: Delta


async def wait_all(lives: Sequence[Live]) -> None:
    """Until all have ended. Raises the first error as soon as there is one."""
    changed = _shared_bell(lives)
    while True:
        _raise_first_error(lives)
        if all(live.has_ended for live in lives):
            return
        await changed.wait()


async def deltas_of(lives: Sequence[Live]) -> AsyncIterator[list[NumberedDelta]]:
    """What is new in any of them, whenever there is something, until all have ended. Raises the first error."""
    changed = _shared_bell(lives)
    choices = [choice for live in lives for choice in live.journal.choices]
    positions = [0] * len(choices)
    while True:
        new: list[NumberedDelta] = []
        for index, choice in enumerate(choices):
            delta, positions[index] = choice.read(positions[index])
            if delta is not None:
                new.append(NumberedDelta(index, delta))
        if new:
            yield new
            if any(choice.has_after(position) for choice, position in zip(choices, positions, strict=True)):
                continue
        _raise_first_error(lives)
        if all(live.has_ended for live in lives):
            return
        await changed.wait()


def _shared_bell(lives: Sequence[Live]) -> Bell:
    """One bell for all: whichever changes, the one reader wakes."""
    for live in lives:
        live.changed = lives[0].changed
    return lives[0].changed


def _raise_first_error(lives: Sequence[Live]) -> None:
    for live in lives:
        if live.error is not None:
            raise live.error

"""One choice of one request on a decode worker, and the states that it goes through.

    WAITING ──▶ FETCHING ──▶ RUNNING ──▶ ENDED          WAITING: has no slot, only tokens
       ▲ └─────────┼────────▶──┘            ▲           FETCHING: its slots are reserved, blocks arrive or are awaited
       └───────────┴── preempted, or has    │           RUNNING: takes part in steps
                       to begin anew        │
                        any state ──────────┘           ENDED: has nothing; the reason was said once

Moved by the scheduler alone; what is fetched for it fetches.py knows.
"""

from enum import Enum

from kvferry.engine.history import History
from kvferry.engine.sequence import Sequence
from kvferry.messages import Sampling, Source


class State(Enum):
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS = frozenset(
    {
        (State.WAITING, State.FETCHING),
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.ENDED),
        (State.FETCHING, State.RUNNING),
        (State.FETCHING, State.WAITING),
        (State.FETCHING, State.ENDED),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.ENDED),
    }
)


class Choice:
    """One choice of one request on this worker. `key` is the service's name for it."""

    def __init__(
        self,
        key: object,
        choice: int,
        sequence: Sequence,
        num_prompt_tokens: int,
        sampling: Sampling,
        sources: tuple[Source, ...] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        after: "Choice | None" = None,
        local_tokens: int = 0,
    ):
        self.local_tokens = local_tokens
        self.key, self.choice, self.sequence, self.sampling = key, choice, sequence, sampling
        self.num_prompt_tokens = num_prompt_tokens
        self.history = History(sequence.tokens, num_prompt_tokens) if sampling.has_penalties else None
        self.num_start_tokens = len(sequence.tokens)
        self.sources = list(sources)
        self.num_given_sources = len(sources)
        self.failed_source_ids: list[str] = []
        self.last_failure = ""
        self.priority, self.deadline_s = priority, deadline_s
        self.arrival = 0
        self.num_passed = 0
        self.state = State.WAITING
        self.has_warmed = False
        self.is_in_step = False  # in the last one that was planned
        self.num_tries_at_source = 0
        self.num_high_water = 0  # tokens that had KV before a preemption
        self.num_local_tokens = 0
        self.is_computed_here = False  # no source brings what is missing
        self.after = after
        self.num_scored = 0 if after is None else num_prompt_tokens
        self.tail_planned_s: float | None = None

    @property
    def is_scoring(self) -> bool:
        """Log-probabilities of the prompt are still wanted: every position of it must pass through a step."""
        return self.sampling.num_prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    @property
    def index(self) -> int:
        """Of the next token within the choice."""
        return len(self.sequence.tokens) - self.num_prompt_tokens

    @property
    def size(self) -> int:
        """Tokens that it may come to have."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def waits_for_scores(self) -> bool:
        """Until the request's first choice has the prompt's log-probabilities: then its blocks are here, too."""
        return self.after is not None and self.after.state is not State.ENDED and self.after.is_scoring

    @property
    def num_missing_tokens(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_computed

    @property
    def order(self) -> tuple[int, int]:
        return (-self.priority, self.arrival)

    def move(self, state: State) -> None:
        if (self.state, state) not in TRANSITIONS:
            raise AssertionError(f"a choice cannot go from {self.state.value} to {state.value}")
        self.state = state

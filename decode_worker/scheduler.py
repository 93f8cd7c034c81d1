"""The decode policy: one token of every running sequence a step, plus tails and local chunks within a budget of time.

Pure: no I/O, no clock, no torch. It decides what runs, what is fetched, who waits and who is preempted; fetching and emitting are
the service's. A choice and its states are choice.py's, which fetch brings what is fetches.py's.

Two sequences that want the same missing block: one fetches, the others wait and adopt what it sealed; when its fetch ends, for
whatever reason, each looks again. Local computing is shared by claims that live for one plan, as in the prefill policy.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import groupby

from decode_worker.choice import Choice, State
from decode_worker.fetches import Fetches, FetchOrder
from kvferry.engine.budget import StepBudget
from kvferry.engine.plan import Chunk, Draw, Plan, Scoring, StepResult
from kvferry.errors import PoolExhausted
from kvferry.kv.pool import BlockPool
from kvferry.messages import ChoiceEndReason, TokenLogprobs
from kvferry.turns import bucket, start_in_order, turns
from kvferry.worker.counters import Counters

GROWTH_MARGIN_BLOCKS = 4
"""Reserved beyond what a sequence has now, so that running sequences rarely need a slot in the middle of a step."""

MAX_SCORED_TOKENS = 128
"""Positions of a prompt whose log-probabilities are wanted, in one step."""


@dataclass(frozen=True, slots=True)
class Token:
    """A new token of a choice; `index` is its place in the choice."""

    choice: Choice
    index: int
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """The choice takes part in the next step, and did not in the one before it."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Paused:
    """The choice does not take part in the next step, and did in the one before it."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a choice's prompt tokens from `position` on."""

    choice: Choice
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    choice: Choice
    reason: ChoiceEndReason
    detail: str = ""


Event = Token | Begun | Paused | Scored | Ended


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    context_tokens: int
    """Tokens of one sequence that may have KV."""
    max_sequences: int
    """In steps or fetching at once."""
    max_local_tokens: int
    """Beyond so many missing tokens, a request whose sources all failed is handed back instead of computed here."""
    max_warm: int = 4
    """So many of the requests that wait for room have their prompts computed meanwhile."""


class DecodeScheduler:
    def __init__(self, pool: BlockPool, block_size: int, limits: DecodeLimits, budget: StepBudget, counters: Counters):
        self._pool, self._block_size, self._limits = pool, block_size, limits
        self._budget, self._counters = budget, counters
        self._choices: dict[int, Choice] = {}
        self._fetches = Fetches()
        self._num_admitted = 0
        self._events: list[Event] = []

    # ------------------------------------------------------------------------------------------ what the service calls

    def next_sequence_id(self) -> int:
        self._num_admitted += 1
        return self._num_admitted

    def admit(self, choice: Choice) -> None:
        """It waits for its slots; one that can never fit ends at once as TOO_LARGE."""
        choice.arrival = choice.sequence.sequence_id
        self._choices[choice.sequence.sequence_id] = choice
        num_kv_tokens = choice.num_prompt_tokens + max(choice.sampling.max_tokens - 1, 0)
        limit = min(self._limits.context_tokens, self._pool.num_slots * self._block_size)
        if num_kv_tokens > limit:
            detail = f"{num_kv_tokens} tokens of prompt and answer, at most {limit} fit"
            self._end(choice, ChoiceEndReason.TOO_LARGE, detail)

    def abort(self, choice: Choice) -> None:
        """Nobody wants it any more. Only between steps. Idempotent."""
        if choice.state is not State.ENDED:
            self._counters.add("requests_cancelled")
            self._end(choice, ChoiceEndReason.CANCELLED)

    def fetch_ended(self, order: FetchOrder, error: str | None, is_source_bad: bool) -> None:
        """The fetch is over: `error` says why it did not bring everything, `is_source_bad` that trying again is vain."""
        choice = order.choice
        if not self._fetches.ended(order):
            return
        made_progress = choice.sequence.num_sealed_blocks > order.first_block
        if error is not None and choice.sources and choice.sources[0] == order.source:
            choice.num_tries_at_source += 1
            choice.last_failure = f"{order.source.worker_id}: {error}"
            if is_source_bad or not made_progress or choice.num_tries_at_source >= 8:
                choice.failed_source_ids.append(choice.sources.pop(0).worker_id)
                choice.num_tries_at_source = 0

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_fetches(self) -> tuple[list[FetchOrder], list[FetchOrder]]:
        """Fetches to open, and fetches to drop, since the last call."""
        return self._fetches.take()

    @property
    def num_kv_tokens(self) -> int:
        """That all choices have, wherever they are."""
        return sum(len(choice.sequence.tokens) for choice in self._choices.values())

    @property
    def num_tokens_behind(self) -> int:
        """That are to be computed here before their choices yield a token."""
        behind = (c.num_missing_tokens for c in self._choices.values() if c.state is State.RUNNING)
        return sum(missing for missing in behind if missing > 1)

    @property
    def tokens_behind_by_size(self) -> dict[int, int]:
        """The same by what each choice still lacks, as a power of two: `turns` lets those that lack less pass."""
        behind: Counter[int] = Counter()
        for choice in self._choices.values():
            if choice.state is State.RUNNING and choice.num_missing_tokens > 1:
                behind[bucket(choice.num_missing_tokens)] += choice.num_missing_tokens
        return dict(behind)

    def count(self, state: State) -> int:
        return sum(choice.state is state for choice in self._choices.values())

    @property
    def is_idle(self) -> bool:
        return not self._choices

    def next_deadline(self) -> float | None:
        return min((c.deadline_s for c in self._choices.values() if c.deadline_s is not None), default=None)

    # --------------------------------------------------------------------------------------------------------- the step

    def plan(self, step: int, now: float) -> Plan | None:
        while True:
            num_choices = len(self._choices)
            plan = self._plan(step, now)
            if plan is not None or len(self._choices) == num_choices:
                return plan  # else one ended without a step, and its slots may let another one start

    def _plan(self, step: int, now: float) -> Plan | None:
        self._end_expired(now)
        self._start_waiting()
        for choice in self._ordered(State.FETCHING):
            self._look_again(choice)
        chunks = list(self._next_tokens())
        chunks += self._catch_up(step, now, is_yielding=bool(chunks))
        kept = tuple(chunk for chunk in chunks if self._is_running(chunk.sequence_id))
        self._tell_who_takes_part({chunk.sequence_id for chunk in kept})
        return Plan(step, kept) if kept else None

    def _tell_who_takes_part(self, sequence_ids: Set[int]) -> None:
        for number, choice in self._choices.items():
            if choice.is_in_step != (number in sequence_ids):
                choice.is_in_step = not choice.is_in_step
                self._events.append(Begun(choice) if choice.is_in_step else Paused(choice))

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        del now
        for chunk in plan.chunks:
            choice = self._choices[chunk.sequence_id]
            if chunk.sequence_id in result.failures:
                self._counters.add("engine_failures")
                self._end(choice, ChoiceEndReason.ENGINE_ERROR, result.failures[chunk.sequence_id])
                continue
            choice.sequence.computed(chunk.start + len(chunk.tokens))
            if chunk.scoring is not None:
                self._take_scores(choice, chunk.start + 1, result.scores[chunk.sequence_id])
            if chunk.draw is not None:
                self._take_token(choice, result.tokens[chunk.sequence_id], result.logprobs.get(chunk.sequence_id))
            elif not choice.sampling.max_tokens and chunk.start + len(chunk.tokens) == len(choice.sequence.tokens):
                self._end(choice, ChoiceEndReason.LENGTH)
        num_catching_up = sum(len(chunk.tokens) for chunk in plan.chunks if len(chunk.tokens) > 1)
        if result.failures:
            return
        if 2 * num_catching_up > plan.num_tokens:
            self._budget.measured(plan.num_tokens, result.duration_s)
        if num_catching_up < plan.num_tokens:
            self._budget.measured_yielding(num_catching_up, result.duration_s)

    def _take_scores(self, choice: Choice, position: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """After a preemption the same positions come again: only new ones are told."""
        new = logprobs[max(choice.num_scored - position, 0) :]
        if new:
            self._events.append(Scored(choice, position + len(logprobs) - len(new), new))
        choice.num_scored = max(choice.num_scored, position + len(logprobs))

    def _take_token(self, choice: Choice, token: int, logprobs: TokenLogprobs | None) -> None:
        self._events.append(Token(choice, choice.index, token, logprobs))
        choice.sequence.append(token)
        if token in choice.sampling.stop_token_ids:
            self._end(choice, ChoiceEndReason.STOP)
        elif choice.index >= choice.sampling.max_tokens:
            self._end(choice, ChoiceEndReason.LENGTH)

    # ------------------------------------------------------------------------------------------------- starting, fetching

    def _start_waiting(self) -> None:
        start_in_order((c for c in self._ordered(State.WAITING) if not c.waits_for_scores), self._start)
        for choice in self._ordered(State.WAITING)[: self._limits.max_warm]:
            self._warm(choice)

    def _warm(self, choice: Choice) -> None:
        """Once for each choice, by its first source."""
        last = choice.sequence.num_blocks_before_tail
        if choice.has_warmed or not choice.sources or choice.is_scoring or choice.waits_for_scores:
            return
        choice.has_warmed = True
        missing = last - self._pool.num_sealed_prefix(choice.sequence.block_ids[:last])
        if missing * self._block_size > choice.local_tokens:
            self._fetches.warm(choice)

    def _start(self, choice: Choice) -> bool:
        sequence = choice.sequence
        if self.count(State.FETCHING) + self.count(State.RUNNING) >= self._limits.max_sequences:
            return False
        margin = GROWTH_MARGIN_BLOCKS * self._block_size
        wanted = len(sequence.tokens) + min(choice.sampling.max_tokens - choice.index - 1, margin)
        wanted = min(max(wanted, len(sequence.tokens)), self._limits.context_tokens)
        num_sealed = self._pool.num_sealed_prefix(sequence.block_ids[: sequence.num_blocks_before_tail])
        if not sequence.window and sequence.num_slots_for(wanted) - num_sealed > self._pool.num_available:
            return False
        skipped = 0 if choice.is_scoring or choice.is_computed_here else sequence.num_unseen_blocks
        try:
            adopted = sequence.start(wanted, 0 if choice.is_scoring else sequence.num_blocks_before_tail, skipped)
        except PoolExhausted:
            return False
        if not choice.num_high_water:
            new = max(adopted * self._block_size - choice.num_local_tokens, 0)  # it may begin anew, without its window
            choice.num_local_tokens += new
            self._counters.add("cache_hit_tokens", new)
        else:
            lost = min(choice.num_high_water, len(sequence.tokens)) - sequence.num_computed
            self._counters.add("recomputed_tokens", max(lost, 0))
        choice.move(State.FETCHING)
        self._look_again(choice)
        if choice not in self._fetches:
            self._fetches.stop_warming(choice)
        return True

    def _look_again(self, choice: Choice) -> None:
        """A choice in FETCHING that has no fetch of its own: run, wait for somebody else's, or open one."""
        if choice in self._fetches:
            return
        if choice.is_scoring:
            choice.move(State.RUNNING)
            return
        sequence = choice.sequence
        self._adopt(choice)
        missing = sequence.num_blocks_before_tail - sequence.num_sealed_blocks
        if missing == 0:
            choice.move(State.RUNNING)
        elif self._fetches.brings(sequence.next_block_id):
            return
        elif choice.sources and self._num_local_tokens(choice, missing) > choice.local_tokens:
            self._fetches.open(choice)
        elif (
            not choice.sources
            and choice.num_given_sources
            and self._num_local_tokens(choice, missing) > self._limits.max_local_tokens
        ):
            detail = f"no source delivered the {missing} missing blocks; the last one, {choice.last_failure}"
            self._end(choice, ChoiceEndReason.UNPLACED, detail)
        elif sequence.num_skipped_blocks:  # what computes the missing ones sees blocks that were left out
            choice.is_computed_here = True
            sequence.stop()
            choice.move(State.WAITING)
            self._start(choice)
        else:
            choice.move(State.RUNNING)

    def _num_local_tokens(self, choice: Choice, num_missing_blocks: int) -> int:
        """That would have to be computed here if no source brings the missing blocks."""
        skipped = choice.sequence.num_skipped_blocks
        return (choice.sequence.num_blocks_before_tail if skipped else num_missing_blocks) * self._block_size

    def _adopt(self, choice: Choice) -> int:
        sequence = choice.sequence
        adopted = sequence.adopt_sealed(sequence.num_blocks_before_tail)
        if adopted:
            sequence.hold.give_back(min(adopted, len(sequence.hold.reserved)))
        return adopted

    # -------------------------------------------------------------------------------------------------------- running

    def _next_tokens(self) -> Iterable[Chunk]:
        for choice in self._ordered(State.RUNNING):
            sequence = choice.sequence
            if choice.state is not State.RUNNING or len(sequence.tokens) - sequence.num_computed != 1:
                continue  # preempted by an older one of this very plan, or catching up
            if self._ensure_slots(choice, len(sequence.tokens)):
                yield self._chunk(choice, len(sequence.tokens))

    def _catch_up(self, step: int, now: float, is_yielding: bool) -> Iterable[Chunk]:
        """Tails and local chunks within the budget; the first of them, and it alone, may exceed it to reach a block's edge."""
        left, claimed, is_first = self._budget.num_tokens(is_yielding), set[bytes](), True
        left_to_score = MAX_SCORED_TOKENS
        behind = [choice for choice in self._ordered(State.RUNNING) if choice.num_missing_tokens > 1]
        if is_yielding and len(behind) == 1 and behind[0].num_missing_tokens <= self._block_size:
            left = min(left, self._budget.num_lone_tail_tokens())
        for choice in behind:
            if not choice.is_scoring:
                self._adopt(choice)
        for _, group in groupby(behind, key=lambda choice: choice.priority):
            choices = list(group)
            for turn in turns([choice.num_missing_tokens for choice in choices], left, self._block_size, step):
                choice = choices[turn.place]
                if left <= 0 or choice.state is not State.RUNNING:
                    continue
                num_computed, most = choice.sequence.num_computed, min(left, turn.max_tokens)
                if choice.is_scoring:
                    most = min(most, left_to_score)
                target = self._catch_up_target(choice, most, is_first, claimed)
                if target > num_computed and self._ensure_slots(choice, target):
                    if target == len(choice.sequence.tokens) and choice.tail_planned_s is None:
                        choice.tail_planned_s = now
                    left, is_first = left - (target - num_computed), False
                    if choice.is_scoring:
                        left_to_score -= target - num_computed
                    yield self._chunk(choice, target)

    def _catch_up_target(self, choice: Choice, left: int, may_exceed: bool, claimed: set[bytes]) -> int:
        """The end of the tokens if it is within reach, else a block's edge; whole blocks before it are claimed."""
        sequence, size = choice.sequence, self._block_size
        if choice.is_scoring:  # no sharing: it wants all of its own positions
            return min(len(sequence.tokens), sequence.num_computed + left)
        target = min(len(sequence.tokens), sequence.num_computed + left)
        if sequence.num_computed + size < len(sequence.tokens) and target < len(sequence.tokens):
            target = max(target // size, sequence.num_sealed_blocks + may_exceed) * size
        for k in range(sequence.num_sealed_blocks, min(target // size, sequence.num_blocks_before_tail)):
            block_id = sequence.block_ids[k]
            if block_id in claimed or (k > sequence.num_sealed_blocks and block_id in self._pool):
                return max(k * size, sequence.num_computed)
            claimed.add(block_id)
        return target

    def _chunk(self, choice: Choice, target: int) -> Chunk:
        sequence, start = choice.sequence, choice.sequence.num_computed
        draw = self._draw(choice) if target == len(sequence.tokens) and choice.sampling.max_tokens else None
        scoring = None
        if choice.is_scoring:
            assert choice.sampling.num_prompt_logprobs is not None
            targets = tuple(sequence.tokens[start + 1 : min(target + 1, choice.num_prompt_tokens)])
            scoring = Scoring(targets, choice.sampling.num_prompt_logprobs)
        tokens = tuple(sequence.tokens[start:target])
        return Chunk(sequence.sequence_id, tokens, start, sequence.cover(target), draw, scoring)

    @staticmethod
    def _draw(choice: Choice) -> Draw:
        return Draw(choice.sampling, choice.choice, choice.index, choice.history)

    def _ensure_slots(self, choice: Choice, target: int) -> bool:
        """Reserves what is lacking, preempting the youngest if need be; False if that was the choice itself."""
        while lacking := choice.sequence.num_slots_lacking(target):
            try:
                choice.sequence.hold.reserve(lacking)
            except PoolExhausted:
                victim = max(self._ordered(State.RUNNING, State.FETCHING), key=lambda other: other.order)
                self._preempt(victim)
                if victim is choice:
                    return False
        return True

    def _preempt(self, choice: Choice) -> None:
        """Its blocks go, its tokens stay; it comes back as an ordinary sequence."""
        self._counters.add("preemptions")
        self._fetches.drop(choice)
        choice.num_high_water = max(choice.num_high_water, choice.sequence.num_computed)
        choice.sequence.stop()
        choice.move(State.WAITING)

    # --------------------------------------------------------------------------------------------------------- endings

    def _end_expired(self, now: float) -> None:
        for choice in list(self._choices.values()):
            if choice.deadline_s is not None and now >= choice.deadline_s:
                self._end(choice, ChoiceEndReason.DEADLINE, "the request's time ran out")

    def _end(self, choice: Choice, reason: ChoiceEndReason, detail: str = "") -> None:
        self._fetches.drop(choice)
        choice.sequence.stop()
        choice.move(State.ENDED)
        del self._choices[choice.sequence.sequence_id]
        self._events.append(Ended(choice, reason, detail))

    def _ordered(self, *states: State) -> list[Choice]:
        return sorted((c for c in self._choices.values() if c.state in states), key=lambda choice: choice.order)

    def _is_running(self, sequence_id: int) -> bool:
        choice = self._choices.get(sequence_id)
        return choice is not None and choice.state is State.RUNNING

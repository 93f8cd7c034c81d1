"""The dispatcher: takes requests, places them, hears the workers, and sees to it that each request ends exactly once.

It owns every live request and the links to the decode workers. Placing is late: a request waits here until a decode worker can take
it. A lost worker's requests are placed again, their emitted tokens as part of the prompt. All of it runs on the event loop and
never waits for a client.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.bell import Bell
from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    KvferryError,
    NoWorker,
    Overloaded,
)
from kvferry.kv.block_id import num_whole_blocks_before_tail
from kvferry.messages import (
    ChoiceEnd,
    ChoiceEndReason,
    NewTokens,
    PromptLogprobs,
    RequestCancel,
    RequestOpen,
    Role,
    Source,
    StepOutput,
)
from kvferry.streams import Dialer
from kvferry.text.model_text import ModelText
from kvferry.turns import start_in_order
from router.decode_link import SILENCE_S, DecodeLink
from router.index import PrefixIndex
from router.journal import Acceptance
from router.live import Live, LiveState
from router.members import Member, Members
from router.placement import Demand, Placement, WorkerSnapshot, can_take, place
from router.request import GenerationRequest

logger = logging.getLogger(__name__)

MAX_LOSSES = 5
"""A request that lost so many workers is given up: it may be what kills them."""
MAX_ATTEMPTS = 30


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    max_queued: int = 1024
    """Requests that may wait for a decode worker; one more is refused."""
    queue_timeout_s: float = 30.0
    """The longest wait of a request that nobody has taken yet."""
    request_timeout_s: float = 600.0
    """The longest life of a request that names no time limit of its own."""
    local_tokens: int = 16
    """Up to so many missing tokens, a request gets no source."""


class Dispatcher:
    def __init__(
        self,
        text: ModelText,
        members: Members,
        index: PrefixIndex,
        dialer: Dialer,
        limits: DispatchLimits,
        silence_s: float = SILENCE_S,
    ):
        self._text, self.members, self._index = text, members, index
        self._dialer, self.limits, self._silence_s = dialer, limits, silence_s
        self._lives: dict[int, Live] = {}
        self._queue: list[Live] = []
        self._links: dict[str, tuple[DecodeLink, asyncio.Task[None]]] = {}
        self._placed: dict[int, tuple[Member, Member | None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._work = Bell()
        self._next_number = 0
        self._is_closing = False
        self.counters: Counter[str] = Counter()
        self.observe: Callable[[Live], None] = lambda live: None
        """Called with each request that has ended."""
        members.on_joined, members.on_lost, members.on_change = self._joined, self._lost, self._work.ring

    async def run(self) -> None:
        """Keeps the links' task group and places what waits; until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for member in self.members:
                self._joined(member)
            while True:
                self._place_waiting()
                await self._work.wait(self._next_timeout())

    # -------------------------------------------------------------------------------------------------- for front doors

    def submit(self, request: GenerationRequest) -> Live:
        """Accepts a request, or raises InvalidRequest, Overloaded or NoWorker at once."""
        self._refuse_what_cannot_run(request)
        self._next_number += 1
        now = self._now()
        live = Live(self._next_number, request, self._text, now)
        self._lives[live.number] = live
        self._queue.append(live)
        self.counters["accepted"] += 1
        self._place_waiting()
        self._work.ring()
        return live

    def cancel(self, live: Live) -> None:
        """Nobody wants it any more. Idempotent, also after its end."""
        if not live.has_ended:
            self.counters[f"cancelled_{self.phase(live)}"] += 1
            self._end(live, LiveState.CANCELLED, Cancelled("the request was cancelled"))

    def shut_down(self) -> None:
        """Ends every live request with an error of its own; nothing is accepted any more."""
        self._is_closing = True
        for live in self.lives:
            self._end(live, LiveState.FAILED, NoWorker("the router is shutting down; try again", retry_after_s=5))

    def phase(self, live: Live) -> str:
        """Where a live request is: queued, prefilling (no token yet) or decoding."""
        if live.state is LiveState.QUEUED:
            return "queued"
        return "decoding" if live.journal.num_tokens else "prefilling"

    @property
    def lives(self) -> list[Live]:
        return list(self._lives.values())

    @property
    def is_ready(self) -> bool:
        return any(member.is_attached for member in self.members.of(Role.DECODE))

    @property
    def is_degraded(self) -> bool:
        return self.is_ready and not self.members.of(Role.PREFILL)

    @property
    def max_kv_tokens(self) -> int | None:
        """Tokens of one choice that this deployment can hold; None while there is no decode worker."""
        sizes = [min(m.description.context_tokens, m.description.pool_tokens) for m in self.members.of(Role.DECODE)]
        return max(sizes, default=None)

    def _refuse_what_cannot_run(self, request: GenerationRequest) -> None:
        if self._is_closing:
            raise NoWorker("the router is shutting down; try again", retry_after_s=5)
        limit = self.max_kv_tokens
        if limit is None or not self.is_ready:
            raise NoWorker("no decode worker is ready: the decode pool is empty; try again shortly", retry_after_s=2)
        num_tokens = len(request.prompt_tokens) + max(request.sampling.max_tokens - 1, 0)
        if num_tokens > limit:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_tokens)} tokens and may be answered with up to "
                f"{request.sampling.max_tokens}: {num_tokens} in all, but this deployment's pools hold {limit} tokens for a "
                "request; shorten the prompt or max_tokens",
                "max_tokens",
                "context_length_exceeded",
            )
        if len(self._queue) >= self.limits.max_queued:
            self.counters["rejected_queue_full"] += 1
            raise Overloaded(
                f"{len(self._queue)} requests are waiting for the decode pool, which is the limit; try again later", 2
            )

    # -------------------------------------------------------------------------------------------------------- placing

    def _place_waiting(self) -> None:
        now = self._now()
        self._expire(now)
        self._queue.sort(key=lambda live: (-live.request.priority, live.number))
        limit = self.max_kv_tokens or 0  # what is larger waits for another worker, apart from the queue
        start_in_order([live for live in self._queue if self._num_kv_tokens(live) <= limit], self._try_place)

    def _try_place(self, live: Live) -> bool:
        placement = self._placement(live) if self._has_room(live) else None
        if placement is None:
            return False
        self._queue.remove(live)
        self._open(live, placement, self._now())
        return True

    def _has_room(self, live: Live) -> bool:
        """By the loads alone: asked of every request that waits."""
        demand = Demand(live.longest_tokens, len(live.journal.starts()), self._num_kv_tokens(live), 0, 1)
        members = self.members.of(Role.DECODE)
        return any(can_take(self._snapshot(member, []), demand) for member in members if member.is_attached)

    def _placement(self, live: Live) -> Placement | None:
        root = self.members.root(live.request.salt)
        description = self.members.any_description
        if root is None or description is None:
            return None
        block_ids = live.block_ids(root, description.block_size)
        num_tokens = live.longest_tokens
        demand = Demand(
            num_tokens=num_tokens,
            num_choices=len(live.journal.starts()),
            num_kv_tokens=self._num_kv_tokens(live),
            num_blocks_before_tail=num_whole_blocks_before_tail(num_tokens, description.block_size),
            block_size=description.block_size,
            failed_worker_ids=frozenset(live.failed_worker_ids),
        )
        decode = [self._snapshot(m, block_ids) for m in self.members.of(Role.DECODE) if m.is_attached]
        if live.wants_prompt_logprobs:  # every position passes through the decode worker's steps
            return place(demand, decode, [], local_tokens=num_tokens)
        prefill = [self._snapshot(m, block_ids) for m in self.members.of(Role.PREFILL)]
        return place(demand, decode, prefill, self.limits.local_tokens)

    @staticmethod
    def _num_kv_tokens(live: Live) -> int:
        return len(live.request.prompt_tokens) + max(live.request.sampling.max_tokens - 1, 0)

    def _snapshot(self, member: Member, block_ids: list[bytes]) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=member.worker_id,
            num_active=member.num_active,
            max_active=member.description.max_sequences,
            active_tokens=member.active_tokens,
            pool_tokens=member.description.pool_tokens,
            num_placed=member.num_placed,
            num_held_blocks=self._index.num_held(member.worker_id, block_ids),
        )

    def _open(self, live: Live, placement: Placement, now: float) -> None:
        decode = self.members.get(placement.decode_id)
        prefill = self.members.get(placement.source_ids[0]) if placement.source_ids else None
        if prefill is not None and prefill.role is Role.DECODE:
            prefill = None  # it only hands out what it has
        assert decode is not None
        attempt = live.journal.next_attempt()
        starts = live.journal.starts()
        decode.num_active += len(starts)
        decode.active_tokens += live.longest_tokens * len(starts)
        decode.num_placed += 1
        if prefill is not None:
            prefill.num_active += 1
            prefill.active_tokens += placement.num_missing_tokens
            prefill.num_placed += 1
        live.decode_id, live.source_ids = placement.decode_id, placement.source_ids
        live.num_missing_tokens = placement.num_missing_tokens
        live.placed_choices, live.placed_tokens = len(starts), live.longest_tokens * len(starts)
        live.placed(now)
        live.move(LiveState.PLACED)
        self._placed[live.number] = (decode, prefill)
        request = live.request
        self._links[decode.worker_id][0].send(
            RequestOpen(
                number=live.number,
                attempt=attempt,
                prompt_tokens=request.prompt_tokens,
                choices=starts,
                sampling=live.sampling,
                salt=request.salt,
                sources=self._addresses(placement.source_ids),
                holders=self._addresses(placement.holder_ids),
                priority=request.priority,
                time_left_s=self._deadline_s(live) - now,
            )
        )

    def _addresses(self, worker_ids: tuple[str, ...]) -> tuple[Source, ...]:
        members = [member for worker_id in worker_ids if (member := self.members.get(worker_id)) is not None]
        return tuple(Source(member.worker_id, member.description.address) for member in members)

    def _release(self, live: Live) -> None:
        """Takes a request's load off its workers."""
        placed = self._placed.pop(live.number, None)
        if placed is None:
            return
        decode, _ = placed
        self._release_prefill(live, placed)
        decode.num_active -= live.placed_choices
        decode.active_tokens -= live.placed_tokens
        self._work.ring()

    def _release_prefill(self, live: Live, placed: tuple[Member, Member | None]) -> None:
        prefill = placed[1]
        if prefill is not None:
            prefill.num_active -= 1
            prefill.active_tokens -= live.num_missing_tokens
            if live.number in self._placed:
                self._placed[live.number] = (placed[0], None)

    # --------------------------------------------------------------------------------------------- what the workers say

    def _joined(self, member: Member) -> None:
        if member.role is Role.DECODE and self._group is not None and member.worker_id not in self._links:
            link = DecodeLink(self._dialer, member, self, self._silence_s)
            self._links[member.worker_id] = (link, self._group.create_task(link.run()))

    def _lost(self, member: Member) -> None:
        if member.role is Role.DECODE and member.worker_id in self._links:
            _, task = self._links.pop(member.worker_id)
            task.cancel()
            self.detached(member, "it is no longer a member")

    def attached(self, member: Member) -> None:
        member.is_attached = True
        self._work.ring()

    def detached(self, member: Member, reason: str) -> None:
        member.is_attached = False
        for live in [live for live in self._lives.values() if self._is_on(live, member)]:
            live.num_losses += 1
            self.counters["worker_losses"] += 1
            if live.num_losses >= MAX_LOSSES:
                message = f"{live.num_losses} decode workers were lost under this request; the last: {reason}"
                self._end(live, LiveState.FAILED, EngineFailure(message))
            else:
                self._queue_again(live)
        self._work.ring()

    def _is_on(self, live: Live, member: Member) -> bool:
        placed = self._placed.get(live.number)
        return placed is not None and placed[0] is member

    def output(self, member: Member, output: StepOutput) -> None:
        for report in output.starts:
            live = self._current(member, report.number, report.attempt)
            if live is not None:
                live.started(report)
                self._release_prefill(live, self._placed[live.number])
        for scored in output.prompt_logprobs:
            self._take_prompt_logprobs(member, scored)
        for new in output.tokens:
            self._take_tokens(member, new)
        for end in output.ends:
            if end.number in self._lives:  # else it ended with its last token, in this message or before
                self._take_end(member, end)

    def _current(self, member: Member, number: int, attempt: int) -> Live | None:
        live = self._lives.get(number)
        if live is None or live.journal.attempt != attempt or not self._is_on(live, member):
            self.counters["late_messages"] += 1
            return None
        return live

    def _take_tokens(self, member: Member, new: NewTokens) -> None:
        live = self._current(member, new.number, new.attempt)
        if live is None:
            return
        was_open = [choice.choice for choice in live.journal.choices if choice.finish is None]
        acceptance = live.journal.accept(new)
        if acceptance is Acceptance.GAP:
            self._skipped(member, live)
            return
        live.instants_s["last_token"] = self._now() - live.accepted_s
        live.changed.ring()
        if live.journal.is_done:
            self._end(live, LiveState.FINISHED)
        elif new.choice in was_open and live.journal.choices[new.choice].finish is not None:
            self._cancel_on_worker(live, (new.choice,))

    def _take_prompt_logprobs(self, member: Member, new: PromptLogprobs) -> None:
        live = self._current(member, new.number, new.attempt)
        if live is not None and live.journal.accept_prompt(new) is Acceptance.GAP:
            self._skipped(member, live)

    def _skipped(self, member: Member, live: Live) -> None:
        logger.error("%s skipped an index of request %d: placing it again", member.worker_id, live.number)
        self._cancel_on_worker(live)
        self._queue_again(live)

    def _take_end(self, member: Member, end: ChoiceEnd) -> None:
        live = self._current(member, end.number, end.attempt)
        if live is None:
            return
        finished = end.choice < len(live.journal.choices) and live.journal.choices[end.choice].finish is not None
        if finished:
            return
        if end.reason is ChoiceEndReason.LENGTH and not live.request.sampling.max_tokens:
            live.journal.choices[min(end.choice, len(live.journal.choices) - 1)].end_without_tokens()
            live.changed.ring()
            if live.journal.is_done:
                self._end(live, LiveState.FINISHED)
        elif end.reason is ChoiceEndReason.UNPLACED:
            live.failed_worker_ids |= set(end.failed_source_ids)
            self.counters["unplaced"] += 1
            self._cancel_on_worker(live)
            self._queue_again(live)
        else:
            self._end(live, LiveState.FAILED, _error_of(end))
            self._cancel_on(member, live)

    def _queue_again(self, live: Live) -> None:
        self._release(live)
        if live.journal.attempt >= MAX_ATTEMPTS:
            self._end(live, LiveState.FAILED, EngineFailure(f"given up after {MAX_ATTEMPTS} placements"))
            return
        self.counters["continuations"] += 1
        live.move(LiveState.QUEUED)
        live.queued_s = self._now()
        self._queue.append(live)
        self._work.ring()

    # --------------------------------------------------------------------------------------------------------- endings

    def _end(self, live: Live, state: LiveState, error: KvferryError | None = None) -> None:
        if live in self._queue:
            self._queue.remove(live)
        if state is LiveState.CANCELLED or (state is LiveState.FINISHED and live.request.stops):
            self._cancel_on_worker(live)  # else the worker has ended it by itself
        self._release(live)
        live.error = error
        live.instants_s["closed"] = self._now() - live.accepted_s
        del self._lives[live.number]
        self.counters[state.value] += 1
        live.move(state)
        self.observe(live)

    def _cancel_on_worker(self, live: Live, choices: tuple[int, ...] = ()) -> None:
        placed = self._placed.get(live.number)
        if placed is not None:
            self._cancel_on(placed[0], live, choices)

    def _cancel_on(self, member: Member, live: Live, choices: tuple[int, ...] = ()) -> None:
        link = self._links.get(member.worker_id)
        if link is not None:
            link[0].send(RequestCancel(live.number, live.journal.attempt, choices))

    def _deadline_s(self, live: Live) -> float:
        return live.accepted_s + (live.request.timeout_s or self.limits.request_timeout_s)

    def _queue_deadline_s(self, live: Live) -> float:
        """One that ran before waits as long as it may live: it was accepted."""
        if live.journal.attempt:
            return self._deadline_s(live)
        return min(live.queued_s + self.limits.queue_timeout_s, self._deadline_s(live))

    def _expire(self, now: float) -> None:
        for live in list(self._lives.values()):
            if now >= self._deadline_s(live):
                limit = live.request.timeout_s or self.limits.request_timeout_s
                message = f"the request's time limit of {limit:g} s ran out while it was {self.phase(live)}"
                self._cancel_on_worker(live)
                self._end(live, LiveState.FAILED, DeadlineExceeded(message))
            elif live.state is LiveState.QUEUED and now >= self._queue_deadline_s(live):
                self._end(live, LiveState.FAILED, self._why_waiting())

    def _why_waiting(self) -> KvferryError:
        waited = f"waited {self.limits.queue_timeout_s:g} s"
        if not self.is_ready:
            return NoWorker(f"{waited}, and no decode worker became ready: the decode pool is empty", retry_after_s=5)
        return Overloaded(f"{waited} for room in the decode pool: it is full; try again later", retry_after_s=5)

    def _next_timeout(self) -> float | None:
        deadlines = [
            self._queue_deadline_s(live) if live.state is LiveState.QUEUED else self._deadline_s(live)
            for live in self._lives.values()
        ]
        return max(min(deadlines) - self._now(), 0.001) if deadlines else None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _error_of(end: ChoiceEnd) -> KvferryError:
    if end.reason is ChoiceEndReason.DEADLINE:
        return DeadlineExceeded(end.detail)
    if end.reason in (ChoiceEndReason.TOO_LARGE, ChoiceEndReason.INVALID):
        return InvalidRequest(f"the decode worker refused the request: {end.detail}")
    return EngineFailure(f"the decode worker ended the request with {end.reason.value}: {end.detail or 'no detail'}")

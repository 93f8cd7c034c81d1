"""The dispatcher: takes requests, places them, hears the workers, and sees to it that each request ends exactly once.

It owns every live request and the links to the decode workers. Placing is late: a request waits here until a decode worker can take
it. A lost worker's requests are placed again, their emitted tokens as part of the prompt. All of it runs on the event loop and
never waits for a client. Where a request goes is placer.py's to say, who waits and who is refused admission.py's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    WorkerDescription,
)
from kvferry.streams import Dialer
from kvferry.text.model_text import ModelText
from kvferry.turns import start_in_order
from router.admission import Admission, FairQueue, QueueLimits
from router.apart import Apart
from router.deadlines import Deadlines
from router.decode_link import SILENCE_S, DecodeLink
from router.idempotency import LiveKeys
from router.journal import Acceptance
from router.live import Live, LiveState
from router.losses import Losses
from router.members import Member, Members
from router.placement import Placement
from router.placer import Placer, PlacingRules, num_kv_tokens
from router.refused import Refused
from router.request import GenerationRequest
from router.retry_budget import RetryBudget
from router.suspicion import VERDICT_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    queue: QueueLimits = field(default_factory=QueueLimits)
    queue_timeout_s: float = 30.0
    """The longest wait of a request that nobody has taken yet."""
    request_timeout_s: float = 600.0
    """The longest life of a request that names no time limit of its own."""
    reader_timeout_s: float = 60.0
    """A streamed answer that has ended is kept for so long for a reader that takes nothing of it."""
    placing: PlacingRules = field(default_factory=PlacingRules)


class Dispatcher:
    def __init__(
        self,
        text: ModelText,
        members: Members,
        dialer: Dialer,
        limits: DispatchLimits,
        silence_s: float = SILENCE_S,
    ):
        self._text, self.members = text, members
        self.placer = Placer(members, limits.placing)
        self._dialer, self.limits, self._silence_s = dialer, limits, silence_s
        self._lives: dict[int, Live] = {}
        self._queue = FairQueue()
        self._admission = Admission(self._queue, limits.queue, self._short_pool)
        self._apart, self._deadlines = Apart(), Deadlines()
        self._losses = Losses(silence_s)
        self._retries, self._refused, self._keys = RetryBudget(), Refused(), LiveKeys()
        self._links: dict[str, tuple[DecodeLink, asyncio.Task[None]]] = {}
        self._placed: dict[int, tuple[Member, Member | None]] = {}
        self._num_prefilling = 0
        """Of those, the ones for which a prefill worker computes."""
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
            self._group.create_task(self.members.tidy())
            for member in self.members:
                self._joined(member)
            while True:
                self._place_waiting()
                await self._work.wait(self._next_timeout())

    # -------------------------------------------------------------------------------------------------- for front doors

    def submit(self, request: GenerationRequest) -> Live:
        """Accepts a request, or raises InvalidRequest, Overloaded or NoWorker at once."""
        self._refuse_what_cannot_run(request)
        now = self._now()
        deadline_s = now + (request.timeout_s or self.limits.request_timeout_s)
        live = Live(self._next_number + 1, request, self._text, now, deadline_s)
        max_wait_s = min(self.limits.queue_timeout_s, self.placer.max_wait_s(live), deadline_s - now)
        refusal = self._admission.refusal(live, now, max_wait_s)
        if refusal is not None:
            self.counters["rejected_overloaded"] += 1
            raise refusal
        self._next_number += 1
        self._lives[live.number] = live
        self.counters["accepted"] += 1
        if self._place_at_once(live, now):
            self._deadlines.add(deadline_s, live.number, self._lives)
        else:
            self._wait_in_queue(live, now)
            self._place_waiting()
        if live in self._queue or self._deadlines.is_first(live.number):
            self._work.ring()  # `run` sleeps until another one's deadline, or for ever
        return live

    def submit_all(self, requests: Sequence[GenerationRequest], key: str | None = None) -> tuple[Live, ...]:
        """All or none. With an idempotency key that is live here, its lives, which one more reads now."""
        if key is not None:
            found = self._keys.find(key, requests)
            if found is not None:
                self.counters["joined"] += 1
                for live in found:
                    live.num_readers += 1
                return found
        lives: list[Live] = []
        try:
            for request in requests:
                lives.append(self.submit(request))
        except BaseException:
            for live in lives:
                self.cancel(live)
            raise
        if key is not None:
            self._keys.remember(key, requests, lives)
        return tuple(lives)

    def leave(self, live: Live) -> None:
        """One of its readers does not read any more; with the last one it ends. Once for each reader."""
        live.num_readers -= 1
        if live.num_readers <= 0:
            self.cancel(live)

    def given_up(self, live: Live) -> None:
        """It has ended, and a reader took nothing of it for too long."""
        self.counters["readers_given_up"] += 1
        logger.warning("nothing of the finished answer to request %d was read for long: dropped", live.number)

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
    def num_queued_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def is_ready(self) -> bool:
        decode = self.members.of(Role.DECODE)
        return any(member.is_attached and not member.progress.is_draining for member in decode)

    @property
    def is_degraded(self) -> bool:
        return self.is_ready and not any(member.is_attached for member in self.members.of(Role.PREFILL))

    @property
    def max_kv_tokens(self) -> int | None:
        """Tokens of one choice that this deployment can hold; None while there is no decode worker."""
        return self.members.max_kv_tokens

    def _refuse_what_cannot_run(self, request: GenerationRequest) -> None:
        if self._is_closing:
            raise NoWorker("the router is shutting down; try again", retry_after_s=5)
        limit = self.max_kv_tokens
        if limit is None or not self.is_ready:
            self.counters["rejected_no_worker"] += 1
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
        left_s = self._refused.left_s(request, self._now())
        if left_s:
            self.counters["rejected_harmful"] += 1
            raise InvalidRequest(
                f"this request has killed or hung the decode worker that it ran on by itself: it is refused for {left_s:.0f} s more; "
                "change the prompt or the parameters",
                code="request_refused",
            )

    # -------------------------------------------------------------------------------------------------------- placing

    def _place_waiting(self) -> None:
        now = self._now()
        self._expire(now)
        if not self._apart.is_idle:
            for live in self._apart:
                self._try_apart(live, now)
            self._apart.reserve(self.members.of(Role.DECODE), now)
        if not len(self._queue):
            return
        limit = self.placer.most_kv_tokens()  # what is larger waits for another worker, and holds up nobody
        waiting = (live for live in self._queue.in_order() if num_kv_tokens(live) <= limit)
        start_in_order(waiting, lambda live: self._try_place(live, now))

    def _place_at_once(self, live: Live, now: float) -> bool:
        """One that is new, where nobody waits: what the queue would do with it, without the queue."""
        if len(self._queue) or not self._apart.is_idle or now >= live.deadline_s:
            return False
        placement = self.placer.place(live, now)
        if placement is None:
            return False
        self._open(live, placement, now)
        self._queue.pass_by(live)
        self._admission.placed(live, now, has_queue=False)
        return True

    def _wait_in_queue(self, live: Live, now: float) -> None:
        live.queued_s = now
        if live.suspicion.is_open:
            self._apart.push(live)
            self._deadlines.add(now + VERDICT_S, live.number, self._lives)
        else:
            self._queue.push(live)
        self._deadlines.add(self._queue_deadline_s(live), live.number, self._lives)
        self._deadlines.add(live.deadline_s, live.number, self._lives)

    def _try_place(self, live: Live, now: float) -> bool:
        placement = self.placer.place(live, now)
        if placement is None:
            return False
        self._queue.remove(live)
        if not live.journal.attempt:
            self._queue.charge(live)
        self._admission.placed(live, now, len(self._queue) > 0)
        self._open(live, placement, now)
        return True

    def _try_apart(self, live: Live, now: float) -> None:
        """One under whom a worker died: it may have to wait for the cause, to be alone, or to be given up."""
        if live.suspicion.waits_for_verdict(now):
            return  # `learn` or the verdict's time wakes
        if live.suspicion.is_guilty(now):
            self._refused.add(live.request, now)
            did = "hung" if live.suspicion.has_hung_alone else "killed"
            message = (
                f"the request {did} the decode worker that it ran on ({live.suspicion.last}); it is not tried again"
            )
            self._end(live, LiveState.FAILED, EngineFailure(message))
            return
        placement = self.placer.place(live, now)
        if placement is not None:
            self._apart.discard(live)
            self._open(live, placement, now)

    def _open(self, live: Live, placement: Placement, now: float) -> None:
        decode = self.members.at_row(placement.decode_row)
        prefill = None
        if placement.source_rows and not placement.is_local:
            source = self.members.at_row(placement.source_rows[0])
            prefill = source if source.role is Role.PREFILL else None  # a decode worker only hands out what it has
        attempt = live.journal.next_attempt()
        starts, num_tokens, request = live.journal.starts(), live.longest_tokens, live.request
        live.source_ids = tuple(self.members.at_row(row).worker_id for row in placement.source_rows)
        # First of all, it goes on its way; none of what follows waits, so that whoever looks next finds all of it done.
        self._links[decode.worker_id][0].send(
            RequestOpen(
                number=live.number,
                attempt=attempt,
                prompt_tokens=request.prompt_tokens,
                choices=starts,
                sampling=live.sampling,
                salt=request.salt,
                sources=self._addresses(placement.source_rows),
                holders=self._addresses(placement.holder_rows),
                priority=request.priority,
                time_left_s=live.deadline_s - now,
                local_tokens=placement.local_tokens,
            )
        )
        decode.num_active += len(starts)
        decode.active_tokens += num_tokens * len(starts)
        decode.num_placed += 1
        live.runs_apart = live.suspicion.is_suspect(now)
        if live.runs_apart:
            decode.is_alone = True
            self._apart.took(decode)
        if prefill is not None:
            self._num_prefilling += 1
            prefill.num_active += 1
            prefill.num_placed += 1
            self.members.view.will_compute(prefill.row, live.number, placement.num_missing_tokens, now)
        elif placement.is_local:
            self.members.view.will_compute(decode.row, live.number, placement.num_missing_tokens, now)
        live.decode_id = decode.worker_id
        self._remember_worker(live, decode)
        live.has_begun = False  # its worker says when it has a part in a step
        live.placed_choices, live.placed_tokens = len(starts), num_tokens * len(starts)
        live.placed(now)
        live.move(LiveState.PLACED)
        self._placed[live.number] = (decode, prefill)
        self._remember_why(live, placement, now)

    def _remember_worker(self, live: Live, decode: Member) -> None:
        if not live.is_bit_equal_on(decode.description) and not live.has_changed_numerics:
            live.has_changed_numerics = True
            self.counters["numerics_changed"] += 1
            logger.warning("request %d goes on at %s, whose numerics differ", live.number, decode.worker_id)
        if not live.has_yielded:
            live.decodes_on = decode.description

    def _remember_why(self, live: Live, placement: Placement, now: float) -> None:
        self.counters["placed_local" if placement.is_local else "placed_fetching"] += 1
        self.counters["placed_beyond_slo"] += not placement.keeps_slos
        self.placer.expect(live, placement, now)
        if live.journal.attempt == 1:
            live.predicted_ttft_s = placement.prediction.ttft_s
            if live.request.explains:
                live.explanation = self.placer.explanation(placement)

    def _addresses(self, rows: tuple[int, ...]) -> tuple[Source, ...]:
        members = [self.members.at_row(row) for row in rows]
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
        if live.runs_apart:
            live.runs_apart = decode.is_alone = False
        self.members.view.has_computed(decode.row, live.number)
        if len(self._queue) or len(self._apart):
            self._work.ring()

    def _release_prefill(self, live: Live, placed: tuple[Member, Member | None]) -> None:
        prefill = placed[1]
        if prefill is not None:
            self._num_prefilling -= 1
            prefill.num_active -= 1
            self.members.view.has_computed(prefill.row, live.number)
            if live.number in self._placed:
                self._placed[live.number] = (placed[0], None)

    # --------------------------------------------------------------------------------------------- what the workers say

    def _joined(self, member: Member) -> None:
        for live in self.lives:
            live.suspicion.learn(member.description)
            if not live.fits(member.description):
                self._end(live, LiveState.FAILED, _other_model(live, member.description))
        if member.role is Role.DECODE and self._group is not None and member.worker_id not in self._links:
            link = DecodeLink(self._dialer, member, self, self.members.life, self._silence_s)
            self._links[member.worker_id] = (link, self._group.create_task(link.run()))

    def _lost(self, member: Member) -> None:
        if member.role is Role.DECODE and member.worker_id in self._links:
            _, task = self._links.pop(member.worker_id)
            task.cancel()
            self.detached(member, "it is no longer a member", may_have_died=not member.fell_silent)

    def attached(self, member: Member) -> None:
        member.is_attached = True
        for live in self._lives.values():
            live.suspicion.learn(member.description)
        self._work.ring()

    def detached(self, member: Member, reason: str, may_have_died: bool) -> None:
        """The stream to a decode worker has ended, or it is silent: what ran there goes on elsewhere."""
        was_attached, member.is_attached = member.is_attached, False
        lost = [live for live in self._lives.values() if self._is_on(live, member)]
        if was_attached and lost:
            logger.warning("%d requests go on elsewhere than on %s: %s", len(lost), member.worker_id, reason)
        now, num_others = self._now(), int(self.members.view.ints["foreign_active"][member.row])
        self._losses.lost(member, lost, may_have_died, num_others, now)
        for live in lost:
            self.counters["worker_losses"] += 1
            self._queue_again(live, f"its decode worker was lost: {reason}", is_loss=True)
        self._work.ring()

    def _is_on(self, live: Live, member: Member) -> bool:
        placed = self._placed.get(live.number)
        return placed is not None and placed[0] is member

    def output(self, member: Member, output: StepOutput) -> None:
        for numbers, takes_part in ((output.begun, True), (output.paused, False)):
            for number in numbers:
                live = self._lives.get(number)
                if live is not None and self._is_on(live, member):
                    live.has_begun = takes_part
        for report in output.starts:
            live = self._current(member, report.number, report.attempt)
            if live is not None:
                live.started(report)
                self._release_prefill(live, self._placed[live.number])
                self.members.view.has_computed(member.row, live.number)
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
        was_open = new.choice < len(live.journal.choices) and live.journal.choices[new.choice].finish is None
        acceptance = live.journal.accept(new)
        if acceptance is Acceptance.GAP:
            self._skipped(member, live)
            return
        if live.suspicion.survived() and live.runs_apart:
            live.runs_apart = member.is_alone = False
        live.instants_s["last_token"] = self._now() - live.accepted_s
        live.changed.ring()
        if live.journal.is_done:
            self._end(live, LiveState.FINISHED)
        elif was_open and live.journal.choices[new.choice].finish is not None:
            self._cancel_on_worker(live, (new.choice,))

    def _take_prompt_logprobs(self, member: Member, new: PromptLogprobs) -> None:
        live = self._current(member, new.number, new.attempt)
        if live is not None and live.journal.accept_prompt(new) is Acceptance.GAP:
            self._skipped(member, live)

    def _skipped(self, member: Member, live: Live) -> None:
        logger.error("%s skipped an index of request %d: placing it again", member.worker_id, live.number)
        self._cancel_on_worker(live)
        self._queue_again(live, f"{member.worker_id} skipped an index")

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
        elif end.reason in (ChoiceEndReason.STOP, ChoiceEndReason.LENGTH):  # and its last tokens have not come
            self._skipped(member, live)
        elif end.reason is ChoiceEndReason.UNPLACED:
            live.failed_worker_ids |= set(end.failed_source_ids)
            self.counters["unplaced"] += 1
            self._cancel_on_worker(live)
            self._queue_again(live, end.detail)
        else:
            self._end(live, LiveState.FAILED, _error_of(end))
            self._cancel_on(member, live)

    def _queue_again(self, live: Live, why: str, is_loss: bool = False) -> None:
        """A worker's end is no reason to fail what it had; placements that fail otherwise, before a first token, have a budget."""
        self._release(live)
        now = self._now()
        if not is_loss and not live.journal.num_tokens and not self._retries.take(now):
            self.counters["retries_refused"] += 1
            message = f"too many placements fail before a first token; the last: {why}; try again later"
            self._end(live, LiveState.FAILED, NoWorker(message, retry_after_s=5))
            return
        self.counters["continuations"] += 1
        live.move(LiveState.QUEUED)
        self._wait_in_queue(live, now)
        self._work.ring()

    # --------------------------------------------------------------------------------------------------------- endings

    def _end(self, live: Live, state: LiveState, error: KvferryError | None = None) -> None:
        if live in self._queue:
            self._queue.remove(live)
        self._apart.discard(live)
        if state is LiveState.CANCELLED or (state is LiveState.FINISHED and live.request.stops):
            self._cancel_on_worker(live)  # else the worker has ended it by itself
        self._release(live)
        self._queue.settle(live)
        self._keys.ended(live)
        if state is LiveState.FINISHED:
            self._retries.succeeded(self._now())
            self.placer.finished(live)
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

    def _queue_deadline_s(self, live: Live) -> float:
        """One that ran before waits as long as it may live: it was accepted."""
        if live.journal.attempt:
            return live.deadline_s
        return min(live.queued_s + self.limits.queue_timeout_s, live.deadline_s)

    def _expire(self, now: float) -> None:
        for number in self._deadlines.due(now):
            live = self._lives.get(number)
            if live is None:
                continue
            if now >= live.deadline_s:
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
        if self._short_pool() == "prefill":
            message = f"{waited} for the prefill pool: most of what decode workers took waits for it; try again later"
            return Overloaded(message, retry_after_s=5)
        return Overloaded(f"{waited} for room in the decode pool: it is full; try again later", retry_after_s=5)

    def _short_pool(self) -> str:
        """Decode workers are full of requests that wait for prefill, and do so for longer than they will decode; or of others."""
        is_prefill = 2 * self._num_prefilling > len(self._placed) and self.placer.is_prefill_behind(self._now())
        return "prefill" if is_prefill else "decode"

    def _next_timeout(self) -> float | None:
        next_s = self._deadlines.next_s(self._lives)
        return None if next_s is None else max(next_s - self._now(), 0.001)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _other_model(live: Live, worker: WorkerDescription) -> KvferryError:
    """All workers of its model have left, and another one's join."""
    began = live.decodes_on
    assert began is not None
    return NoWorker(
        f"the answer began with model {began.model_id} ({began.fidelity}), whose workers have all left; {worker.worker_id} has "
        f"{worker.model_id} ({worker.fidelity}): send the request again",
        retry_after_s=2,
    )


def _error_of(end: ChoiceEnd) -> KvferryError:
    if end.reason is ChoiceEndReason.DEADLINE:
        return DeadlineExceeded(end.detail)
    if end.reason in (ChoiceEndReason.TOO_LARGE, ChoiceEndReason.INVALID):
        return InvalidRequest(f"the decode worker refused the request: {end.detail}")
    return EngineFailure(f"the decode worker ended the request with {end.reason.value}: {end.detail or 'no detail'}")

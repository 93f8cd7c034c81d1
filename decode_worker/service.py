"""The decode worker's service: requests in from routers, tokens out, one message a step for each router.

It owns what the scheduler must not know: streams, fetch tasks, clocks and reports. When a router's stream ends, everything that it
opened is aborted between two steps. Fetches run in the service's own task group and end with the choice that wanted them.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

from decode_worker.choice import Choice
from decode_worker.fetches import FetchOrder
from decode_worker.scheduler import Begun, DecodeScheduler, Ended, Paused, Scored, Token
from kvferry.bell import Bell
from kvferry.engine.sequence import Sequence
from kvferry.errors import FetchFailed, InvalidRequest
from kvferry.kv.block_id import chain_root
from kvferry.kv.pool import BlockPool
from kvferry.messages import (
    PROTOCOL_VERSION,
    Beat,
    ChoiceEnd,
    ChoiceEndReason,
    DecodeMessage,
    FetchFailureKind,
    FetchOpen,
    NewTokens,
    PromptLogprobs,
    RequestCancel,
    RequestOpen,
    RouterMessage,
    StartReport,
    StepOutput,
)
from kvferry.racing import until_first
from kvferry.streams import Stream, StreamEnded
from kvferry.worker.counters import Counters
from kvferry.worker.identity import WorkerIdentity
from kvferry.worker.loop import EngineLoop
from kvferry.worker.reader import BlockReader, FetchReport

BEAT_INTERVAL_S = 1.0
SILENCE_S = 3.0
RETRYABLE = {FetchFailureKind.MISSING.value}
"""Failures after which the same source is worth another try, if blocks did arrive."""


@dataclass(slots=True)
class _Request:
    """One attempt of one request, as its router opened it."""

    session: "_Session"
    opening: RequestOpen
    opened_s: float
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    reports: list[FetchReport] = field(default_factory=list[FetchReport])
    has_started: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one router has on this worker."""

    num_sequences: int = 0
    kv_tokens: int = 0


class _Session:
    """One router's stream."""

    def __init__(self, stream: Stream[DecodeMessage, RouterMessage]):
        self.stream = stream
        self.router_life = ""
        self.takes_part: dict[int, bool] = {}
        """Requests that came into the steps, or are left out of them, since the router heard of it."""
        self.requests: dict[int, _Request] = {}
        self.is_open = True
        self.tokens: list[NewTokens] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.starts: list[StartReport] = []
        self.ends: list[ChoiceEnd] = []
        self.has_news = Bell()

    def take_output(self, step: int) -> StepOutput | None:
        if not (self.tokens or self.prompt_logprobs or self.ends or self.takes_part):
            return None
        output = StepOutput(
            step,
            tuple(self.tokens),
            tuple(self.prompt_logprobs),
            tuple(self.starts),
            tuple(self.ends),
            tuple(number for number, takes_part in self.takes_part.items() if takes_part),
            tuple(number for number, takes_part in self.takes_part.items() if not takes_part),
        )
        self.tokens, self.prompt_logprobs, self.starts, self.ends, self.takes_part = [], [], [], [], {}
        return output


class DecodeService:
    """Serves `attach` streams. `run` must run beside the engine loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: DecodeScheduler,
        loop: EngineLoop,
        pool: BlockPool,
        reader: BlockReader,
        counters: Counters,
        silence_s: float = SILENCE_S,
    ):
        self._identity, self._scheduler, self._loop = identity, scheduler, loop
        self._pool, self._reader, self._counters, self._silence_s = pool, reader, counters, silence_s
        self._fetches: dict[FetchOrder, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._sessions: list[_Session] = []
        loop.emit = self._emit

    async def run(self) -> None:
        """Keeps the task group of the fetches; until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            await asyncio.get_running_loop().create_future()

    # --------------------------------------------------------------------------------------------------------- streams

    async def serve_attach(self, stream: Stream[DecodeMessage, RouterMessage]) -> None:
        """Until the router ends the stream or is silent for too long."""
        session = _Session(stream)
        self._sessions.append(session)
        try:
            await until_first(self._send(session), self._receive(session))
        except (StreamEnded, TimeoutError):
            pass  # whatever the reason: what this router opened ends with its stream
        finally:
            session.is_open = False
            self._sessions.remove(session)
            self._loop.post(lambda: self._abort_session(session))

    async def _receive(self, session: _Session) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                message = await session.stream.receive()
            if isinstance(message, RequestOpen):
                arrived_s = self._loop.now()
                self._loop.post(lambda opening=message, at=arrived_s: self._open(session, opening, at))
            elif isinstance(message, RequestCancel):
                self._loop.post(lambda cancel=message: self._cancel(session, cancel))
            elif message.protocol_version != PROTOCOL_VERSION:
                raise InvalidRequest(
                    f"protocol_version: this worker speaks {PROTOCOL_VERSION}, the router {message.protocol_version}",
                    "protocol_version",
                )
            else:
                session.router_life = message.router_life

    async def _send(self, session: _Session) -> None:
        next_beat_s = self._loop.now()
        while True:
            output = session.take_output(self._loop.step)
            if output is not None:
                await self._send_output(session, output)
            elif (left_s := next_beat_s - self._loop.now()) > 0:
                await session.has_news.wait(left_s)
            else:
                next_beat_s = self._loop.now() + BEAT_INTERVAL_S
                if self._loop.is_advancing:
                    await session.stream.send(Beat(self._loop.step))

    async def _send_output(self, session: _Session, output: StepOutput) -> None:
        try:
            await session.stream.send(output)
        except (StreamEnded, asyncio.CancelledError):
            self._counters.add("late_tokens", len(output.tokens))
            raise

    def share_of(self, router_life: str) -> Share:
        """What the router of that life has here now."""
        sessions = [session for session in self._sessions if session.router_life == router_life]
        choices = [c for session in sessions for request in session.requests.values() for c in request.choices.values()]
        return Share(len(choices), sum(len(choice.sequence.tokens) for choice in choices))

    # ------------------------------------------------------------------------------------------ requests, between steps

    def _open(self, session: _Session, opening: RequestOpen, arrived_s: float) -> None:
        if not session.is_open:
            return
        fault = self._fault_of(opening)
        if fault:
            session.ends += [
                ChoiceEnd(opening.number, opening.attempt, start.choice, ChoiceEndReason.INVALID, fault)
                for start in opening.choices
            ]
            session.has_news.ring()
            return
        self._counters.add("requests_opened")
        request = _Request(session, opening, arrived_s)
        session.requests[opening.number] = request
        root = chain_root(self._identity.model_id, self._identity.fidelity, opening.salt)
        deadline_s = None if opening.time_left_s is None else arrived_s + opening.time_left_s
        first: Choice | None = None
        for start in opening.choices:
            tokens = [*opening.prompt_tokens, *start.emitted_tokens]
            identity, number = self._identity, self._scheduler.next_sequence_id()
            sequence = Sequence(number, tokens, root, identity.block_size, self._pool, identity.window)
            choice = Choice(
                request,
                start.choice,
                sequence,
                len(opening.prompt_tokens),
                opening.sampling,
                opening.sources,
                opening.priority,
                deadline_s,
                after=first,
                local_tokens=opening.local_tokens,
            )
            first = first or choice
            request.choices[start.choice] = choice
            self._scheduler.admit(choice)

    def _fault_of(self, opening: RequestOpen) -> str:
        vocabulary, sampling = self._identity.vocabulary_size, opening.sampling
        tokens = [*opening.prompt_tokens, *(t for start in opening.choices for t in start.emitted_tokens)]
        if not opening.prompt_tokens or not opening.choices:
            return "prompt_tokens and choices must not be empty"
        if max(tokens) >= vocabulary:
            return f"prompt_tokens: {max(tokens)} is not in the vocabulary of {vocabulary}"
        longest = max(len(start.emitted_tokens) for start in opening.choices) + len(opening.prompt_tokens)
        if longest > self._identity.context_tokens:
            return f"prompt_tokens: {longest} tokens, this worker's limit is {self._identity.context_tokens}"
        if len({start.choice for start in opening.choices}) != len(opening.choices):
            return "choices: a choice is named twice"
        if any(len(start.emitted_tokens) >= max(sampling.max_tokens, 1) for start in opening.choices):
            return "max_tokens: a choice has all of its tokens already"
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.repetition_penalty >= 0.01):
            return "temperature must not be negative, top_p must be in (0, 1], repetition_penalty at least 0.01"
        named = [*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
        if max(named, default=0) >= vocabulary:
            return f"stop_token_ids, logit_bias: {max(named)} is not in the vocabulary of {vocabulary}"
        return ""

    def _cancel(self, session: _Session, cancel: RequestCancel) -> None:
        request = session.requests.get(cancel.number)
        if request is None or request.opening.attempt != cancel.attempt:
            return
        for number in cancel.choices or tuple(request.choices):
            if number in request.choices:
                self._scheduler.abort(request.choices[number])

    def _abort_session(self, session: _Session) -> None:
        self._counters.add("late_tokens", len(session.tokens))
        for request in list(session.requests.values()):
            for choice in list(request.choices.values()):
                self._scheduler.abort(choice)

    # ------------------------------------------------------------------------------------------------------------ emit

    def _emit(self) -> bool:
        """After each step and drain: events to their sessions, fetches opened and dropped. True: a router must hear who takes part."""
        touched: dict[_Session, None] = {}
        is_urgent = False
        for event in self._scheduler.take_events():
            request = event.choice.key
            assert isinstance(request, _Request)
            if isinstance(event, Token):
                self._tell_token(request, event)
            elif isinstance(event, Begun | Paused):
                is_urgent = True
                takes_part = any(choice.is_in_step for choice in request.choices.values())
                request.session.takes_part[request.opening.number] = takes_part
            elif isinstance(event, Scored):
                number, attempt = request.opening.number, request.opening.attempt
                request.session.prompt_logprobs.append(PromptLogprobs(number, attempt, event.position, event.logprobs))
            else:
                self._tell_end(request, event)
            touched[request.session] = None
        for session in touched:
            session.has_news.ring()
        opened, dropped = self._scheduler.take_fetches()
        for order in dropped:
            task = self._fetches.pop(order, None)
            if task is not None:
                task.cancel()
        for order in opened:
            assert self._group is not None, "run() must run beside the loop"
            self._fetches[order] = self._group.create_task(self._fetch(order))
        return is_urgent

    def _tell_token(self, request: _Request, event: Token) -> None:
        session, opening = request.session, request.opening
        if not request.has_started:
            request.has_started = True
            session.starts.append(self._start_report(request, event.choice))
        if not session.is_open:
            self._counters.add("late_tokens")
            return
        logprobs = () if event.logprobs is None else (event.logprobs,)
        session.tokens.append(
            NewTokens(opening.number, opening.attempt, event.choice.choice, event.index, (event.token,), logprobs)
        )

    def _tell_end(self, request: _Request, event: Ended) -> None:
        session, opening, choice = request.session, request.opening, event.choice
        del request.choices[choice.choice]
        if not request.choices and session.requests.get(opening.number) is request:
            del session.requests[opening.number]
        if event.reason is ChoiceEndReason.LENGTH and not request.has_started:  # without a token to tell it with
            request.has_started = True
            session.starts.append(self._start_report(request, choice))
        failed = tuple(choice.failed_source_ids)
        session.ends.append(
            ChoiceEnd(opening.number, opening.attempt, choice.choice, event.reason, event.detail, failed)
        )

    def _start_report(self, request: _Request, choice: Choice) -> StartReport:
        def since(instant: float | None) -> float | None:
            return None if instant is None else instant - request.opened_s

        reports, size = request.reports, self._identity.block_size
        with_blocks = [report for report in reports if report.num_blocks]
        num_blocks = sum(report.num_blocks for report in with_blocks)
        num_cached = sum(min(report.num_source_cached_blocks, report.num_blocks) for report in with_blocks)
        return StartReport(
            request.opening.number,
            request.opening.attempt,
            fetch_opened_s=since(reports[0].opened_s) if reports else None,
            first_block_s=since(with_blocks[0].first_block_s) if with_blocks else None,
            last_block_s=since(with_blocks[-1].last_block_s) if with_blocks else None,
            tail_planned_s=since(choice.tail_planned_s),
            first_token_s=since(self._loop.now()),
            num_local_tokens=choice.num_local_tokens,
            num_fetched_tokens=num_blocks * size,
            num_source_cached_tokens=num_cached * size,
            num_computed_tokens=max(choice.num_start_tokens - choice.num_local_tokens - num_blocks * size, 0),
            num_fetched_blocks=num_blocks,
            fetched_bytes=sum(report.num_bytes for report in with_blocks),
            source_worker_id=with_blocks[-1].source.worker_id if with_blocks else "",
            road=with_blocks[-1].road if with_blocks else "",
        )

    # --------------------------------------------------------------------------------------------------------- fetching

    async def _fetch(self, order: FetchOrder) -> None:
        choice = order.choice
        request = choice.key
        assert isinstance(request, _Request)
        now = self._loop.now()
        opening = FetchOpen(
            model_id=self._identity.model_id,
            fidelity=self._identity.fidelity,
            tokens=tuple(choice.sequence.tokens[: order.num_blocks * self._identity.block_size]),
            salt=request.opening.salt,
            priority=choice.priority,
            time_left_s=None if choice.deadline_s is None else max(choice.deadline_s - now, 0.001),
            holders=request.opening.holders,
        )
        if order.is_warm:
            with contextlib.suppress(FetchFailed):  # whoever fetches from there will hear it again
                await self._reader.warm(order.source, opening)
            self._fetches.pop(order, None)
            return
        report = FetchReport(now, order.source)
        request.reports.append(report)
        error, is_source_bad = None, False
        try:
            await self._reader.fetch(choice.sequence, opening, report)
        except FetchFailed as failed:
            error, is_source_bad = failed.message, failed.kind not in RETRYABLE
        self._fetches.pop(order, None)
        self._loop.post(lambda: self._scheduler.fetch_ended(order, error, is_source_bad))

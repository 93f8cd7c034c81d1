"""Schedules: a whole deployment in virtual time, with tiny pools, faults and clients that leave, drawn from a seed.

Whatever happens, every accepted request that its client waits for has the reference's tokens or one error that the schedule explains,
nothing takes for ever, and afterwards nobody holds anything. Faults are what networks, processes and roads do: a fault of a road is a
road of its own, given to a worker in its settings.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import msgpack
import pytest

from decode_worker.worker import DecodeWorker
from kvferry.engine.engine import fake_engine
from kvferry.engine.fake import fake_answer
from kvferry.errors import DeadlineExceeded, EngineFailure, KvferryError, NoWorker, Overloaded
from kvferry.kv.frame import FIELDS
from kvferry.messages import (
    Beat,
    ChoiceEndReason,
    ChoiceStart,
    FetchAck,
    FetchEnd,
    FetchEndReason,
    FetchOpen,
    FetchProgress,
    Frame,
    RequestOpen,
    Sampling,
    Source,
    StepOutput,
)
from kvferry.streams import StreamEnded
from kvferry.worker.patience import FetchBudgets
from kvferry.worker.settings import WorkerSettings
from loadtest.virtual_time import run_virtual
from prefill_worker.worker import PrefillWorker
from router.live import Live, LiveState, wait_all
from tests.drawn import DrawnWorker, Fault
from tests.faulty_roads import ROADS, faulty, small_frames
from tests.in_process import BLOCK, Deployment, Node, VirtualExecutor, deployment, limits_of

NUM_SCHEDULES, NUM_IN_MAKE_TEST, SCHEDULES_PER_CASE = 1000, 400, 100
"""The others are run by `make soak`."""
LIMIT_S = 60.0
"""Of virtual time, for a request: an orphaned one waits so long."""
CALM_S = 20.0
"""Of virtual time, after its arrival and the last fault, for any other."""
OUT_OF_LUCK = "out of luck"


# ------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Ask:
    at_s: float
    prompt: tuple[int, ...]
    sampling: Sampling
    n: int
    salt: bytes
    timeout_s: float | None
    leaves_after_s: float | None

    @property
    def num_kv_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens - 1


@dataclass(frozen=True)
class Schedule:
    seed: int
    workers: dict[str, DrawnWorker]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    local_tokens: int
    roads: str

    @property
    def is_orphaned(self) -> bool:
        """No decode worker is left in the end."""
        lost = {fault.name for fault in self.faults if fault.kind == "kill"}
        return all(name in lost for name in self.workers if name.startswith("d"))

    @property
    def last_fault_s(self) -> float:
        return max((fault.at_s + fault.for_s * (fault.kind not in AT_ONCE) for fault in self.faults), default=0.0)

    def explains(self, ask: Ask, error: KvferryError | None) -> bool:
        if isinstance(error, DeadlineExceeded):
            return ask.timeout_s is not None or self.is_orphaned
        if isinstance(error, EngineFailure):
            return OUT_OF_LUCK in error.message and self.has("fail", "d")
        is_out_of_retries = isinstance(error, NoWorker) and "too many placements fail" in error.message
        return (is_out_of_retries and bool(self.faults)) or (isinstance(error, NoWorker) and self.is_orphaned)

    def has(self, kind: str, role: str = "") -> bool:
        return any(fault.kind == kind and fault.name.startswith(role) for fault in self.faults)


EACH_ITS_OWN = "each its own"
AT_ONCE = ("kill", "fail", "cut")
KINDS = (*AT_ONCE, "anew", "freeze", "stop", "hang")


@cache
def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    asks = tuple(_asks(rng))
    num_of = {"p": rng.choice((1, 1, 2, 3)), "d": rng.choice((1, 2, 3))}
    names = [f"{role}{k + 1}" for role in "pd" for k in range(num_of[role])]
    kind_of_roads = rng.choice((*ROADS, "auto", EACH_ITS_OWN))
    faults = tuple(_faults(rng, names))
    return Schedule(
        seed,
        {name: _worker(rng, name, asks, kind_of_roads) for name in names},
        asks,
        faults,
        local_tokens=rng.choice((0, 0, BLOCK, 3 * BLOCK)),
        roads=kind_of_roads,
    )


def _asks(rng: random.Random) -> Iterator[Ask]:
    """With common beginnings: of stems, and of whole turns of a chat. Some schedules are of short prompts with long answers."""
    is_growing = rng.random() < 0.15
    stem_blocks = 1 if is_growing else 6
    stems = [
        [rng.randrange(1000) for _ in range(rng.randrange(1, stem_blocks + 1) * BLOCK)]
        for _ in range(rng.randrange(1, 4))
    ]
    waves_s, span_s = rng.choice(((0.0,), (0.0, 3.0), (0.0, 3.0, 6.0))), rng.choice((0.0, 0.3, 3.0))
    num_asks = min(rng.randrange(4, 8 if is_growing else 15) for _ in range(2))
    for at_s in sorted(rng.choice(waves_s) + rng.random() * span_s for _ in range(num_asks)):
        stem = rng.choice(stems)
        length = rng.choice((1, 5, BLOCK, 2 * BLOCK, rng.randrange(1, 60)))
        prompt = tuple(stem[: rng.choice((len(stem), rng.randrange(len(stem))))])
        prompt += tuple(rng.randrange(1000) for _ in range(3 if is_growing else length))
        max_tokens = rng.randrange(72, 96) if is_growing else rng.choice((1, 2, 8, BLOCK + 1, rng.randrange(1, 30)))
        seed = rng.choice((0, 0, 5))
        sampling = Sampling(seed, max_tokens, float(bool(seed)))
        answer = expected(prompt, sampling)
        if rng.random() < 0.15:
            sampling = replace(sampling, stop_token_ids=(rng.choice(answer),))
        if rng.random() < 0.1:
            sampling = replace(sampling, num_logprobs=1, num_prompt_logprobs=rng.choice((None, 0)))
        if rng.random() < 0.7 and len(prompt) < 120 and not is_growing:
            stems.append([*prompt, *answer])
        yield Ask(
            at_s=at_s,
            prompt=prompt,
            sampling=sampling,
            n=rng.choice((1, 1, 2, 3)),
            salt=rng.choice((b"", b"", b"", b"another tenant")),
            timeout_s=rng.uniform(0.1, 6.0) if rng.random() < 0.1 else None,
            leaves_after_s=rng.choice((0.0, rng.uniform(0, 0.5), rng.uniform(0, 4))) if rng.random() < 0.2 else None,
        )


def _faults(rng: random.Random, names: list[str]) -> Iterator[Fault]:
    for _ in range(rng.choice((0, 1, 2, 2, 3, 4))):
        kind, at_s = rng.choice(KINDS), rng.choice((0.0, rng.uniform(0, 0.6), rng.uniform(0, 4)))
        name = rng.choice([*names, "router"] if kind in ("freeze", "cut") else names)
        for_s = rng.choice((0.05, 1.0, 2.5, 3.5, 8.0, 8.0, 35.0))
        yield Fault(at_s, kind, name, for_s)


def _worker(rng: random.Random, name: str, asks: tuple[Ask, ...], kind_of_roads: str) -> DrawnWorker:
    """Of a pool that just holds the largest request, or two; prefill workers may have too little for some."""
    largest = -(-max(ask.num_kv_tokens for ask in asks) // BLOCK)
    at_least = largest if name.startswith("d") else max(largest // 2, 1)
    return DrawnWorker(
        num_slots=at_least + rng.choice((0, 0, 1, *[largest // 2] * 4, largest, largest + 4)),
        max_step_tokens=rng.choice((BLOCK, 64, 2048)),
        max_local_tokens=rng.choice((0, 32, 512)),
        max_sequences=rng.choice((2, 4, 64)),
        roads=rng.choice((*ROADS, "auto")) if kind_of_roads == EACH_ITS_OWN else kind_of_roads,
        frame_blocks=rng.choice((1, 2, 4, 1024)),
        fault_of_roads=rng.choice(("", "", "", "", "", "", "slow", "damage", "break")),
    )


@cache
def expected(prompt: tuple[int, ...], sampling: Sampling, choice: int = 0) -> list[int]:
    return fake_answer(prompt, sampling, choice=choice)


# --------------------------------------------------------------------------------------------------- carrying it out


def join(d: Deployment, name: str, life: int = 1, *, num_slots: int, **settings: Any) -> Node:
    """As `Deployment.start`, for a worker that lives more than once."""
    engine = fake_engine(num_slots, BLOCK)
    executor = VirtualExecutor(engine.runner)
    kind = PrefillWorker if name.startswith("p") else DecodeWorker
    worker = kind(engine, executor, d.network, WorkerSettings(name, name, f"{name}-{life}", ("router",), **settings))
    d.network.listen(name, worker)
    d.nodes[name] = Node(worker, executor, d.group.create_task(worker.run()), engine)
    return d.nodes[name]


@dataclass
class Run:
    """One schedule in one deployment. `happened` is for people, and to see that schedules do what they are for."""

    d: Deployment
    schedule: Schedule
    happened: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)

    async def to_the_end(self) -> None:
        d, schedule = self.d, self.schedule
        d.dispatcher.observe = lambda live: self.ends.update([live.number])
        for name, worker in schedule.workers.items():
            join(d, name, **worker.settings((schedule.seed, name)))
        await d.ready()
        async with asyncio.TaskGroup() as group:
            for ask in schedule.asks:
                group.create_task(self._wait_for(ask))
            for number, fault in enumerate(schedule.faults):
                group.create_task(self._suffer(fault, number))
        await d.ready()
        await asyncio.sleep(4 if schedule.faults else 0)
        await self._check_the_end()

    async def _wait_for(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        sampling = ask.sampling
        try:
            live = self.d.submit(
                list(ask.prompt),
                sampling.max_tokens,
                ask.n,
                sampling.temperature,
                seed=sampling.seed,
                stop_token_ids=sampling.stop_token_ids,
                num_logprobs=sampling.num_logprobs,
                num_prompt_logprobs=sampling.num_prompt_logprobs,
                salt=ask.salt,
                timeout_s=ask.timeout_s,
            )
        except NoWorker:
            self.happened["refused"] += 1
            return
        except Overloaded:
            self.happened["refused"] += 1
            if ask.timeout_s is None:
                raise
            return
        try:
            async with asyncio.timeout(ask.leaves_after_s):
                while not live.has_ended:
                    await live.changed.wait()
        except TimeoutError:
            self.d.dispatcher.cancel(live)
        self._check_answer(ask, live)

    def _check_answer(self, ask: Ask, live: Live) -> None:
        self.happened[live.state.value] += 1
        sampling = replace(ask.sampling, num_logprobs=None, num_prompt_logprobs=None)
        for choice in live.journal.choices:
            wanted = expected(ask.prompt, sampling, choice.choice)
            whole = wanted if live.state is LiveState.FINISHED else wanted[: len(choice.tokens)]
            assert choice.tokens == whole, (ask, choice.choice)
            if ask.sampling.num_logprobs is not None:
                assert [-one.logprob for one in choice.logprobs] == choice.tokens
        if ask.sampling.num_prompt_logprobs is not None and live.state is LiveState.FINISHED:
            assert [-one.logprob for one in live.journal.prompt_logprobs] == list(ask.prompt[1:])
        if live.state is LiveState.FAILED:
            assert self.schedule.explains(ask, live.error), (ask, live.error)
            self.happened[type(live.error).__name__] += 1
        calm_s = ask.at_s + live.instants_s["closed"] - max(self.schedule.last_fault_s, ask.at_s)
        assert calm_s < CALM_S or self.schedule.is_orphaned, (ask, live.instants_s)

    async def _suffer(self, fault: Fault, number: int) -> None:
        d, name = self.d, fault.name
        await asyncio.sleep(fault.at_s)
        if name != "router" and name not in d.nodes:
            return  # dead already
        self.happened[fault.kind] += 1
        if fault.kind in ("kill", "anew"):
            self._count(d.nodes[name], name)
            await d.kill(name)
            if fault.kind == "anew":
                await asyncio.sleep(fault.for_s)
                join(d, name, number + 2, **self.schedule.workers[name].settings(number))
            return
        if fault.kind == "cut":
            for link in [link for link in d.network.links if link.address == name]:
                link.end(StreamEnded("connection reset", "UNAVAILABLE"))
            return
        executor = d.nodes[name].executor if name != "router" else None
        if executor is not None and fault.kind in ("hang", "stop"):
            executor.hang.clear()
        elif executor is not None and fault.kind == "fail":
            executor.fail = RuntimeError(OUT_OF_LUCK)
        if fault.kind in ("freeze", "stop"):
            d.network.freeze(name)
        await asyncio.sleep(fault.for_s)
        if executor is not None:
            executor.hang.set()
        d.network.thaw(name)

    @property
    def _may_be_damaged(self) -> bool:
        """By a road, or because a stream has ended while its last frame was read."""
        return bool(self.schedule.faults) or any(w.fault_of_roads == "damage" for w in self.schedule.workers.values())

    async def _check_the_end(self) -> None:
        d, counters = self.d, self.d.dispatcher.counters
        await d.quiet()
        assert set(self.ends.values()) <= {1}, "each request ends once"
        num_ended = counters["finished"] + counters["failed"] + counters["cancelled"]
        assert counters["accepted"] == len(self.ends) == num_ended, counters
        decode = [name for name in d.nodes if name.startswith("d")]
        served = Counter(link.address for link in d.network.links if not link._task.done())
        assert served == Counter({"router": len(d.nodes), **dict.fromkeys(decode, 1)}), (
            "a stream is open that nobody needs"
        )
        for name, node in d.nodes.items():
            self._count(node, name)
        assert self._may_be_damaged or not self.happened["bad_frame_digest"], "what is in flight stays as it is"
        if decode:
            ask = max(self.schedule.asks, key=lambda ask: ask.num_kv_tokens)
            live = d.submit(list(ask.prompt), ask.sampling.max_tokens)
            assert live.state is LiveState.PLACED, "a large request starts at once"
            d.dispatcher.cancel(live)
            await d.quiet()

    def _count(self, node: Node, name: str) -> None:
        counters = node.worker.load().counters
        for counter in ("preemptions", "evicted_blocks", "fetched_blocks", "fetches_started"):
            self.happened[f"{name[0]}_{counter}"] += counters[counter]
        for counter, value in counters.items():
            if counter.startswith(("fetch_failed", "bad_frame", "fetched_bytes_over", "warmed")):
                self.happened[counter] += value


def carry_out(schedule: Schedule) -> Counter[str]:
    async def main() -> Counter[str]:
        limits = limits_of(queue_timeout_s=LIMIT_S, request_timeout_s=LIMIT_S, local_tokens=schedule.local_tokens)
        async with deployment(limits=limits) as d:
            run = Run(d, schedule)
            await run.to_the_end()
            run.happened.update({k: d.dispatcher.counters[k] for k in ("worker_losses", "unplaced", "continuations")})
        return run.happened

    return run_virtual(main, 3 * LIMIT_S)


# --------------------------------------------------------------------------------------------- schedules from a seed


def test_the_schedules_have_every_fault_road_and_size():
    schedules = [draw(seed) for seed in range(NUM_SCHEDULES)]
    for kind in KINDS:
        for role in "pd":
            assert sum(schedule.has(kind, role) for schedule in schedules) >= 50, (kind, role)
    assert sum(schedule.has("freeze", "router") for schedule in schedules) >= 20
    assert sum(not schedule.faults for schedule in schedules) >= 100
    assert sum(schedule.is_orphaned for schedule in schedules) >= 20
    assert Counter(schedule.roads for schedule in schedules).keys() == {*ROADS, "auto", EACH_ITS_OWN}
    asks = [ask for schedule in schedules for ask in schedule.asks]
    assert Counter(ask.n for ask in asks).keys() == {1, 2, 3}
    assert sum(ask.leaves_after_s is not None for ask in asks) >= 1000


FIRSTS = range(0, NUM_SCHEDULES, SCHEDULES_PER_CASE)


@pytest.mark.parametrize(
    "first", [pytest.param(k, marks=[pytest.mark.soak] if k >= NUM_IN_MAKE_TEST else []) for k in FIRSTS]
)
def test_every_request_ends_exactly_or_as_its_schedule_explains_and_nothing_is_held(first):
    happened: Counter[str] = Counter()
    for seed in range(first, first + SCHEDULES_PER_CASE):
        try:
            happened += carry_out(draw(seed))
        except BaseException as error:
            raise AssertionError(f"schedule {seed}: carry_out(draw({seed}))") from error
    assert not WANTED - happened.keys(), happened


WANTED = {
    *("finished", "cancelled", "failed", "worker_losses", "continuations", "unplaced", *KINDS),
    *("p_fetched_blocks", "d_fetched_blocks", "p_evicted_blocks", "d_evicted_blocks", "bad_frame_digest"),
    *("fetch_failed_road", "fetch_failed_unreachable", "fetch_failed_bad_frame"),
    *(f"fetched_bytes_over_{road}" for road in ROADS),
}
"""What must happen in each case: a schedule that is never in trouble shows nothing."""


# -------------------------------------------------------------------------------------------------- by hand: the peers


def prompt_of(length: int, name: object) -> list[int]:
    return [random.Random(f"{name} {k}").randrange(1000) for k in range(length)]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(0, max_tokens, 0.0)


def sources(*names: str) -> tuple[Source, ...]:
    return tuple(Source(name, name) for name in names)


def computed_tokens(d: Deployment, role: str) -> int:
    nodes = [node for name, node in d.nodes.items() if name.startswith(role)]
    return sum(node.worker.load().counters["computed_tokens"] for node in nodes)


async def ask(
    d: Deployment, name: str, prompt: list[int], max_tokens: int, of: Sequence[str] = (), holders: Sequence[str] = ()
) -> list[int]:
    """The router's part by hand: the test says where the request goes, whom it fetches from, and who holds its beginning."""
    stream, tokens = d.network.attach(name), list[int]()
    opening = RequestOpen(
        1,
        1,
        tuple(prompt),
        (ChoiceStart(0),),
        greedy(max_tokens),
        sources=sources(*of),
        holders=sources(*holders),
    )
    try:
        await stream.send(Beat())
        await stream.send(opening)
        while True:
            message = await stream.receive()
            await stream.send(Beat())
            if isinstance(message, StepOutput):
                tokens += [token for new in message.tokens for token in new.token_ids]
                if message.ends:
                    assert message.ends[0].reason is ChoiceEndReason.LENGTH, message.ends
                    return tokens
    finally:
        stream.close()


class Reader:
    """A reader by hand, that acknowledges only when the test says so."""

    def __init__(self, d: Deployment, name: str, tokens: list[int], road: str):
        self.d, self.name, self.tokens, self.road = d, name, tokens, road
        self.stream: Any = d.network.fetch(name)

    async def open(self) -> None:
        identity = self.d.nodes[self.name].engine.identity
        opening = FetchOpen(
            identity.model_id,
            identity.fidelity,
            tuple(self.tokens),
            road=self.road,
            ticket=bytes(16),
            incarnation=f"{self.name}-1",
        )
        await self.stream.send(opening)

    async def receive(self) -> Frame | FetchEnd:
        while isinstance(message := await self.stream.receive(), FetchProgress):
            pass
        return message

    async def read_on(self) -> tuple[int, FetchEnd]:
        """Blocks and the end, each frame acknowledged at once."""
        num_blocks = 0
        while isinstance(message := await self.receive(), Frame):
            num_blocks += num_blocks_of(message)
            await self.stream.send(FetchAck(message.frame_number))
        return num_blocks, message


def num_blocks_of(frame: Frame) -> int:
    return len(msgpack.unpackb(frame.header)[FIELDS.index("ids")])


# ------------------------------------------------------------------------------------- each needs what the other has


@pytest.mark.parametrize("num_slots", [14, 16, 19])
def test_two_answers_that_each_need_the_room_of_the_other_both_end(num_slots):
    """Of the decode worker's pool; the prefill worker's has room for one of the two chains."""

    async def main(between_s: float) -> int:
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            join(d, "p1", num_slots=2)
            join(d, "d1", num_slots=num_slots)
            await d.ready()
            prompts = [prompt_of(40, k) for k in range(2)]
            answers = []
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    answers.append(group.create_task(ask(d, "d1", prompt, 120, ["p1"])))
                    await asyncio.sleep(between_s)
            assert [answer.result() for answer in answers] == [fake_answer(prompt, greedy(120)) for prompt in prompts]
            await d.quiet()
            return d.nodes["d1"].worker.load().counters["preemptions"]

    preemptions = [run_virtual(lambda k=k: main(0.1 * k), 60) for k in range(12)]
    assert any(preemptions)


CHAIN_BLOCKS, FRAME_BLOCKS, NUM_CHAINS = 9, 3, 6


async def chains_through_one_source(num_slots: int, between_s: float, fault: str = "") -> int:
    """Returns how many blocks came. The source's pool has room for one chain, or nearly two."""
    async with deployment() as d:
        join(d, "p1", num_slots=num_slots, roads=small_frames(FRAME_BLOCKS))
        readers = ("d1", "d2", "d3")
        for name in readers:
            roads = tuple(faulty(road, fault, name) for road in small_frames(FRAME_BLOCKS))
            join(d, name, num_slots=CHAIN_BLOCKS + 2, roads=roads)
        await d.ready()
        prompts = [prompt_of(BLOCK * CHAIN_BLOCKS + 1, k) for k in range(NUM_CHAINS)]
        answers = []
        async with asyncio.TaskGroup() as group:
            for k, prompt in enumerate(prompts):
                answers.append(group.create_task(ask(d, readers[k % len(readers)], prompt, 8, ["p1"])))
                await asyncio.sleep(between_s)
        assert [answer.result() for answer in answers] == [fake_answer(prompt, greedy(8)) for prompt in prompts]
        await d.quiet()
        return sum(d.nodes[name].worker.load().counters["fetched_blocks"] for name in readers)


@pytest.mark.parametrize("fault", ["", "slow", "damage", "break"])
@pytest.mark.parametrize("num_slots", [9, 12, 17])
def test_chains_that_each_need_all_of_a_sources_room_all_end(num_slots, fault):
    """Blocks in flight to one reader are in the way of another's chain, until they are acknowledged."""
    for k in range(5):
        run_virtual(lambda k=k: chains_through_one_source(num_slots, 0.04 * k, fault), 60)


@pytest.mark.parametrize("num_slots", [9, 12, 17])
def test_what_is_computed_for_a_reader_that_keeps_up_is_not_evicted_before_it_is_sent(num_slots):
    for k in range(5):
        num_blocks = run_virtual(lambda k=k: chains_through_one_source(num_slots, 0.04 * k), 60)
        assert num_blocks == NUM_CHAINS * CHAIN_BLOCKS


def test_room_that_an_acknowledgement_frees_is_had_at_once():
    """The large chain, first in its turn, waits for what is in flight to the reader of the other, which waits for its turn."""

    async def main() -> None:
        async with deployment() as d:
            join(d, "p1", num_slots=5)
            await d.ready()
            tokens = prompt_of(4 * BLOCK, "known in part")
            known = Reader(d, "p1", tokens[: 2 * BLOCK], "inproc")
            await known.open()
            await known.read_on()
            known.stream.close()
            large, partial = (Reader(d, "p1", chain, "inproc") for chain in (prompt_of(5 * BLOCK, "large"), tokens))
            await large.open()
            await partial.open()
            await asyncio.sleep(0.5)
            frames = [await partial.receive(), await partial.receive()]  # of a block each: the pool is small
            for frame in frames:
                assert isinstance(frame, Frame)
                assert num_blocks_of(frame) == 1
                await partial.stream.send(FetchAck(frame.frame_number))
            async with asyncio.timeout(1):
                await large.read_on()
            for reader in (large, partial):
                reader.stream.close()
            await d.quiet()

    run_virtual(main, 60)


def test_a_fetch_whose_room_an_older_answer_needs_is_given_up_and_made_again():
    async def main(after_s: float) -> None:
        async with deployment() as d:
            join(d, "p1", num_slots=20, roads=small_frames(1), max_step_tokens=BLOCK)
            join(d, "d1", num_slots=17, roads=small_frames(1))
            await d.ready()
            older, younger = prompt_of(40, "older"), prompt_of(5 * BLOCK + 1, "younger")
            first = asyncio.ensure_future(ask(d, "d1", older, 120))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(ask(d, "d1", younger, 70, ["p1"]))
            await asyncio.sleep(after_s)
            source, reader = d.nodes["p1"], d.nodes["d1"].worker
            source.executor.hang.clear()
            while not reader.load().counters["preemptions"]:
                await asyncio.sleep(0.01)
            assert not first.done()
            source.executor.hang.set()
            assert await first == fake_answer(older, greedy(120))
            assert await second == fake_answer(younger, greedy(70))
            await d.quiet()

    for after_s in (0.0, 0.03, 0.06, 0.09):
        run_virtual(lambda after_s=after_s: main(after_s), 60)


# ------------------------------------------------------------------------------------------------------------ rings


@pytest.mark.parametrize("of", list(product(("p1", "p2"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("holders", list(product(("p1", "p2", "d1", "d2"), repeat=2)), ids="-".join)
def test_workers_that_read_from_each_other_in_a_ring_wait_for_nobody(of, holders):
    """Two chats with a common beginning, of which each worker holds another piece; each pool has room for one chain.

    A ring of two is the decode worker that reads from a prefill worker that reads from it; of one, a worker that holds for itself.
    """

    async def main() -> None:
        async with deployment() as d:
            for name in ("p1", "p2", "d1", "d2"):
                join(d, name, num_slots=13, roads=small_frames(2))
            await d.ready()
            stem = prompt_of(12 * BLOCK, "stem")
            for k, name in enumerate(("d1", "d2")):
                await ask(d, name, stem[: (4 + 3 * k) * BLOCK], 3)
                await ask(d, name, stem[: (2 + 4 * k) * BLOCK + 1], 3, [f"p{k + 1}"])
            prompts = [[*stem[: BLOCK * 8], *prompt_of(BLOCK * 3, k), 1] for k in range(2)]
            for between_s in (0.0, 0.02, 0.05):
                tasks = []
                async with asyncio.timeout(8), asyncio.TaskGroup() as group:
                    for k, prompt in enumerate(prompts):
                        prompt = [*prompt, int(1000 * between_s)]
                        tasks.append(group.create_task(ask(d, f"d{k + 1}", prompt, 12, [of[k]], [holders[k]])))
                        await asyncio.sleep(between_s)
                for prompt, task in zip(prompts, tasks, strict=True):
                    assert task.result() == fake_answer([*prompt, int(1000 * between_s)], greedy(12))
            assert all(d.nodes[name].worker.load().counters["fetches_started"] for name in of)
            await d.quiet()

    run_virtual(main, 60)


def test_prefill_workers_that_name_each_other_as_holders_of_what_nobody_has_compute_it():
    async def main() -> None:
        async with deployment() as d:
            names = ("p1", "p2", "p3")
            for name in names:
                join(d, name, num_slots=8)
            join(d, "d1", num_slots=30)
            join(d, "d2", num_slots=30)
            join(d, "d3", num_slots=30)
            await d.ready()
            prompt = prompt_of(BLOCK * 8 + 3, "ring")
            began = asyncio.get_running_loop().time()
            answers = await asyncio.gather(
                *(ask(d, f"d{k + 1}", prompt, 5, [names[k]], [names[k - 1], names[k - 2]]) for k in range(3))
            )
            assert answers == [fake_answer(prompt, greedy(5))] * 3
            assert asyncio.get_running_loop().time() - began < 1
            assert all(d.nodes[name].worker.load().counters["fetches_finished"] for name in names), "each asked another"
            await d.quiet()

    run_virtual(main, 60)


# ----------------------------------------------------------------------------------------------------------- stalling


@pytest.mark.parametrize("road", ["inproc", "grpc"])
@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_reader_that_stalls_has_two_frames_and_its_source_serves_all_others(road, num_read):
    async def main() -> None:
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            source = join(d, "p1", num_slots=40, roads=small_frames(2, road)).worker.body.pool
            join(d, "d1", num_slots=100, roads=small_frames(2, road))
            await d.ready()
            reader = Reader(d, "p1", prompt_of(20 * BLOCK, "stalled"), road)
            await reader.open()
            num_blocks = 0
            for _ in range(num_read):
                frame = await reader.receive()
                assert isinstance(frame, Frame)
                num_blocks += num_blocks_of(frame)
                await reader.stream.send(FetchAck(frame.frame_number))
            await asyncio.sleep(20)
            num_live = source.counts.num_live
            assert 2 <= num_live <= 2 * 2
            for k in range(4):
                prompt = prompt_of(36 * BLOCK + 5, k)
                live = d.submit(prompt, 4)
                await wait_all([live])
                assert live.journal.choices[0].tokens == fake_answer(prompt, greedy(4))
                assert live.summary().num_fetched_blocks == 36
                assert source.counts.num_live == num_live
            num_more, end = await reader.read_on()
            assert num_more == num_live
            assert (end.reason, end.first_missing_block) == (FetchEndReason.MISSING, num_blocks + num_more)
            assert source.counts.num_live == 0
            reader.stream.close()
            await d.quiet()

    run_virtual(main)


def test_a_stalled_reader_that_ends_gives_back_its_frames_at_once():
    async def main() -> None:
        async with deployment() as d:
            source = join(d, "p1", num_slots=40, roads=small_frames(4)).worker.body.pool
            await d.ready()
            readers, held = [Reader(d, "p1", prompt_of(9 * BLOCK, k), "inproc") for k in range(4)], list[int]()
            for reader in readers:
                await reader.open()
                frames = [await reader.receive() for _ in range(2)]
                held.append(sum(num_blocks_of(frame) for frame in frames if isinstance(frame, Frame)))
            await asyncio.sleep(2)
            while readers:
                assert source.counts.num_live == sum(held)
                readers.pop().stream.close()
                held.pop()
                await asyncio.sleep(0.001)
            assert source.counts.num_live == 0
            await d.quiet()

    run_virtual(main)


@pytest.mark.parametrize("fault", ["hang", "freeze", "stop", "kill"])
@pytest.mark.parametrize("at_s", [0.0, 0.03, 0.1, 0.3])
def test_a_source_that_stalls_costs_no_token_and_no_other_stream_waits(fault, at_s):
    async def main() -> None:
        settings = dict(roads=small_frames(2), max_step_tokens=2 * BLOCK)
        budgets = FetchBudgets(computing_s=5.0)
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            for name in ("p1", "p2"):
                join(d, name, num_slots=33, **settings)
            join(d, "d1", num_slots=80, max_local_tokens=0, budgets=budgets, **settings)
            await d.ready()
            other = d.submit([1, 2, 3], 1000)
            prompt = prompt_of(32 * BLOCK + 1, "stalled")
            answer = asyncio.ensure_future(ask(d, "d1", prompt, 8, ["p1", "p2"]))
            await asyncio.sleep(at_s)
            stalled = d.nodes["p1"]
            if fault == "kill":
                await d.kill("p1")
            if fault in ("hang", "stop"):
                stalled.executor.hang.clear()
            if fault in ("freeze", "stop"):
                d.network.freeze("p1")
            began = asyncio.get_running_loop().time()
            while not answer.done():
                num_tokens = len(other.journal.choices[0].tokens)
                await asyncio.sleep(0.5)
                assert len(other.journal.choices[0].tokens) > num_tokens
                assert asyncio.get_running_loop().time() - began < 7
            assert answer.result() == fake_answer(prompt, greedy(8))
            stalled.executor.hang.set()
            d.network.thaw("p1")
            d.dispatcher.cancel(other)
            await asyncio.sleep(4)
            await d.quiet()

    run_virtual(main, 100)


# -------------------------------------------------------------------------------------------- leaving, and coming again


@pytest.mark.parametrize("road", ROADS)
def test_a_source_that_lives_again_is_met_again(road):
    """Its slots are other ones: nothing is read from where they were."""

    async def main() -> None:
        async with deployment() as d:
            for name in ("p1", "d1"):
                join(d, name, num_slots=40, roads=small_frames(2, road))
            await d.ready()
            for life in range(2, 6):
                prompt = prompt_of(8 * BLOCK + 1, life)
                assert await ask(d, "d1", prompt, 4, ["p1"]) == fake_answer(prompt, greedy(4))
                stranger = Reader(d, "p1", prompt[: 4 * BLOCK], road)
                await d.kill("p1")
                join(d, "p1", life, num_slots=40, roads=small_frames(2, road))
                await d.ready()
                stranger.stream = d.network.fetch("p1")
                await stranger.open()
                end = await stranger.receive()
                assert isinstance(end, FetchEnd)
                assert end.reason is FetchEndReason.STRANGER
            counters = d.nodes["d1"].worker.load().counters
            assert counters["fetched_blocks"] == 4 * 8
            assert not [name for name in counters if name.startswith(("bad_frame", "fetch_failed"))]
            await d.quiet()

    run_virtual(main, 60)


@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_what_a_reader_that_has_left_wanted_is_not_computed(num_frames):
    async def main() -> None:
        async with deployment() as d:
            join(d, "p1", num_slots=40, roads=small_frames(2), max_step_tokens=2 * BLOCK)
            await d.ready()
            reader = Reader(d, "p1", prompt_of(30 * BLOCK, "left"), "inproc")
            await reader.open()
            for _ in range(num_frames):
                await reader.receive()
            await asyncio.sleep(0.001)
            reader.stream.close()
            await d.quiet()
            assert computed_tokens(d, "p") <= (num_frames + 1) * 2 * BLOCK

    run_virtual(main, 60)


def test_a_client_that_leaves_at_any_turn_of_the_event_loop_has_no_frame_taken_for_it():
    """All blocks are there, so that the whole fetch takes no time, only turns; the reader has the first block already."""

    async def main() -> None:
        async with deployment() as d:
            join(d, "p1", num_slots=100, roads=small_frames(1))
            for name in ("d1", "d2"):
                join(d, name, num_slots=100, roads=small_frames(1))
            await d.ready()
            for num_turns in range(120):
                prompt = prompt_of(5 * BLOCK + 1, num_turns)
                await ask(d, "d2", prompt, 1, ["p1"])
                await ask(d, "d1", prompt[: BLOCK + 1], 1)
                asking = asyncio.ensure_future(ask(d, "d1", prompt, 1, ["p1"]))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait((asking,))
                await asyncio.sleep(0.2)
                assert d.nodes["d1"].worker.body.pool.audit().is_clean
            counters = d.nodes["d1"].worker.load().counters
            assert 120 < counters["fetched_blocks"] < 120 * 4
            assert not [name for name in counters if name.startswith("bad_frame")]
            await d.quiet()

    run_virtual(main)


# --------------------------------------------------------------------------------------------------- a chat's second turn

FIRST, ANSWER, NEW = 100, 60, 40
KNOWN_BLOCKS = (FIRST + ANSWER - 1) // BLOCK
"""Of the first turn and its answer, whose last token has no KV."""
NEW_TOKENS = ((FIRST + ANSWER + NEW - 1) // BLOCK - KNOWN_BLOCKS) * BLOCK
"""Of the second turn's whole blocks before the tail."""


@pytest.mark.parametrize(
    ("source", "decode"), [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")], ids=lambda name: name
)
def test_a_second_turn_is_computed_from_its_first_new_block_on_wherever_it_lands(source, decode):
    """The first one was prefilled by p1 and answered by d1, which holds all of it."""

    async def main() -> None:
        async with deployment() as d:
            for name in ("p1", "p2", "d1", "d2"):
                join(d, name, num_slots=40, roads=small_frames(2))
            await d.ready()
            first = prompt_of(FIRST, "first")
            answer = await ask(d, "d1", first, ANSWER, ["p1"])
            assert computed_tokens(d, "p") == (FIRST - 1) // BLOCK * BLOCK
            before, second = computed_tokens(d, "p"), [*first, *answer, *prompt_of(NEW, "second")]
            assert await ask(d, decode, second, 8, [source], ["d1"]) == fake_answer(second, greedy(8))
            assert computed_tokens(d, "p") - before == NEW_TOKENS
            read = d.nodes[source].worker.load().counters["fetched_blocks"]
            assert read == KNOWN_BLOCKS - ((FIRST - 1) // BLOCK if source == "p1" else 0)
            await d.quiet()

    run_virtual(main, 60)


@pytest.mark.parametrize("is_other_source", [False, True])
@pytest.mark.parametrize("is_other_decode", [False, True])
def test_a_second_turn_that_the_router_places_is_computed_from_its_first_new_block_on(is_other_source, is_other_decode):
    async def main() -> None:
        async with deployment(limits=limits_of(local_tokens=0)) as d:
            for name in ("p1", "d1"):
                join(d, name, num_slots=100)
            await d.ready()
            first = prompt_of(FIRST, "first")
            answer = await d.answer(first, ANSWER)
            if is_other_decode:
                join(d, "d2", num_slots=100)
                await d.ready()
                others = [d.submit(prompt_of(4, k), 1000) for k in range(2)]
                d.dispatcher.cancel(next(other for other in others if other.decode_id == "d2"))
            if is_other_source:
                await d.kill("p1")
                join(d, "p2", num_slots=100)
            await asyncio.sleep(1.5)
            before, second = computed_tokens(d, "p"), [*first, *answer, *prompt_of(NEW, "second")]
            live = d.submit(second, 8)
            await wait_all([live])
            assert live.journal.choices[0].tokens == fake_answer(second, greedy(8))
            assert live.source_ids == (("p2",) if is_other_source else ("p1",))
            assert live.decode_id == ("d2" if is_other_decode else "d1")
            assert computed_tokens(d, "p") - (0 if is_other_source else before) == NEW_TOKENS
            for live in d.dispatcher.lives:
                d.dispatcher.cancel(live)
            await d.quiet()

    run_virtual(main, 60)

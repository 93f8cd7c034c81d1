"""Schedules for the router, drawn from a seed: one or two routers, two to six workers, fifty requests, faults, and who leaves when.

`draw(seed)` says what shall happen, `carry_out(schedule)` lets it happen in virtual time and raises on whatever is not as it must be:
each accepted request ends once, with the reference's tokens and text or with an error that the schedule explains; a client sees each token
once; nobody takes for ever; afterwards nobody holds anything and each router knows what is true. The same seed is the same run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from kvferry.engine.fake import fake_answer
from kvferry.errors import Conflict, DeadlineExceeded, EngineFailure, InvalidRequest, KvferryError, NoWorker, Overloaded
from kvferry.kv.block_id import chain, chain_root
from kvferry.messages import Sampling
from kvferry.streams import StreamEnded
from loadtest.virtual_time import run_virtual
from router.journal import FinishReason
from router.live import Live, LiveState
from router.placement import POLICIES
from router.request import GenerationRequest
from router.suspicion import VERDICT_S
from tests.cluster import Cluster, Router, cluster
from tests.drawn import DrawnWorker, Fault
from tests.faulty_roads import ROADS
from tests.in_process import BLOCK, limits_of

NUM_ASKS = 50
LIMIT_S = 90.0
"""Of virtual time, for a request: an orphaned one waits so long."""
CALM_S = 45.0
"""Of virtual time, after its arrival and the last fault, for any other: those that wait for a verdict among them."""
LONG_TOKEN_S = 0.04
"""A token's time in a stream so long that its tokens alone take more than that."""
OUT_OF_LUCK = "out of luck"
PREVIOUS_ENDS = {"kill -9": "signal 9", "crash": "signal 11", "roll": "code 0"}
"""How a worker ended that comes back under its name."""
AT_ONCE = ("kill", "fail", "cut", "lose a token", "lose events")
KINDS = (*AT_ONCE, *PREVIOUS_ENDS, "freeze", "stop", "hang", "slow link", "slow steps", "drain")
TENANTS = (b"", b"one tenant", b"another tenant")


# ------------------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Reader:
    """A client. The second one of a request comes with the same Idempotency-Key."""

    at_s: float
    leaves_after_s: float | None
    is_other_request: bool = False
    """The key is the same, the request is not."""


@dataclass(frozen=True)
class Ask:
    number: int
    request: GenerationRequest
    readers: tuple[Reader, ...]
    router: int

    @property
    def key(self) -> str | None:
        return f"key {self.number}" if len(self.readers) > 1 else None

    @property
    def num_kv_tokens(self) -> int:
        return len(self.request.prompt_tokens) + self.request.sampling.max_tokens - 1


@dataclass(frozen=True)
class Schedule:
    seed: int
    workers: dict[str, DrawnWorker]
    num_routers: int
    policy: str
    local_tokens: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    def has(self, *kinds: str, role: str = "") -> bool:
        return any(fault.kind in kinds and fault.name.startswith(role) for fault in self.faults)

    @property
    def is_orphaned(self) -> bool:
        """No decode worker is left in the end."""
        lost = {fault.name for fault in self.faults if fault.kind == "kill"}
        return all(name in lost for name in self.workers if name.startswith("d"))

    @property
    def last_fault_s(self) -> float:
        return max((fault.at_s + fault.for_s * (fault.kind not in AT_ONCE) for fault in self.faults), default=0.0)

    @property
    def num_accusations(self) -> int:
        """Deaths of decode workers that nothing from outside is known to explain: two of them can find a request guilty."""
        accusing = ("kill", "crash", "roll")  # the first is never heard of again
        return sum(fault.kind in accusing and fault.name.startswith("d") for fault in self.faults)

    def explains(self, ask: Ask, error: KvferryError) -> bool:
        if isinstance(error, DeadlineExceeded):
            return ask.request.timeout_s is not None or self.is_orphaned
        if isinstance(error, EngineFailure) and "killed the decode worker" in error.message:
            return self.num_accusations > 1
        if isinstance(error, EngineFailure):
            return OUT_OF_LUCK in error.message and self.has("fail", role="d")
        is_out_of_retries = isinstance(error, NoWorker) and "too many placements fail" in error.message
        if is_out_of_retries:
            sources = [worker for name, worker in self.workers.items() if name.startswith("p")]
            return bool(self.faults) or all(worker.fault_of_roads for worker in sources)
        return isinstance(error, NoWorker) and self.is_orphaned


@cache
def draw(seed: int) -> Schedule:
    rng = random.Random(f"router {seed}")
    num_decode = rng.choice((1, 2, 2, 3, 4))
    num_prefill = rng.randrange(0 if num_decode > 1 else 1, min(7 - num_decode, 4))
    names = [*(f"p{k + 1}" for k in range(num_prefill)), *(f"d{k + 1}" for k in range(num_decode))]
    num_routers = rng.choice((1, 1, 2))
    asks = tuple(_asks(rng, num_routers))
    faults = tuple(_faults(rng, names, num_routers))
    road = rng.choice((*ROADS, "auto"))
    return Schedule(
        seed,
        {name: _worker(rng, name, asks, road) for name in names},
        num_routers,
        policy=rng.choice(list(POLICIES)),
        local_tokens=rng.choice((0, BLOCK, 3 * BLOCK)),
        asks=asks,
        faults=faults,
    )


def _asks(rng: random.Random, num_routers: int) -> Iterator[Ask]:
    """With common beginnings, also between tenants: of stems, and of whole turns of a chat."""
    stems = [[rng.randrange(1000) for _ in range(rng.randrange(1, 5) * BLOCK)] for _ in range(3)]
    span_s, has_endless = rng.choice((0.05, 1.0, 4.0, 8.0)), rng.random() < 0.15
    for number, at_s in enumerate(sorted(rng.random() * span_s for _ in range(NUM_ASKS))):
        stem, seed = rng.choice(stems), rng.choice((0, 0, 5, number))
        length = rng.choice((1, 5, BLOCK, rng.randrange(1, 50)))
        prompt = (
            *stem[: rng.choice((len(stem), rng.randrange(len(stem))))],
            *(rng.randrange(1000) for _ in range(length)),
        )
        max_tokens = rng.choice((1, 2, 8, BLOCK + 1, rng.randrange(1, 24)))
        sampling = Sampling(seed, max_tokens, float(bool(seed)))
        if seed and rng.random() < 0.3:
            sampling = replace(sampling, presence_penalty=0.5)
        answer = fake_answer(prompt, sampling)
        if len(stems) < 8 and len(prompt) < 100:
            stems.append([*prompt, *answer])
        if rng.random() < 0.15:
            sampling = replace(sampling, stop_token_ids=(rng.choice(answer),))
        if rng.random() < 0.1:
            sampling = replace(sampling, num_logprobs=1)
        leaves_after_s = rng.choice((0.0, rng.random() * 0.5, rng.random() * 3)) if rng.random() < 0.2 else None
        if has_endless and leaves_after_s is not None:
            sampling = replace(sampling, max_tokens=1500, stop_token_ids=())
        readers = [Reader(at_s, leaves_after_s)]
        if rng.random() < 0.1:
            readers += _twins(rng, at_s)
        tenant = rng.choice((*TENANTS, TENANTS[0]))
        request = GenerationRequest(
            prompt,
            sampling,
            num_choices=rng.choice((1, 1, 1, 2, 3)),
            stops=_stops(rng, answer) if rng.random() < 0.2 else (),
            is_stop_included=rng.random() < 0.5,
            salt=tenant,
            tenant=tenant,
            priority=rng.choice((0, 0, 0, 1)),
            timeout_s=rng.uniform(0.1, 6.0) if rng.random() < 0.1 else None,
        )
        yield Ask(number, request, tuple(readers), rng.randrange(num_routers))


def _twins(rng: random.Random, at_s: float) -> Iterator[Reader]:
    leaves_after_s = rng.random() * 0.5 if rng.random() < 0.3 else None
    yield Reader(at_s + rng.choice((0.0, 0.1 * rng.random())), leaves_after_s, rng.random() < 0.2)


def _stops(rng: random.Random, answer: list[int]) -> tuple[str, ...]:
    """Pieces of the answer's text, over two or three tokens, and one that is never completed."""
    at, words = rng.randrange(len(answer)), [f"{token} " for token in answer]
    piece = "".join(words[at : at + rng.choice((1, 2, 3))])
    begin = rng.randrange(max(len(piece) // 2, 1))
    return (piece[begin:-1] or piece, f"{words[0]}x")


def _faults(rng: random.Random, names: list[str], num_routers: int) -> Iterator[Fault]:
    for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 6))):
        kind, at_s = rng.choice(KINDS), rng.choice((0.0, rng.uniform(0, 0.6), rng.uniform(0, 4), rng.uniform(0, 8)))
        routers = [f"router{k + 1}" for k in range(num_routers)]
        name = rng.choice(names + routers * (kind in ("freeze", "cut")))
        yield Fault(at_s, kind, name, rng.choice((0.05, 1.0, 2.5, 3.5, 8.0)))


def _worker(rng: random.Random, name: str, asks: tuple[Ask, ...], road: str) -> DrawnWorker:
    """Of a pool that just holds the largest request, or a few; prefill workers may have too little for some."""
    largest = -(-max(ask.num_kv_tokens for ask in asks) // BLOCK)
    longest = -(-max(len(ask.request.prompt_tokens) for ask in asks) // BLOCK)
    least = largest if name.startswith("d") else max(longest // 2, 1)
    return DrawnWorker(
        num_slots=least + rng.choice((0, longest, 4 * longest, 10 * longest)),
        max_step_tokens=rng.choice((64, 256, 2048)),
        max_local_tokens=rng.choice((0, 32, 512)),
        max_sequences=rng.choice((4, 16, 64)),
        roads=road,
        frame_blocks=rng.choice((1, 4, 1024)),
        fault_of_roads=rng.choice(("", "", "", "", "", "", "slow", "damage", "break")),
    )


# ---------------------------------------------------------------------------------------------------------- what is right


@dataclass(frozen=True)
class Wanted:
    """Of one choice."""

    tokens: list[int]
    text: str
    finish: FinishReason


@cache
def wanted(request: GenerationRequest, choice: int) -> Wanted:
    """Token by token, with the text that has come so far; a stop string ends it wherever it is first complete."""
    sampling = replace(request.sampling, num_logprobs=None)
    tokens, text = list[int](), ""
    for token in fake_answer(request.prompt_tokens, sampling, choice=choice):
        tokens.append(token)
        if token in sampling.stop_token_ids:  # its text is not given out
            return Wanted(tokens, text, FinishReason.STOP)
        text += f"{token} "
        ends = [(at + len(stop), at) for stop in request.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            return Wanted(tokens, text[: end if request.is_stop_included else at], FinishReason.STOP)
    return Wanted(tokens, text, FinishReason.LENGTH)


class Reading:
    """What one client has seen of one request."""

    def __init__(self, live: Live):
        self._live = live
        self._positions = [0] * len(live.journal.choices)
        self.tokens: list[list[int]] = [[] for _ in live.journal.choices]
        self.texts = ["" for _ in live.journal.choices]
        self.finishes: list[FinishReason | None] = [None for _ in live.journal.choices]

    def read(self) -> None:
        for k, choice in enumerate(self._live.journal.choices):
            delta, self._positions[k] = choice.read(self._positions[k])
            if delta is not None:
                assert self.finishes[k] is None, "nothing comes after a choice's end"
                self.tokens[k] += delta.token_ids
                self.texts[k] += delta.text
                self.finishes[k] = delta.finish

    def check(self, request: GenerationRequest) -> None:
        """As far as it came: no token lost, repeated or foreign; the whole, where it came to its end."""
        for k, finish in enumerate(self.finishes):
            whole = wanted(request, k)
            if finish is None:
                assert self.tokens[k] == whole.tokens[: len(self.tokens[k])], (request, k)
                assert whole.text.startswith(self.texts[k]), (request, k)
            else:
                assert Wanted(self.tokens[k], self.texts[k], finish) == whole, (request, k)


@cache
def everything_of(request: GenerationRequest) -> list[tuple[int, ...]]:
    """What may have KV for it: prompt and answer of each choice, as far as others' prompts may go on from them."""
    sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, 40), num_logprobs=None)
    answers = (fake_answer(request.prompt_tokens, sampling, choice=choice) for choice in range(request.num_choices))
    return [(*request.prompt_tokens, *answer) for answer in answers]


# --------------------------------------------------------------------------------------------------------- carrying it out


@dataclass
class Run:
    """One schedule. `happened` is for people, and to see that schedules do what they are for."""

    cluster: Cluster
    schedule: Schedule
    happened: Counter[str] = field(default_factory=Counter)
    reading: Counter[int] = field(default_factory=Counter)
    """Of each request, the clients that read it still."""
    lives: list[tuple[Ask, Live]] = field(default_factory=list)
    num_anew: int = 1

    async def to_the_end(self) -> None:
        made, schedule = self.cluster, self.schedule
        for name, worker in schedule.workers.items():
            made.start(name, **worker.settings((schedule.seed, name)))
        await made.ready()
        async with asyncio.TaskGroup() as group:
            for ask in schedule.asks:
                for reader in ask.readers:
                    group.create_task(self._read(ask, reader))
            for fault in schedule.faults:
                group.create_task(self._suffer(fault))
        await made.ready()
        await asyncio.sleep(4 if schedule.faults else 0)
        await made.quiet()
        self._check_tenants()
        for router in made.routers:
            self._count(router)
        if any(name.startswith("d") for name in made.nodes):
            await self._start_a_large_one()

    async def _read(self, ask: Ask, reader: Reader) -> None:
        await asyncio.sleep(reader.at_s)
        router, request = self.cluster.routers[ask.router], ask.request
        if reader.is_other_request:
            request = replace(request, prompt_tokens=(*request.prompt_tokens, 1))
        num_joined = router.dispatcher.counters["joined"]
        try:
            (live,) = router.dispatcher.submit_all([request], ask.key)
        except (NoWorker, Overloaded, InvalidRequest, Conflict) as error:
            self._check_refusal(ask, reader, error)
            return
        if router.dispatcher.counters["joined"] == num_joined:
            self.lives.append((ask, live))
        self.reading[id(live)] += 1
        reading = Reading(live)
        try:
            async with asyncio.timeout(reader.leaves_after_s):
                while not live.has_ended:
                    reading.read()
                    await live.changed.wait()
        except TimeoutError:
            pass
        self.reading[id(live)] -= 1
        router.dispatcher.leave(live)
        reading.read()
        reading.check(request)
        self._check_end(ask, live)

    def _check_refusal(self, ask: Ask, reader: Reader, error: KvferryError) -> None:
        self.happened["refused"] += 1
        self.happened[type(error).__name__] += 1
        if isinstance(error, Conflict):
            assert reader.is_other_request or len(ask.readers) > 1, ask
        elif isinstance(error, InvalidRequest):
            assert error.code == "request_refused", error
            assert self.schedule.num_accusations > 1
        elif isinstance(error, Overloaded):
            assert ask.request.timeout_s is not None, error
        else:
            assert self.schedule.faults, error

    def _check_end(self, ask: Ask, live: Live) -> None:
        """By each of its clients."""
        if not live.has_ended:
            assert self.reading[id(live)] > 0, "it goes on for those that read it, and for nobody else"
            self.happened["left one behind"] += 1
            return
        self.happened[live.state.value] += 1
        if live.state is LiveState.FINISHED:
            assert all(choice.finish is not None for choice in live.journal.choices)
        if live.state is LiveState.CANCELLED:
            assert any(reader.leaves_after_s is not None for reader in ask.readers), ask
            assert not self.reading[id(live)], "somebody still wanted it"
        if live.state is LiveState.FAILED:
            assert live.error is not None
            assert self.schedule.explains(ask, live.error), (ask, live.error)
            self.happened[type(live.error).__name__] += 1
        since_s = max(self.schedule.last_fault_s, min(reader.at_s for reader in ask.readers))
        calm_s = min(reader.at_s for reader in ask.readers) + live.instants_s["closed"] - since_s
        limit_s = max(CALM_S, ask.request.sampling.max_tokens * LONG_TOKEN_S)
        assert calm_s < limit_s or self.schedule.is_orphaned, (ask, live.instants_s)

    async def _suffer(self, fault: Fault) -> None:
        made, name = self.cluster, fault.name
        await asyncio.sleep(fault.at_s)
        is_router = name.startswith("router")
        if not is_router and name not in made.nodes:
            return  # dead already
        self.happened[fault.kind] += 1
        if fault.kind == "kill" or fault.kind in PREVIOUS_ENDS:
            if fault.kind == "roll":
                made.nodes[name].worker.body.is_draining = True
                await asyncio.sleep(fault.for_s)
                if name not in made.nodes:
                    return
            await made.kill(name)
            if fault.kind in PREVIOUS_ENDS:
                self.num_anew += 1
                life, settings = (
                    self.num_anew,
                    self.schedule.workers[name].settings((self.schedule.seed, self.num_anew)),
                )
                await asyncio.sleep(0.1 if fault.kind == "roll" else fault.for_s)
                made.start(name, life, previous_end=PREVIOUS_ENDS[fault.kind], **settings)
            return
        if fault.kind == "cut":
            for link in [link for link in made.network.links if link.address == name]:
                link.end(StreamEnded("connection reset", "UNAVAILABLE"))
            return
        if fault.kind in ("lose a token", "lose events"):
            made.network.losses["token" if fault.kind == "lose a token" else "events", name] += 1
            return
        await self._bear(fault, None if is_router else made.nodes[name])

    async def _bear(self, fault: Fault, node: Any) -> None:
        """What is over after a while."""
        network, name = self.cluster.network, fault.name
        if fault.kind == "fail":
            node.executor.fail = RuntimeError(OUT_OF_LUCK)
            return
        if fault.kind in ("hang", "stop"):
            node.executor.hang.clear()
        if fault.kind in ("freeze", "stop"):
            network.freeze(name)
        if fault.kind == "slow link":
            network.delays_s[name] = 0.05
        if fault.kind == "slow steps":
            node.executor.slowness = 8.0
        if fault.kind == "drain":
            await self._drain(node, fault)
        await asyncio.sleep(fault.for_s)
        if node is not None:
            node.executor.hang.set()
            node.executor.slowness = 1.0
            node.worker.body.is_draining = False
        network.thaw(name)
        network.delays_s.pop(name, None)

    async def _drain(self, node: Any, fault: Fault) -> None:
        """Once the routers know, nothing new comes."""
        node.worker.body.is_draining = True
        others = (other for other in self.schedule.faults if other is not fault)
        if any(other.name in (fault.name, *(r.name for r in self.cluster.routers)) for other in others):
            return  # who does not hear of it may go on
        await asyncio.sleep(1.5)
        before = sum(router.num_opened[fault.name] for router in self.cluster.routers)
        await asyncio.sleep(fault.for_s)
        after = sum(router.num_opened[fault.name] for router in self.cluster.routers)
        assert before == after, f"{fault.name} drains, and something new was opened there"
        self.happened["drained"] += 1

    def _check_tenants(self) -> None:
        """No block that one tenant's request needed is anywhere under the name that it would have for another one."""
        identity = next(iter(self.cluster.nodes.values())).engine.identity if self.cluster.nodes else None
        if identity is None:
            return
        roots = {salt: chain_root(identity.model_id, identity.fidelity, salt) for salt in TENANTS}
        asked: dict[bytes, set[bytes]] = {salt: set() for salt in TENANTS}
        for ask in self.schedule.asks:
            for tokens in everything_of(ask.request):
                asked[ask.request.salt].update(chain(roots[ask.request.salt], tokens, BLOCK))
        foreign: set[bytes] = set()
        for salt, root in roots.items():
            others = (ask for ask in self.schedule.asks if ask.request.salt != salt)
            foreign.update(*(chain(root, ask.request.prompt_tokens, BLOCK) for ask in others))
            foreign -= asked[salt]
        for name, node in self.cluster.nodes.items():
            found = foreign.intersection(node.worker.body.pool.sealed_block_ids())
            assert not found, f"{name} has {len(found)} blocks under another tenant's name"

    def _count(self, router: Router) -> None:
        for name in ("worker_losses", "unplaced", "continuations", "joined", "late_messages", "placed_local"):
            self.happened[name] += router.dispatcher.counters[name]
        for name in ("snapshots_asked", "set_aside"):
            self.happened[name] += router.members.counters[name]
        self.happened["tokens lost"] += self.cluster.network.num_lost["token"]
        self.happened["events lost"] += self.cluster.network.num_lost["events"]
        for node in self.cluster.nodes.values():
            counters = node.worker.load().counters
            for name in ("preemptions", "fetched_blocks", "bad_frame_digest"):
                self.happened[name] += counters.get(name, 0)

    async def _start_a_large_one(self) -> None:
        """After all that, what needs all of the largest pool starts at once, and ends exactly."""
        self.cluster.network.losses.clear()
        for node in self.cluster.nodes.values():
            node.executor.fail = None
        for router in self.cluster.routers:
            asks = [ask for ask in self.schedule.asks if ask.request.sampling.max_tokens < 1000]
            ask = max(asks, key=lambda ask: ask.num_kv_tokens)
            request = replace(ask.request, num_choices=1)
            request = replace(request, timeout_s=None, stops=(), prompt_tokens=(*request.prompt_tokens[:-1], 999))
            live = router.dispatcher.submit(request)
            assert live.state is LiveState.PLACED, "a large request starts at once"
            while not live.has_ended:
                await live.changed.wait()
            assert live.state is LiveState.FINISHED, live.error
            assert live.journal.choices[0].tokens == wanted(request, 0).tokens
            await self.cluster.quiet()


def carry_out(schedule: Schedule, prepare: Callable[[Cluster], None] = lambda made: None) -> Counter[str]:
    async def main() -> Counter[str]:
        limits = limits_of(
            schedule.local_tokens, policy=schedule.policy, queue_timeout_s=LIMIT_S, request_timeout_s=LIMIT_S
        )
        async with cluster(schedule.num_routers, limits, schedule.seed) as made:
            prepare(made)
            run = Run(made, schedule)
            await run.to_the_end()
            return run.happened

    return run_virtual(main, 4 * LIMIT_S)


def carry_out_all(seeds: Iterable[int]) -> Counter[str]:
    """Raises naming the first seed that went wrong, and how to see it again."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += carry_out(draw(seed))
        except BaseException as error:
            again = f"from tests.router_schedules import *; carry_out(draw({seed}))"
            raise AssertionError(f"schedule {seed} went wrong; again: .venv/bin/python -c '{again}'") from error
    return happened


assert CALM_S > VERDICT_S

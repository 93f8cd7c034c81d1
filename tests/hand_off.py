"""What the tests of the hand-off share: right answers, counters, lives of a worker, and a reader that takes its time."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from kvferry.engine.engine import Engine, fake_engine
from kvferry.engine.fake import KV_BYTES, fake_answer, kv_of
from kvferry.errors import BadFrame
from kvferry.kv.block_id import chain, chain_root
from kvferry.kv.frame import check_block, unpack_header
from kvferry.kv.road import Inlet, Road, known_roads
from kvferry.messages import FetchEnd, FetchMeet, FetchOffers, FetchOpen, Frame, Sampling
from kvferry.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker
from router.live import Live, wait_all
from tests.in_process import BLOCK, Deployment, Node, VirtualExecutor, limits_of

FETCH_ALL = limits_of(local_tokens=0)
ROADS = [known_roads()[name] for name in ("inproc", "shm", "grpc")]
roads = pytest.mark.parametrize("road", ROADS, ids=lambda road: road.name)


def prompt_of(length: int, seed: object = 1) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(1000) for k in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return fake_answer(prompt, Sampling(0, max_tokens, 0.0))


def counters(d: Deployment, name: str) -> dict[str, int]:
    return d.nodes[name].worker.body.counters.values


def num_failed_fetches(d: Deployment) -> int:
    found = [count for name in d.nodes for key, count in counters(d, name).items() if key.startswith("fetch_failed_")]
    return sum(found)


def num_held(d: Deployment, name: str) -> int:
    counts = d.nodes[name].worker.body.pool.counts
    return counts.num_live + counts.num_filling


def tokens_of(live: Live) -> list[int]:
    return live.journal.choices[0].tokens


def evict_all(d: Deployment, *names: str) -> None:
    for name in names:
        d.nodes[name].worker.body.pool.evict_all()


async def answered(d: Deployment, prompt: list[int], max_tokens: int = 4, **more: Any) -> Live:
    """A finished request whose tokens are right."""
    live = d.submit(prompt, max_tokens, **more)
    await wait_all([live])
    assert [choice.tokens for choice in live.journal.choices] == [expected(prompt, max_tokens)] * more.get("n", 1)
    return live


def start_life(d: Deployment, name: str, number: int = 1, engine: Engine | None = None, **settings: Any) -> Node:
    """A worker's life at its address; that it is refused fails nobody else."""
    engine = engine or fake_engine(400, BLOCK)
    executor = VirtualExecutor(engine.runner)
    kind = PrefillWorker if name.startswith("p") else DecodeWorker
    worker = kind(engine, executor, d.network, WorkerSettings(name, name, f"{name}-{number}", ("router",), **settings))
    d.network.listen(name, worker)
    d.nodes[name] = Node(worker, executor, asyncio.ensure_future(worker.run()), engine)
    return d.nodes[name]


def small(road: Road, num_blocks: int = 3) -> Road:
    """The same, with few blocks a frame."""
    return replace(road, frame_bytes=num_blocks * BLOCK * KV_BYTES)


def blocks_of(tokens: list[int]) -> list[bytes]:
    content, previous = b"", b""
    for token in tokens:
        previous = kv_of(previous, token)
        content += previous
    return [content[at : at + BLOCK * KV_BYTES] for at in range(0, len(content), BLOCK * KV_BYTES)]


POISON = [13] * BLOCK


class PoisonedRunner:
    """Every step with a chunk that holds a whole block of token 13 fails."""

    def __init__(self, engine: Engine):
        self._runner = engine.runner

    def run(self, plan: Any) -> Any:
        if any(chunk.tokens.count(13) >= BLOCK for chunk in plan.chunks):
            raise RuntimeError("thirteen is too much")
        return self._runner.run(plan)


def poisoned() -> Engine:
    engine = fake_engine(400, BLOCK)
    return replace(engine, runner=PoisonedRunner(engine))


class SlowReader:
    """Takes one chain from p1 by hand, at whatever pace the test likes."""

    def __init__(self, d: Deployment, road: Road, tokens: list[int], hold_only: bool = False):
        self._network, self._engine = d.network, d.nodes["p1"].engine
        self._road, self._tokens, self._hold_only = road, tokens, hold_only
        self.block_ids = chain(chain_root("fake-1000", "uint8"), tokens, BLOCK)
        self.next_block = 0

    async def open(self) -> None:
        meeting = self._network.fetch("p1")
        await meeting.send(FetchMeet("fake-1000", "uint8"))
        offers = await meeting.receive()
        meeting.close()
        assert isinstance(offers, FetchOffers)
        detail = next(offer.detail for offer in offers.offers if offer.road == self._road.name)
        self._inlet: Inlet = await self._road.enter(detail, b"t" * 16)
        self.stream = self._network.fetch("p1")
        opening = FetchOpen("fake-1000", "uint8", tuple(self._tokens), hold_only=self._hold_only)
        await self.stream.send(replace(opening, road=self._road.name, ticket=b"t" * 16, incarnation=offers.incarnation))

    async def frames_within(self, seconds: float) -> list[Frame | FetchEnd]:
        """What comes, but for progress."""
        found: list[Frame | FetchEnd] = []
        try:
            async with asyncio.timeout(seconds):
                while not found or isinstance(found[-1], Frame):
                    message = await self.stream.receive()
                    found += [message] if isinstance(message, Frame | FetchEnd) else []
        except TimeoutError:
            pass
        return found

    async def copy(self, frame: Frame) -> tuple[list[bytes], int]:
        """The blocks whose digest fits, and how many do not have one that does."""
        form = self._engine.memory.format
        blocks = unpack_header(frame.header, form, self.next_block, self.block_ids)
        self.next_block += len(blocks)
        await self._inlet.arrive(frame, len(blocks), form.block_bytes)
        good, num_bad = list[bytes](), 0
        for number, block in enumerate(blocks):
            copy = bytearray(form.block_bytes)
            self._inlet.copy(number, memoryview(copy))
            try:
                check_block(block, memoryview(copy))
                good.append(bytes(copy))
            except BadFrame:
                num_bad += 1
        return good, num_bad

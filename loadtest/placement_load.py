"""Placement and its index under the load of a large deployment: a thousand workers, millions of blocks, long prompts.

The index is told of every eighth point of a chain and of its end. Chains begin with prefixes that many share. Ids are random: what
hashing a prompt costs is measured apart. Knows of what it drives only the Protocol; is to run in a process of its own, since the
index's size is read off the process's.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from loadtest.report import percentile
from loadtest.router_figures import (
    EVENTS_PER_S,
    MAX_ENTRY_BYTES,
    MAX_EVENTS_CORE_SHARE,
    MAX_PLACE_US,
    RouterFigure,
)

ID_BYTES = 16
PROMPT_TOKENS = 8192
PROMPT_BLOCKS = PROMPT_TOKENS // 16
NUM_FAMILIES, MAX_FAMILY_BLOCKS = 2000, 128
NUM_SAMPLES, NUM_PLACED, NUM_WARM = 1000, 2000, 50
NUM_HASHED, VOCABULARY = 500, 128_000
MESSAGE_POINTS = 200
NUM_MESSAGES = 1000


class PlacementUnderTest(Protocol):
    """Workers are numbers from 0."""

    def apply_events(self, worker: int, sealed: Sequence[bytes], evicted: Sequence[bytes]) -> None: ...

    def hash(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """The ids of a prompt's whole blocks."""
        ...

    def prepare(self, block_ids: Sequence[bytes]) -> Any:
        """What is made of a prompt's whole blocks once, where they are hashed: not measured, as hashing is not."""
        ...

    def place(self, prepared: Any) -> Any:
        """Decides where that prompt goes."""
        ...

    def note(self, prepared: Any, placement: Any) -> None:
        """What remains to be done for those that are placed after it; measured apart."""
        ...


@dataclass(frozen=True, slots=True)
class PlacementScale:
    num_workers: int = 1000
    num_blocks: int = 10_000_000
    """Held by all workers together."""
    announce_every: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlacementMeasurement:
    hash_s: list[float]
    place_s: list[float]
    note_s: list[float]
    num_entries: int
    """Points announced: pairs of a worker and an id."""
    num_blocks: int
    index_bytes: int
    event_s: float
    """Processor seconds of `num_event_points`, in messages of one worker each."""
    num_event_points: int
    blocks_per_point: float


def points_of(chain: Sequence[bytes], every: int) -> list[bytes]:
    """What a worker announces of a chain that it holds."""
    points = list(chain[every - 1 :: every])
    return points if len(chain) % every == 0 else [*points, chain[-1]]


class Chains:
    """Chains of ids, each a family's first blocks and more of its own."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._families = [self.fresh(MAX_FAMILY_BLOCKS) for _ in range(NUM_FAMILIES)]

    def fresh(self, count: int) -> list[bytes]:
        raw = self._rng.randbytes(ID_BYTES * count)
        return [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]

    def next(self, num_blocks: int = 0) -> list[bytes]:
        family = self._families[self._rng.randrange(NUM_FAMILIES)]
        num_shared = self._rng.randrange(0, MAX_FAMILY_BLOCKS + 1, 8)
        size = num_blocks or self._rng.randrange(MAX_FAMILY_BLOCKS, PROMPT_BLOCKS + 1)
        return family[:num_shared] + self.fresh(size - num_shared)


def measure_placement(
    new_index: Callable[[int], PlacementUnderTest], scale: PlacementScale = PlacementScale()
) -> PlacementMeasurement:
    """Takes half a minute and a gigabyte or two at full scale."""
    rng = random.Random(scale.seed)
    chains = Chains(rng)
    samples = [chains.next() for _ in range(NUM_SAMPLES)]
    messages = list(_messages(chains, scale, rng))
    prompts = [_prompt(samples, chains, rng) for _ in range(NUM_PLACED + NUM_WARM)]
    gc.collect()
    before = _rss_bytes()
    index = new_index(scale.num_workers)
    num_entries, num_blocks = _fill(index, chains, samples, scale, rng)
    gc.collect()
    index_bytes = _rss_bytes() - before
    gc.freeze()  # as the router's process does
    gc.set_threshold(20_000, 20, 20)
    times = [_place(index, prompt) for prompt in prompts][NUM_WARM:]
    hash_s = [_hash(index, rng) for _ in range(NUM_HASHED)]
    began = time.process_time()
    for worker, sealed, evicted in messages:
        index.apply_events(worker, sealed, evicted)
    event_s = time.process_time() - began
    num_points = sum(len(sealed) + len(evicted) for _, sealed, evicted in messages)
    return PlacementMeasurement(
        hash_s,
        [place_s for place_s, _ in times],
        [note_s for _, note_s in times],
        num_entries,
        num_blocks,
        index_bytes,
        event_s,
        num_points,
        num_blocks / num_entries,
    )


def _rss_bytes() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def _fill(
    index: PlacementUnderTest, chains: Chains, samples: list[list[bytes]], scale: PlacementScale, rng: random.Random
) -> tuple[int, int]:
    """Entries and blocks: each worker has its share of them, the samples are spread over the workers."""
    num_entries = num_blocks = 0
    by_worker: dict[int, list[list[bytes]]] = {}
    for sample in samples:
        by_worker.setdefault(rng.randrange(scale.num_workers), []).append(sample)
    for worker in range(scale.num_workers):
        held, own = set[bytes](), by_worker.get(worker, [])
        num_held = 0
        while num_held < scale.num_blocks // scale.num_workers:
            chain = own.pop() if own else chains.next()
            points = [point for point in points_of(chain, scale.announce_every) if point not in held]
            held.update(points)
            num_held += len(points) * scale.announce_every
            index.apply_events(worker, points, ())
        num_entries, num_blocks = num_entries + len(held), num_blocks + num_held
    return num_entries, num_blocks


def _prompt(samples: list[list[bytes]], chains: Chains, rng: random.Random) -> list[bytes]:
    """One in five knows nobody; two in five share a family's prefix; two in five go on with what some worker holds."""
    kind = rng.random()
    if kind < 0.2:
        return chains.fresh(PROMPT_BLOCKS)
    if kind < 0.6:
        return chains.next(PROMPT_BLOCKS)
    sample = rng.choice(samples)
    return sample + chains.fresh(PROMPT_BLOCKS - len(sample))


def _messages(
    chains: Chains, scale: PlacementScale, rng: random.Random
) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """Each worker in its turn seals, and evicts what it sealed in the turn before."""
    last: dict[int, list[bytes]] = {}
    for _ in range(NUM_MESSAGES):
        worker = rng.randrange(min(scale.num_workers, NUM_MESSAGES // 4))
        sealed: list[bytes] = []
        while len(sealed) < MESSAGE_POINTS // 2:
            sealed += points_of(chains.fresh(PROMPT_BLOCKS), scale.announce_every)
        yield worker, sealed, last.get(worker, [])
        last[worker] = sealed


def _hash(index: PlacementUnderTest, rng: random.Random) -> float:
    """Seconds."""
    tokens = rng.choices(range(VOCABULARY), k=PROMPT_TOKENS)
    began_s = time.perf_counter()
    index.hash(tokens)
    return time.perf_counter() - began_s


def _place(index: PlacementUnderTest, prompt: list[bytes]) -> tuple[float, float]:
    """Seconds of placing and of noting it."""
    prepared = index.prepare(prompt)
    began_s = time.perf_counter()
    placement = index.place(prepared)
    placed_s = time.perf_counter()
    index.note(prepared, placement)
    return placed_s - began_s, time.perf_counter() - placed_s


def figures_of(measured: PlacementMeasurement) -> list[RouterFigure]:
    median_us, p99_us = (percentile(measured.place_s, share) * 1e6 for share in (50, 99))
    hash_median_us, hash_p99_us = (percentile(measured.hash_s, share) * 1e6 for share in (50, 99))
    points_per_s = measured.num_event_points / max(measured.event_s, 1e-9)
    share = EVENTS_PER_S / measured.blocks_per_point / points_per_s
    size = (
        f"{measured.num_entries:,} entries for {measured.num_blocks:,} blocks, {measured.index_bytes / 2**20:,.0f} MiB"
    )
    rate = f"{points_per_s:,.0f} points/s a core, {measured.blocks_per_point:.1f} blocks each"
    return [
        RouterFigure("hash_p50", hash_median_us, "us", note="the block ids of 8,192 tokens, once for each prompt"),
        RouterFigure("hash_p99", hash_p99_us, "us", note=f"of {len(measured.hash_s):,}"),
        RouterFigure("place_p50", median_us, "us", note="prompts of 8,192 tokens; their hashing apart"),
        RouterFigure("place_p99", p99_us, "us", at_most=MAX_PLACE_US, note=f"of {len(measured.place_s):,}"),
        RouterFigure(
            "note_p99", percentile(measured.note_s, 99) * 1e6, "us", note="what each leaves for the next ones"
        ),
        RouterFigure(
            "entry_bytes", measured.index_bytes / measured.num_entries, "bytes", at_most=MAX_ENTRY_BYTES, note=size
        ),
        RouterFigure(
            "events_core_share",
            share,
            "cores",
            at_most=MAX_EVENTS_CORE_SHARE,
            note=f"{EVENTS_PER_S:,} blocks/s; {rate}",
        ),
        RouterFigure(
            "points_core_share",
            EVENTS_PER_S / points_per_s,
            "cores",
            note=f"were every block announced: {EVENTS_PER_S:,} points/s",
        ),
    ]

"""Times steps of a real engine on the peers' workloads: `prefill_N` is one prompt of N tokens, `decode_cC_bB` one step of B sequences
that hold C tokens each. Random token ids; medians; the machine should be otherwise idle.

Beside each figure stands its floor: the bytes that must be read at the memory bandwidth, or the operations at the matrix rate, that
this machine reaches in the same run, whichever takes longer.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.load import load_engine
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.shape import BYTES_PER_NUMBER, ModelShape, read_shape

PREFILLS = (128, 1024)
DECODES = tuple((context, batch) for context in (128, 1024) for batch in (1, 8, 16))
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one thread reaches here."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    workload: str
    num_tokens: int
    step_s: float
    floor_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def share(self) -> float:
        """Of the floor: 1 is as fast as the machine can."""
        return self.floor_s / self.step_s


def measure_ceilings() -> Ceilings:
    """Reading 256 MiB (a sum), and a float32 product of 1024 rows (torch's BLAS), each at its best of five."""
    data = torch.ones(64 * 1024 * 1024)
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    return Ceilings(data.nbytes / _best(data.sum), 2 * 1024**3 / _best(lambda: left @ right))


def _best(work: object, times: int = 5) -> float:
    assert callable(work)
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(directory: Path, weights: str, num_threads: int) -> Iterator[Figure]:
    shape = read_shape(str(directory))
    torch.set_num_threads(num_threads)
    ceilings = measure_ceilings()
    engine = load_engine(directory, 20 * 1024, num_threads=num_threads, weights=weights)
    for length in PREFILLS:
        plan = Plan(1, (_chunk(0, length, 0, 1),))
        seconds = _median(engine, plan, 3)
        yield Figure(f"prefill_{length}", length, seconds, _floor_s(shape, weights, ceilings, length, 0, 1))
    for context, batch in DECODES:
        per_sequence = -(-(context + 1) // engine.identity.block_size)
        for number in range(batch):
            engine.runner.run(Plan(1, (_chunk(number, context, 0, 1 + number * per_sequence),)))
        chunks = tuple(_chunk(number, 1, context, 1 + number * per_sequence) for number in range(batch))
        seconds = _median(engine, Plan(1, chunks), REPEATS)
        yield Figure(
            f"decode_c{context}_b{batch}", batch, seconds, _floor_s(shape, weights, ceilings, batch, context, batch)
        )


def _chunk(number: int, length: int, start: int, first_slot: int, block_size: int = 16) -> Chunk:
    rng = random.Random(f"{number} {start}")
    tokens = tuple(rng.randrange(100, 49_000) for _ in range(length))
    slots = tuple(range(first_slot, first_slot + -(-(start + length) // block_size)))
    return Chunk(number, tokens, start, slots, Draw(GREEDY))


def _median(engine: Engine, plan: Plan, times: int) -> float:
    engine.runner.run(plan)
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        engine.runner.run(plan)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _floor_s(shape: ModelShape, weights: str, ceilings: Ceilings, rows: int, context: int, num_logits: int) -> float:
    """Weights and KV read once, or every multiplication done; the output layer is counted for the rows that want logits."""
    output_layer = shape.vocabulary_size * shape.hidden_size
    projections = shape.num_weights - output_layer * (1 if shape.is_tied else 2)
    num_bytes = (projections + output_layer) * BYTES_PER_NUMBER[weights] + rows * context * shape.kv_bytes_per_token(
        "float32"
    )
    seen = context if context else rows / 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * seen
    flops = 2 * (projections * rows + output_layer * num_logits) + attention * rows
    return max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)

"""Times steps of a real engine on the peers' workloads: `prefill_N` is one prompt of N tokens, `decode_cC_bB` one step of B sequences
that hold C tokens each. Tokens are the likeliest, in the last workload, which no peer has, drawn with a nucleus and a penalty. Random
token ids; medians; the machine should be otherwise idle.

Beside each figure stands its floor: the bytes that must be read at the memory bandwidth, or the operations at the matrix rate, that
this machine reaches in the same run, whichever takes longer.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvferry.engine.engine import Engine
from kvferry.engine.history import History
from kvferry.engine.load import EngineSettings, load_engine
from kvferry.engine.native.decoder import NativeRunner
from kvferry.engine.native.library import PARTS
from kvferry.engine.plan import GREEDY, Chunk, Draw, Plan
from kvferry.engine.roofline import Ceilings, measure_ceilings, measure_device_ceilings
from kvferry.errors import ConfigurationError
from kvferry.messages import Sampling

PREFILLS = (128, 1024)
DECODES = tuple((context, batch) for context in (128, 1024) for batch in (1, 8, 16))
SAMPLED = (128, 16)
DRAWN = Sampling(seed=1, max_tokens=1, temperature=0.8, top_p=0.95, repetition_penalty=1.1)
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Figure:
    workload: str
    num_tokens: int
    step_s: float
    floor_s: float
    flops_per_s: float
    bytes_per_s: float
    ceilings: Ceilings
    part_s: dict[str, float]
    """Of a step, by part, where the engine tells."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def outside_share(self) -> float | None:
        """Of a step: what is neither a matrix product nor attention."""
        if not self.part_s:
            return None
        inside_s = sum(self.part_s[name] for name in ("projections", "attention", "output layer"))
        return max(1 - inside_s / sum(self.part_s.values()), 0.0)

    @property
    def bound_by(self) -> str:
        """Which of the two ceilings is nearer."""
        compute, memory = self.flops_per_s / self.ceilings.flops_per_s, self.bytes_per_s / self.ceilings.bytes_per_s
        return "compute" if compute > memory else "memory"

    @property
    def share(self) -> float:
        """Of the floor: 1 is as fast as the machine can."""
        return self.floor_s / self.step_s


def measure(directory: Path, weights: str, kv: str, num_threads: int, device: str = "cpu") -> Iterator[Figure]:
    torch.set_num_threads(num_threads)
    settings = EngineSettings(20 * 1024, num_threads=num_threads, weights=weights, kv=kv, device=device)
    engine = load_engine(directory, settings)
    kind = engine.costs.weights
    ceilings = measure_ceilings(kind) if device == "cpu" else measure_device_ceilings(kind, device)
    longest = max(*PREFILLS, *(context + 1 for context, _ in DECODES))
    if engine.identity.context_tokens < longest:
        raise ConfigurationError(
            f"the model's context is {engine.identity.context_tokens}, the workloads need {longest}"
        )
    for length in PREFILLS:
        plan = Plan(1, (_chunk(engine, 0, length, 0, 1),))
        yield _figure(f"prefill_{length}", engine, plan, 3, ceilings)
    for context, batch in DECODES:
        plan = _decode_plan(engine, context, batch)
        yield _figure(f"decode_c{context}_b{batch}", engine, plan, REPEATS, ceilings)
    context, batch = SAMPLED
    plan = _decode_plan(engine, context, batch, DRAWN)
    yield _figure(f"sampled_c{context}_b{batch}", engine, plan, REPEATS, ceilings)


def _decode_plan(engine: Engine, context: int, batch: int, sampling: Sampling = GREEDY) -> Plan:
    """A step of sequences whose context has been computed."""
    per_sequence = -(-(context + 1) // engine.identity.block_size)
    chunks = list[Chunk]()
    for number in range(batch):
        before = _chunk(engine, number, context, 0, 1 + number * per_sequence)
        engine.runner.run(Plan(1, (before,)))
        last = _chunk(engine, number, 1, context, 1 + number * per_sequence)
        history = History((*before.tokens, *last.tokens), context + 1)
        chunks.append(replace(last, draw=Draw(sampling, history=history)))
    return Plan(1, tuple(chunks))


def _figure(workload: str, engine: Engine, plan: Plan, times: int, ceilings: Ceilings) -> Figure:
    step_s, part_s = _time(engine, plan, times)
    work = engine.costs.of_plan(plan)
    return Figure(
        workload,
        plan.num_tokens,
        step_s,
        work.floor_s(ceilings),
        work.flops / step_s,
        work.num_bytes / step_s,
        ceilings,
        part_s,
    )


def _chunk(engine: Engine, number: int, length: int, start: int, first_slot: int) -> Chunk:
    rng = random.Random(f"{number} {start}")
    tokens = tuple(rng.randrange(engine.identity.vocabulary_size) for _ in range(length))
    slots = tuple(range(first_slot, first_slot + -(-(start + length) // engine.identity.block_size)))
    return Chunk(number, tokens, start, slots, Draw(GREEDY))


def _time(engine: Engine, plan: Plan, times: int) -> tuple[float, dict[str, float]]:
    """The median step, and the mean of each part; what the engine's parts do not account for is "python"."""
    runner = engine.runner
    runner.run(plan)
    parts = runner.part_seconds if isinstance(runner, NativeRunner) else None
    before = None if parts is None else parts.copy()
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        runner.run(plan)
        seconds.append(time.perf_counter() - began)
    if parts is None or before is None:
        return statistics.median(seconds), {}
    mean = {name: float(value) / times for name, value in zip(PARTS, parts - before, strict=True)}
    return statistics.median(seconds), {**mean, "python": sum(seconds) / times - sum(mean.values())}

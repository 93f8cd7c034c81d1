"""An engine that takes a model's time and none of its work: shapes on accelerators that are not here.

The worker programs, schedulers, pool, roads and wire are the real ones; the model is kvferry/engine/fake.py, whose next token derives
from the KV bytes that it holds. A step takes the time of a roofline (operations at the accelerator's rate, bytes at its bandwidth,
whichever is longer, at the share of both that good kernels reach, plus a fixed time for launching it), and blocks leave the worker as
fast as its link would move the shape's true bytes.
"""

import asyncio
from dataclasses import dataclass

from kvferry.engine.engine import WARM_UP_TOKENS, Engine, fake_engine
from kvferry.engine.plan import Chunk, Plan, Runner, StepResult
from kvferry.engine.roofline import BYTES_PER_WEIGHT, Ceilings, StepCosts
from kvferry.errors import ConfigurationError
from kvferry.shape import ModelShape

HERE = "here"
"""The machine that this runs on, as measured by kvferry/engine/roofline.py."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks from its maker's data sheet (dense 16-bit operations), and what of them a step reaches."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """Of the network card next to it."""
    flops_share: float = 0.6
    bytes_share: float = 0.75
    step_s: float = 0.0005
    """Of a step, however small: launching kernels, sampling."""

    @property
    def reached(self) -> Ceilings:
        return Ceilings(self.flops_per_s * self.flops_share, self.bytes_per_s * self.bytes_share)


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator("l4", 121e12, 0.3e12, 24e9, 3e9),
        Accelerator("a100", 312e12, 2.0e12, 80e9, 25e9),
        Accelerator("h100", 989e12, 3.35e12, 80e9, 50e9),
        Accelerator("h200", 989e12, 4.8e12, 141e9, 50e9),
        Accelerator("b200", 2250e12, 8.0e12, 192e9, 50e9),
    )
}


def accelerator_called(name: str) -> Accelerator:
    """Raises ConfigurationError."""
    if name == HERE:
        from kvferry.engine.roofline import measure_ceilings

        here = measure_ceilings()
        return Accelerator(HERE, here.flops_per_s, here.bytes_per_s, 8e9, 2e9, 0.9, 0.9)
    if name not in ACCELERATORS:
        raise ConfigurationError(f"unknown accelerator {name!r}; known: {', '.join([*ACCELERATORS, HERE])}")
    return ACCELERATORS[name]


def costs_of(shape: ModelShape, weights: str = "float16", kv: str = "float16") -> StepCosts:
    """Of a decoder of the Llama family."""
    output = shape.vocabulary_size * shape.hidden_size
    embeddings = output * (1 if shape.is_tied else 2)
    return StepCosts(
        num_projection_weights=shape.num_weights - embeddings,
        num_output_weights=output,
        bytes_per_weight=BYTES_PER_WEIGHT[weights],
        kv_bytes_per_token=shape.kv_bytes_per_token(kv),
        flops_per_key=4.0 * shape.num_layers * shape.num_heads * shape.head_size,
    )


def kv_tokens_of(shape: ModelShape, accelerator: Accelerator) -> int:
    """That fit beside 16-bit weights. Raises ConfigurationError."""
    room = accelerator.memory_bytes * 0.9 - shape.weight_bytes("float16")
    if room <= 0:
        raise ConfigurationError(f"the weights of {shape.name} do not fit into the memory of {accelerator.name}")
    return int(room / shape.kv_bytes_per_token("float16"))


class PacedLink:
    """The worker's way out: one block after the other, each as long as the shape's true bytes would take."""

    def __init__(self, bytes_per_s: float, block_bytes: float):
        self._block_s = block_bytes / bytes_per_s
        self._free_at = 0.0

    async def pass_blocks(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + count * self._block_s
        await asyncio.sleep(self._free_at - loop.time())


def step_s(plan: Plan, costs: StepCosts, accelerator: Accelerator) -> float:
    return costs.of_plan(plan).floor_s(accelerator.reached) + accelerator.step_s


class SimExecutor:
    """Runs the fake step at once and lets the rest of the modelled time pass; in virtual time, too."""

    def __init__(self, runner: Runner, costs: StepCosts, accelerator: Accelerator):
        self._runner, self._costs, self._accelerator = runner, costs, accelerator

    async def execute(self, plan: Plan) -> StepResult:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + step_s(plan, self._costs, self._accelerator)
        result = self._runner.run(plan)
        await asyncio.sleep(max(ends_at - loop.time(), 0.0))
        return result

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class SimWorker:
    """What a worker program is made of."""

    engine: Engine
    executor: SimExecutor
    ceilings: Ceilings


def sim_worker(
    shape: ModelShape,
    accelerator: Accelerator,
    kv_tokens: int = 0,
    block_size: int = 16,
    context_tokens: int = 0,
    vocabulary_size: int = 0,
) -> SimWorker:
    """16-bit weights and KV. `vocabulary_size`: of the tokenizer in front of it; 0: the shape's. Raises ConfigurationError."""
    most, costs = kv_tokens_of(shape, accelerator), costs_of(shape)
    tokens = kv_tokens or most
    warm_up = Plan(0, (Chunk(0, (0,) * WARM_UP_TOKENS, 0, ()),))
    engine = fake_engine(
        max(tokens // block_size, 1),
        block_size,
        vocabulary_size or shape.vocabulary_size,
        context_tokens or shape.context_tokens,
        name=f"sim-{shape.name}",
        costs=costs,
        tokens_per_s=WARM_UP_TOKENS / step_s(warm_up, costs, accelerator),
        link=PacedLink(accelerator.link_bytes_per_s, costs.kv_bytes_per_token * block_size),
    )
    return SimWorker(engine, SimExecutor(engine.runner, costs, accelerator), accelerator.reached)

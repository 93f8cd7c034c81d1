"""What a worker needs of a model: what it is, where its blocks' bytes are, and who runs its steps."""

from dataclasses import dataclass
from typing import Protocol

from kvferry.engine.fake import BytesMemory, FakeRunner
from kvferry.engine.plan import Runner
from kvferry.engine.roofline import StepCosts
from kvferry.kv.memory import BlockMemory
from kvferry.worker.identity import WorkerIdentity

WARM_UP_TOKENS = 256
"""Of the step that a new engine is measured by."""


class Link(Protocol):
    """The way that blocks take out of a worker, where it is slower than what they really travel over."""

    async def pass_blocks(self, count: int) -> None:
        """Returns when so many have passed."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    identity: WorkerIdentity
    memory: BlockMemory
    runner: Runner
    num_slots: int
    """Besides the padding slot."""
    costs: StepCosts
    tokens_per_s: float
    """Of a step of WARM_UP_TOKENS: the rate that a worker's budget begins with."""
    link: Link | None = None


def fake_engine(
    num_slots: int,
    block_size: int = 16,
    vocabulary_size: int = 1000,
    context_tokens: int = 8192,
    window: int = 0,
    name: str = "fake",
    costs: StepCosts | None = None,
    tokens_per_s: float = 400.0,
    link: Link | None = None,
) -> Engine:
    """A model without weights (kvferry/engine/fake.py). `costs` and rate are those of the model that it stands for."""
    memory = BytesMemory(num_slots, block_size, fill=0 if costs else 0xAB)
    identity = WorkerIdentity(
        model_id=f"{name}-{vocabulary_size}",
        fidelity="uint8",
        numerics_id=name,
        block_size=block_size,
        block_bytes=memory.format.block_bytes,
        vocabulary_size=vocabulary_size,
        context_tokens=context_tokens,
        window=window,
    )
    costs = costs or StepCosts(1.0, 1.0, 1.0, float(memory.format.block_bytes // block_size), 1.0)
    return Engine(identity, memory, FakeRunner(memory, vocabulary_size, window), num_slots, costs, tokens_per_s, link)

"""What a worker needs of a model: what it is, where its blocks' bytes are, and who runs its steps."""

from dataclasses import dataclass

from kvferry.engine.fake import BytesMemory, FakeRunner
from kvferry.engine.plan import Runner
from kvferry.engine.roofline import StepCosts
from kvferry.kv.memory import BlockMemory
from kvferry.worker.identity import WorkerIdentity


@dataclass(frozen=True, slots=True)
class Engine:
    identity: WorkerIdentity
    memory: BlockMemory
    runner: Runner
    num_slots: int
    """Besides the padding slot."""
    costs: StepCosts


def fake_engine(
    num_slots: int, block_size: int = 16, vocabulary_size: int = 1000, context_tokens: int = 8192, window: int = 0
) -> Engine:
    """A model without weights (kvferry/engine/fake.py)."""
    memory = BytesMemory(num_slots, block_size)
    identity = WorkerIdentity(
        model_id=f"fake-{vocabulary_size}",
        fidelity="uint8",
        numerics_id="fake",
        block_size=block_size,
        block_bytes=memory.format.block_bytes,
        vocabulary_size=vocabulary_size,
        context_tokens=context_tokens,
        window=window,
    )
    costs = StepCosts(1.0, 1.0, 1.0, float(memory.format.block_bytes // block_size), 1.0)
    return Engine(identity, memory, FakeRunner(memory, vocabulary_size, window), num_slots, costs)

"""What a worker is: what two workers must share to be paired, and what its bits depend on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    model_id: str
    """Digest of the weights, their kind, the effective RoPE and the block size."""
    fidelity: str
    """How exact the KV is: "float32"."""
    numerics_id: str
    """What decides the bits: kernels, instruction set, kind of weights."""
    block_size: int
    block_bytes: int
    vocabulary_size: int
    context_tokens: int
    """Tokens of one sequence that may have KV."""
    window: int = 0
    """A position sees so many keys in every layer, its own among them; 0: all."""

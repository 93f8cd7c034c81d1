"""Where blocks' bytes are. Pool, frames and fetches see only this protocol; the engine has its implementations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CANONICAL_LAYOUT = "layer.k:head.dim.token.v:head.token.dim"
"""Keys are kept with their tokens side by side, values with their dims, so that neither is transposed for attention."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What one block's bytes are. Two workers of one model id and fidelity have equal formats."""

    dtype: str
    """numpy's name: "float32"."""
    shape: tuple[int, ...]
    """[layer, K and V, KV head, token, dim]; the layout says in which order the last two lie."""
    block_size: int
    """Tokens."""
    block_bytes: int
    layout: str = CANONICAL_LAYOUT


class BlockMemory(Protocol):
    """`num_slots` + 1 runs of `format.block_bytes` bytes in the host's memory; slot 0 is padding.

    Where steps run on a device, its blocks are there as well: who reads what steps wrote calls `to_host` before, who has written what
    steps shall read calls `filled` after. Where they are the same bytes, both do nothing.
    """

    @property
    def format(self) -> BlockFormat: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def address(self) -> int | None:
        """Where slot 0 begins in this process; the others follow. None if a process's memory is not where they are."""
        ...

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, flat, without a copy. The caller holds a reference, or fills the slot."""
        ...

    def to_host(self, slots: Sequence[int]) -> None:
        """Returns when `view` and `address` show what steps wrote. The slots are sealed, and the caller holds references."""
        ...

    def filled(self, slots: Sequence[int]) -> None:
        """The caller has written all of these slots, which it fills: a step that reads one sees that."""
        ...

"""Digests of the blocks that a worker holds: taken once, and kept for as long as the slot holds the block.

A block that came from another worker was checked when it came: whoever reads it here next costs no digest. Others are taken when they
are first sent, while they are still in the processor's cache.
"""

from collections.abc import Sequence

from kvferry.kv.frame import block_digest
from kvferry.kv.memory import BlockMemory
from kvferry.kv.pool import BlockPool
from kvferry.worker.copier import Copier


class BlockDigests:
    """Of one pool."""

    def __init__(self, pool: BlockPool, memory: BlockMemory):
        self._pool, self._memory, self._copier = pool, memory, Copier()
        self._kept: dict[int, tuple[int, bytes]] = {}  # by slot, with the number of the seal

    def keep(self, block_id: bytes, slot: int, digest: bytes) -> None:
        """Of a block that was checked and sealed there, unless another slot had it before."""
        if self._pool.slot_of(block_id) == slot:
            self._kept[slot] = self._pool.seal_number(slot), digest

    def of(self, block_ids: Sequence[bytes], slots: Sequence[int]) -> list[bytes]:
        """Sealed blocks; their bytes are on the host."""
        missing = [k for k in range(len(slots)) if not self._is_known(slots[k])]

        def take(number: int) -> None:
            block_id, slot = block_ids[missing[number]], slots[missing[number]]
            self._kept[slot] = self._pool.seal_number(slot), block_digest(block_id, self._memory.view(slot))

        self._copier.each(take, len(missing), len(missing) * self._memory.format.block_bytes)
        return [self._kept[slot][1] for slot in slots]

    def _is_known(self, slot: int) -> bool:
        return slot in self._kept and self._kept[slot][0] == self._pool.seal_number(slot)

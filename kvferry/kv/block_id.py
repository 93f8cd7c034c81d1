"""Names of blocks: a chain of hashes over token ids, so that equal names mean equal content.

A block id is 16 bytes, `blake2b(parent id, token ids)`; the chain's root is a hash of model id, fidelity and salt. Only
content goes in: no process, no clock, no hash seed. Called by router and workers alike.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

BLOCK_ID_BYTES = 16
TOKEN_BYTES = 4
ANNOUNCED_EVERY = 8
"""Of a chain's blocks, workers tell routers of every so many, and of the last."""


def chain_root(model_id: str, fidelity: str, salt: bytes = b"") -> bytes:
    """The parent of a chain's first block."""
    root = blake2b(digest_size=BLOCK_ID_BYTES, person=b"kvferry.root")
    for part in (model_id.encode(), fidelity.encode(), salt):
        root.update(struct.pack("<Q", len(part)))
        root.update(part)
    return root.digest()


def extend_chain(ids: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Appends to `ids` the ids of the whole blocks of `tokens` that it lacks, and returns it."""
    parent = ids[-1] if ids else root
    fresh = tokens[len(ids) * block_size : len(tokens) // block_size * block_size]
    packed, num_bytes = struct.pack(f"<{len(fresh)}I", *fresh), block_size * TOKEN_BYTES
    for start in range(0, len(packed), num_bytes):
        parent = blake2b(parent + packed[start : start + num_bytes], digest_size=BLOCK_ID_BYTES).digest()
        ids.append(parent)
    return ids


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The ids of the whole blocks of `tokens`: len(tokens) // block_size of them."""
    return extend_chain([], root, tokens, block_size)


T = TypeVar("T")


def announced(chain_of: Sequence[T]) -> list[T]:
    """What of a chain (of ids, or of whatever stands for them) is told; the last may be there twice."""
    return [*chain_of[ANNOUNCED_EVERY - 1 :: ANNOUNCED_EVERY], *chain_of[-1:]]


def num_whole_blocks_before_tail(num_tokens: int, block_size: int) -> int:
    """Blocks that may travel: all whole ones that leave a tail of 1 to `block_size` tokens."""
    return max(num_tokens - 1, 0) // block_size

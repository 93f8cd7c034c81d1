"""Block memory in a torch tensor, one slot's KV of all layers in one run, in the canonical layout of kvferry/kv/memory.py."""

import contextlib
import logging
import math
import mmap

import torch

from kvferry.kv.memory import BlockFormat
from kvferry.kv.shared_pages import SharedPages

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchMemory:
    """`num_slots` slots besides the padding slot 0. Pages are only taken when they are written."""

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: str = "float32",
    ):
        """`dtype` is float32 or bfloat16."""
        shape = (num_layers, 2, num_kv_heads, block_size, head_size)
        numbers = (num_slots + 1, num_layers, 2, num_kv_heads, block_size * head_size)
        count, kind = math.prod(numbers), DTYPES[dtype]
        self.shared_pages = _share(count * kind.itemsize)
        mapped = self.shared_pages.mapped if self.shared_pages else _own_pages(count * kind.itemsize)
        self.blocks = torch.frombuffer(mapped, dtype=kind, count=count).view(numbers)
        self.keys = self.blocks[:, :, 0].unflatten(-1, (head_size, block_size))
        """[slot, layer, KV head, dim, token]"""
        self.values = self.blocks[:, :, 1].unflatten(-1, (block_size, head_size))
        """[slot, layer, KV head, token, dim]"""
        self.format = BlockFormat(dtype, shape, block_size, self.blocks[0].numel() * self.blocks.element_size())
        self._bytes = memoryview(self.blocks.view(torch.uint8).numpy().reshape(-1).data)

    def view(self, slot: int) -> memoryview:
        size = self.format.block_bytes
        return self._bytes[slot * size : (slot + 1) * size]


def _share(num_bytes: int) -> SharedPages | None:
    try:
        return SharedPages(num_bytes)
    except (OSError, AttributeError) as error:  # no memfd, or none of this size
        logger.warning("blocks cannot be read through shared memory here: %s", error)
        return None


def _own_pages(num_bytes: int) -> mmap.mmap:
    """Pages that are taken when they are first touched; large ones where the system has them, as blocks lie anywhere."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped

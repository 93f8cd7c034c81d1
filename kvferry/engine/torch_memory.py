"""Block memory in a torch tensor, one slot's KV of all layers in one run, in the canonical layout of kvferry/kv/memory.py."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.pages import map_pages
from kvferry.kv.memory import BlockFormat

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """Its name in DTYPES."""
    return next(name for name, known in DTYPES.items() if known == dtype)


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
        """`dtype` is one of DTYPES."""
        shape = (num_layers, 2, num_kv_heads, block_size, head_size)
        numbers = (num_slots + 1, num_layers, 2, num_kv_heads, block_size * head_size)
        pages = map_pages(math.prod(numbers) * DTYPES[dtype].itemsize)  # large ones pay: blocks lie anywhere
        self.blocks = torch.frombuffer(pages, dtype=DTYPES[dtype]).view(numbers)
        self.keys, self.values = keys_and_values(self.blocks, block_size)
        self.format = BlockFormat(dtype, shape, block_size, self.blocks[0].numel() * self.blocks.element_size())
        self.num_slots = num_slots
        self.address: int | None = self.blocks.data_ptr()
        self._bytes = memoryview(self.blocks.view(torch.uint8).numpy().reshape(-1).data)

    def view(self, slot: int) -> memoryview:
        size = self.format.block_bytes
        return self._bytes[slot * size : (slot + 1) * size]

    def to_host(self, slots: Sequence[int]) -> None:
        """Steps run over these very bytes."""

    def filled(self, slots: Sequence[int]) -> None:
        """Steps run over these very bytes."""

    def begin_step(self, read: npt.NDArray[np.int32], written: npt.NDArray[np.int32]) -> None:
        """Nothing is anywhere else."""

    def end_step(self) -> None:
        """A step has written when it returns."""


def keys_and_values(blocks: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of [slot, layer, K and V, KV head, numbers]: [slot, layer, KV head, dim, token] and [..., token, dim]."""
    dim = blocks.shape[-1] // block_size
    return blocks[:, :, 0].unflatten(-1, (dim, block_size)), blocks[:, :, 1].unflatten(-1, (block_size, dim))

"""Block memory of a worker whose steps run on a device: the blocks there, and a mirror of them in the host's memory.

Roads, digests and frames see the mirror alone (kvferry/kv/memory.py), steps the device's blocks alone; both have the canonical layout.
For each slot it is known which side has bytes that the other lacks, and they are copied when somebody is about to look at them, those
of a frame or a step together. Works on any torch device, the CPU's too, where both sides are still two. Knows no pool and no road.
"""

import contextlib
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.torch_memory import DTYPES, TorchMemory, keys_and_values
from kvferry.errors import ConfigurationError, EngineLost


class Newer(IntEnum):
    """Which side of a slot has bytes that the other lacks."""

    NEITHER = 0
    HOST = 1
    """A reader has filled it."""
    DEVICE = 2
    """A step has written into it."""


class DeviceMemory:
    """`num_slots` slots besides the padding slot 0, on `device` and in the host's memory.

    Two threads use it without a lock. The event loop names sealed slots (`to_host`) and such as a fetch fills (`filled`), the step's
    thread those of its plan. No step writes into a sealed slot, and none names a slot that a fetch fills; so a slot's state is never
    changed by both at once. `end_step` returns when the device has done all of the step: what is sealed then is written, and copying
    it, on a stream of its own, neither waits for the step that runs meanwhile nor meets its writes.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: str,
        device: torch.device,
    ):
        """`dtype` is one of DTYPES. Raises ConfigurationError if the host cannot lock so much memory."""
        self._mirror = TorchMemory(num_slots, num_layers, num_kv_heads, block_size, head_size, dtype)
        self.blocks = torch.zeros(self._mirror.blocks.shape, dtype=DTYPES[dtype], device=device)
        self.keys, self.values = keys_and_values(self.blocks, block_size)
        self.format, self.num_slots, self.address = self._mirror.format, num_slots, self._mirror.address
        self._newer = np.zeros(num_slots + 1, np.int8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._lock_pages()

    def view(self, slot: int) -> memoryview:
        return self._mirror.view(slot)

    def to_host(self, slots: Sequence[int]) -> None:
        stale = [slot for slot in slots if self._newer[slot] == Newer.DEVICE]
        if not stale:
            return
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for slot in stale:
                self._mirror.blocks[slot].copy_(self.blocks[slot], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._newer[stale] = Newer.NEITHER

    def filled(self, slots: Sequence[int]) -> None:
        self._newer[list(slots)] = Newer.HOST

    def begin_step(self, read: npt.NDArray[np.int32], written: npt.NDArray[np.int32]) -> None:
        """The step's thread will look at the slots `read` and write into `written`, which are among them.

        What readers filled is on its way to the device before the step's own work.
        """
        stale = np.unique(read[self._newer[read] == Newer.HOST])
        for slot in stale.tolist():
            self.blocks[slot].copy_(self._mirror.blocks[slot], non_blocking=True)
        self._newer[stale] = Newer.NEITHER
        self._newer[written] = Newer.DEVICE

    def end_step(self) -> None:
        """Returns when the device has done all that the step's thread has told it to. Raises EngineLost if it never will."""
        if self._stream is None:
            return
        try:
            torch.cuda.current_stream(self.blocks.device).synchronize()
        except RuntimeError as error:  # an error of the device itself stays with the process for its life
            raise EngineLost(f"{self.blocks.device} does not compute any more: {error}") from error

    def _lock_pages(self) -> None:
        """So that the device copies by itself, meanwhile. They stay ordinary pages, which other processes can read (the road `shm`)."""
        address, num_bytes = self._mirror.blocks.data_ptr(), self._mirror.blocks.nbytes
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error:
            raise ConfigurationError(
                f"the host cannot lock {num_bytes:,} bytes for the pool's mirror (CUDA error {error}): lower kv_tokens"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)

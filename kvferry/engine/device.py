"""The device that a worker's steps run on, besides the CPU: which one, whether it is there, and what fits into its memory.

Knows no model but by its numbers. Whatever is not so is a ConfigurationError that says what to do, with the arithmetic.
"""

from dataclasses import dataclass

import psutil
import torch

from kvferry.errors import ConfigurationError

DEVICE_SHARE = 0.9
"""Of the device's free memory, for weights and pool; the rest is a step's own: activations, gathered keys, logits."""
HOST_SHARE = 0.5
"""Of the host's available memory, for the mirror of a pool whose size nobody has said."""


def device_called(name: str) -> torch.device:
    """`name` is "cuda" or "cuda:N". Raises ConfigurationError if it is not there."""
    device = torch.device(name)
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "has no CUDA" if built is None else f"is for CUDA {built}, and finds no device or driver"
        raise ConfigurationError(
            f"device {name!r}: torch {torch.__version__} here {why}; use --device cpu, or install a torch for this accelerator"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        known = ", ".join(f"cuda:{number}" for number in range(count))
        raise ConfigurationError(f"device {name!r}: this process sees {count}: {known}; use one of them")
    return torch.device("cuda", index)


def model_of(device: torch.device) -> str:
    """What decides its bits, besides torch: the maker's name, or the CPU's instruction set."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def refuse_dtype(device: torch.device, dtype: str) -> None:
    """Raises ConfigurationError for one that the device has only by emulation."""
    if dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigurationError(f"{device} ({model_of(device)}) does not compute in bfloat16: use float16 or float32")


def synchronize(device: torch.device) -> None:
    """Returns when it has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker finds at its start, in bytes, and what it needs."""

    device: str
    free_bytes: int
    host_bytes: int
    """Available; a pool has a mirror there."""
    weight_bytes: int
    token_bytes: int
    """KV of one token."""

    @staticmethod
    def on(device: torch.device, weight_bytes: int, token_bytes: int) -> "Room":
        host_bytes = psutil.virtual_memory().available
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes
        return Room(f"{device} ({model_of(device)})", free_bytes, host_bytes, weight_bytes, token_bytes)

    @property
    def pool_bytes(self) -> int:
        """That the device has for a pool; less than none if the weights do not fit."""
        return int(self.free_bytes * DEVICE_SHARE) - self.weight_bytes

    def tokens(self, wanted: int, block_size: int) -> int:
        """Of the pool: `wanted`, or, if that is 0, as many whole blocks' as fit. Raises ConfigurationError."""
        if self.pool_bytes < block_size * self.token_bytes:
            raise ConfigurationError(
                f"{self._arithmetic}, which leaves no block of {block_size} x {self.token_bytes:,} bytes: "
                "use --weights bfloat16 or float16, a device with more memory, or end what else runs on it"
            )
        if not wanted:
            fitting = min(self.pool_bytes, int(self.host_bytes * HOST_SHARE)) // self.token_bytes
            return max(fitting // block_size, 1) * block_size
        if wanted * self.token_bytes > self.pool_bytes:
            raise ConfigurationError(
                f"kv_tokens is {wanted:,}, which needs {self._product(wanted)}. {self._arithmetic}, which leaves "
                f"{self.pool_bytes:,}: lower kv_tokens to at most {self.pool_bytes // self.token_bytes:,}, or use a --kv of 16 bits"
            )
        if wanted * self.token_bytes > self.host_bytes:
            raise ConfigurationError(
                f"kv_tokens is {wanted:,}: the pool's mirror in the host's memory needs {self._product(wanted)}, but "
                f"{self.host_bytes:,} are available: lower kv_tokens to at most {self.host_bytes // self.token_bytes:,}"
            )
        return wanted

    def _product(self, tokens: int) -> str:
        return f"{tokens:,} x {self.token_bytes:,} = {tokens * self.token_bytes:,} bytes"

    @property
    def _arithmetic(self) -> str:
        return (
            f"{self.device}: {DEVICE_SHARE:.0%} of {self.free_bytes:,} free bytes are {int(self.free_bytes * DEVICE_SHARE):,}, "
            f"the weights take {self.weight_bytes:,}"
        )

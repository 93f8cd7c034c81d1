"""One safetensors file, mapped: its tensors are views of the file's own pages, which the system may drop and read again.

(`safe_open(...).get_tensor` copies.) The library checks the header; where each tensor lies is read from it, after the format's
description: eight bytes of length, JSON, then the bytes of all tensors.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvferry.errors import ConfigurationError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH_BYTES = 8


class SafetensorsFile:
    def __init__(self, path: Path):
        """Raises ConfigurationError, naming the file, for what is no whole safetensors file."""
        self.path = path
        try:
            with safe_open(str(path), "pt"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                header: dict[str, Any] = json.loads(file.read(length))
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise ConfigurationError(f"{path} is not a safetensors file: {error}") from error
        self._begin = LENGTH_BYTES + length
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """In the file's dtype; not to be written to."""
        entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigurationError(f"{self.path}: tensor {name} has the unknown type {entry['dtype']}")
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        if begin % dtype.itemsize:  # an odd writer's file: a view must be aligned
            raw = torch.empty(0, dtype=torch.uint8).set_(self._storage, begin, (end - begin,), (1,)).clone()
            return raw.view(dtype).view(entry["shape"])
        shape = torch.Size(entry["shape"])
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(self._storage, begin // dtype.itemsize, shape, strides)

    @cached_property
    def _storage(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.path.stat().st_size)
        assert isinstance(storage, torch.UntypedStorage)
        return storage

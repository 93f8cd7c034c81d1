"""Weights in the form that the C decoder reads: packed once at loading, slice by slice, so that little more than the result is held.

float32; float16, converted on the fly and summed in float32; bfloat16, multiplied with activations that are rounded to it; int8 in
groups with scales (`weights.h` says how). Owns the memory that the structures point into.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.checkpoint import Tensors
from kvferry.engine.native.family import DecoderConfig, NotNative
from kvferry.engine.native.library import KINDS, Layer, Library
from kvferry.engine.pages import map_pages
from kvferry.errors import ConfigurationError

LARGEST_FLOAT16 = 65504.0
SLICE_NUMBERS = 1024 * 1024
"""Numbers that are converted at a time."""
INT8_GROUP = 32
CACHE_LINE = 64
ROOM_BYTES = 64 * 1024 * 1024
"""Mapped at a time; only what is written is taken."""


class BeyondFloat16(ConfigurationError):
    """A weight that float16 cannot hold."""


class PackedWeights:
    """`layers`, `norm` and `output_layer` are addresses; `embedding` is the file's own pages."""

    def __init__(
        self, library: Library, config: DecoderConfig, tensors: Tensors, kind: str, on_progress: Callable[[float], None]
    ):
        self._library, self._tensors, self._kind = library, tensors, kind
        self._kept: list[Any] = []
        self._room, self._slice = _Room(), torch.empty(0)
        c = config
        queries, keys = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        for width in (c.hidden_size, c.intermediate_size, queries):
            if kind == "int8" and width % INT8_GROUP:
                raise NotNative(f"a width of {width} is not a multiple of {INT8_GROUP}, as int8 weights need")
        self.embedding = tensors.mapped("model.embed_tokens.weight", c.vocabulary_size, c.hidden_size)
        layers: Any = (Layer * c.num_layers)()
        for number in range(c.num_layers):
            prefix = f"model.layers.{number}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            parts = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
            layers[number] = Layer(
                input_norm=self._vector(f"{prefix}.input_layernorm.weight", c.hidden_size),
                query_key_value=self._matrix(parts, c.hidden_size),
                bias=self._bias(parts) if c.has_qkv_bias else None,
                query_norm=self._vector(f"{attention}.q_norm.weight", c.head_size) if c.has_qk_norm else None,
                key_norm=self._vector(f"{attention}.k_norm.weight", c.head_size) if c.has_qk_norm else None,
                output=self._matrix({f"{attention}.o_proj": c.hidden_size}, queries),
                post_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
                gate_up=self._matrix(
                    {f"{mlp}.gate_proj": c.intermediate_size, f"{mlp}.up_proj": c.intermediate_size}, c.hidden_size
                ),
                down=self._matrix({f"{mlp}.down_proj": c.hidden_size}, c.intermediate_size),
            )
            on_progress((number + 1) / (c.num_layers + 1))
        self.norm = self._vector("model.norm.weight", c.hidden_size)
        head = "model.embed_tokens" if c.is_tied else "lm_head"
        self.output_layer = self._matrix({head: c.vocabulary_size}, c.hidden_size)
        tensors.refuse_extra({"lm_head.weight"} if c.is_tied else set())
        self._slice = torch.empty(0)
        self._kept.append(layers)
        self.layers = ctypes.addressof(layers)
        on_progress(1.0)

    def _vector(self, name: str, size: int) -> int:
        return self._keep(self._tensors.take(name, size))

    def _bias(self, parts: dict[str, int]) -> int:
        return self._keep(torch.cat([self._tensors.take(f"{name}.bias", size) for name, size in parts.items()]))

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, parts: dict[str, int], inner: int) -> int:
        """The parts' rows, one after the other, as one packed matrix."""
        mapped = {name: self._tensors.mapped(f"{name}.weight", size, inner) for name, size in parts.items()}
        out, panel = sum(parts.values()), self._library.panel_width
        kind = KINDS[self._kind]
        packed = self._room.take(self._library.packed_bytes(out, inner, kind))
        step = max(SLICE_NUMBERS // (inner * panel), 1) * panel
        for begin in range(0, out, step):
            rows = self._rows(mapped, begin, min(begin + step, out))
            at = packed.ctypes.data + self._library.packed_bytes(begin, inner, kind)
            self._library.pack(rows.data_ptr(), rows.shape[0], inner, kind, at)
        self._kept.append(packed)
        return packed.ctypes.data

    def _rows(self, mapped: dict[str, torch.Tensor], begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of all parts together, in float32, good until the next call."""
        inner = next(iter(mapped.values())).shape[1]
        if self._slice.numel() < (end - begin) * inner:
            self._slice = torch.empty((end - begin) * inner)
        rows = self._slice[: (end - begin) * inner].view(end - begin, inner)
        filled = offset = 0
        for name, tensor in mapped.items():
            stored = tensor[max(begin - offset, 0) : max(end - offset, 0)]
            offset += tensor.shape[0]
            piece = rows[filled : filled + len(stored)].copy_(stored)
            filled += len(stored)
            lowest, highest = (float(bound) for bound in piece.aminmax()) if piece.numel() else (0.0, 0.0)
            largest = max(-lowest, highest)
            if not math.isfinite(largest):
                raise ConfigurationError(
                    f"tensor {name}.weight has values that are not finite: the checkpoint is damaged"
                )
            if self._kind == "float16" and largest > LARGEST_FLOAT16:
                raise BeyondFloat16(
                    f"weights float16: tensor {name}.weight has values beyond {LARGEST_FLOAT16:g}: use float32"
                )
        return rows


class _Room:
    """Places for matrices, each from a cache line's beginning on, so that no vector is split over two; and close together, so that
    large pages hold them."""

    def __init__(self) -> None:
        self._pages: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        whole = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if whole > self._pages.size:
            self._pages = np.frombuffer(map_pages(max(whole, ROOM_BYTES)), np.uint8)
        taken, self._pages = self._pages[:num_bytes], self._pages[whole:]
        return taken

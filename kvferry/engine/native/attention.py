"""The C kernel behind the operator `kvferry::paged_attention`, for models whose other parts run through torch.

It stands in for the reference on CPU tensors where it knows the case; soft caps, sinks and odd sizes stay with the reference.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kvferry.engine.attention import paged_attention_operator, reference_operator
from kvferry.engine.native.library import Library, Shape, Spans

VECTOR = 16


def use_native_attention(library: Library | None, num_threads: int) -> None:
    """From now on; None goes back to the reference."""
    paged_attention_operator.register_kernel("cpu")(
        reference_operator if library is None else _kernel(library, num_threads)
    )


def _kernel(library: Library, num_threads: int) -> Callable[..., torch.Tensor]:
    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        begins: torch.Tensor,
        starts: torch.Tensor,
        tables: torch.Tensor,
        table: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if softcap or sinks is not None or not _is_known(queries, keys):
            return reference_operator(
                queries, keys, values, layer, begins, starts, tables, table, scale, window, softcap, sinks
            )
        rows = queries.contiguous()
        output = torch.zeros_like(rows)
        lengths = begins.diff()
        positions = torch.arange(int(begins[-1]), dtype=torch.int32)
        positions += torch.repeat_interleave(starts - begins[:-1], lengths)
        arrays = [one.to(torch.int32).contiguous() for one in (positions, begins, tables, table)]
        spans: Any = Spans(len(starts), num_threads, *(one.data_ptr() for one in arrays), keys.data_ptr())
        _, num_layers, num_kv_heads, dim, block = keys.shape
        is_bfloat16 = keys.dtype == torch.bfloat16
        shape: Any = Shape(num_layers, rows.shape[1], num_kv_heads, dim, block, window, is_bfloat16, False, scale)
        library.paged_attention(ctypes.byref(shape), ctypes.byref(spans), layer, rows.data_ptr(), output.data_ptr())
        return output

    return attend


def _is_known(queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whole vectors, in the layout of kvferry/kv/memory.py, from the pool's first byte on."""
    _, num_layers, num_kv_heads, dim, block = keys.shape
    run = dim * block
    strides = (num_layers * 2 * num_kv_heads * run, 2 * num_kv_heads * run, run, block, 1)
    is_pool = keys.stride() == strides and keys.dtype in (torch.float32, torch.bfloat16)
    return is_pool and queries.dtype == torch.float32 and dim % VECTOR == 0 and block % VECTOR == 0

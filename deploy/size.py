"""`kvferry size`: prints the arithmetic of kvferry/shape.py."""

import json

from rich.console import Console
from rich.table import Table

from kvferry.errors import ConfigurationError
from kvferry.shape import BYTES_PER_NUMBER, human_bytes, read_shape


def print_size(model: str, context: int, requests: int, dtype: str, as_json: bool) -> None:
    if dtype not in BYTES_PER_NUMBER:
        raise ConfigurationError(f"dtype {dtype!r} is not known; known: {', '.join(BYTES_PER_NUMBER)}")
    shape = read_shape(model)
    tokens = context or shape.context_tokens
    per_token = shape.kv_bytes_per_token(dtype)
    figures = {
        "kv_bytes_per_token": per_token,
        f"kv_bytes_at_{tokens}_tokens": per_token * tokens,
        f"kv_bytes_of_{requests}_requests": per_token * tokens * requests,
        "weight_bytes": shape.weight_bytes(dtype),
    }
    if as_json:
        for figure, value in figures.items():
            print(json.dumps({"figure": figure, "value": value, "unit": "bytes", "model": shape.name, "dtype": dtype}))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", f"{shape.name}, {shape.num_weights / 1e6:,.0f} M weights, {dtype}")
    kv = f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_size} x {BYTES_PER_NUMBER[dtype]} bytes"
    table.add_row("KV per token", f"{human_bytes(per_token)}  ({kv})")
    table.add_row(f"KV at {tokens:,} tokens", human_bytes(per_token * tokens))
    table.add_row(f"KV of {requests:,} such request(s)", human_bytes(per_token * tokens * requests))
    table.add_row("weights", human_bytes(shape.weight_bytes(dtype)))
    Console(highlight=False).print(table)

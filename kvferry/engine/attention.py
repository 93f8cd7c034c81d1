"""Causal attention of some sequences' new tokens over their paged KV: the plain torch reference, for any device.

Registered as the operator `kvferry::paged_attention`, which takes tensors and numbers only; a faster kernel for one device
registers under the same name and must give the same numbers. Summed in float32, a piece of the rows at a time. Knows nothing of
models, plans or who owns a block.
"""

import math
from dataclasses import dataclass

import torch

PIECE_SCORES = 1 << 18
"""How many scores are held at once, about: they stay in a CPU's cache, and a long prompt takes no more memory."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows [begin, end) of the step, at positions `start`..., and its block table."""

    begin: int
    end: int
    start: int
    slots: torch.Tensor

    @property
    def context(self) -> int:
        return self.start + self.end - self.begin


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    spans: list[Span],
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`queries` [rows, heads, dim], `keys` [slot, layer, KV head, dim, token], `values` [slot, layer, KV head, token, dim].

    A row at position p sees the positions up to p, or (p - `window`, p] if `window` is not 0. `scale` is 1 / sqrt(dim) unless
    given. A `softcap` c that is not 0 turns a score s into c * tanh(s / c) (Gemma Team, "Gemma 2", 2024). `sinks` [heads] are
    scores that take part in each row's softmax and have no value (as in gpt-oss, 2025). Returns [rows, heads, dim]; rows of no
    span are zero.
    """
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    output = torch.zeros_like(queries)
    for span in spans:
        output[span.begin : span.end] = _attend(queries, keys, values, layer, span, scale, window, softcap, sinks)
    return output


def reference_operator(
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
    """`paged_attention` of spans that are written as int32 tensors.

    Span i has the rows `begins`[i]:`begins`[i + 1], the first at position `starts`[i], and the slots
    `table`[`tables`[i]:`tables`[i + 1]]. `begins` and `tables` are one longer than `starts`.
    """
    rows, offsets = begins.tolist(), tables.tolist()
    spans = [
        Span(rows[i], rows[i + 1], start, table[offsets[i] : offsets[i + 1]]) for i, start in enumerate(starts.tolist())
    ]
    return paged_attention(queries, keys, values, layer, spans, scale, window, softcap, sinks)


paged_attention_operator = torch.library.custom_op("kvferry::paged_attention", reference_operator, mutates_args=())


@paged_attention_operator.register_fake
def _(queries: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(queries)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    span: Span,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One span's rows: only the blocks that a row of it sees are gathered, and nothing beyond its context is read."""
    num_rows, num_kv_heads, block_size = span.end - span.begin, keys.shape[2], keys.shape[4]
    groups = queries.shape[1] // num_kv_heads
    first_block = max(span.start - window + 1, 0) // block_size if window else 0
    first, slots = first_block * block_size, span.slots[first_block : -(-span.context // block_size)]
    key = keys[slots, layer].permute(1, 2, 0, 3).flatten(2).float()
    value = values[slots, layer].permute(1, 0, 2, 3).flatten(1, 2).float()
    query = queries[span.begin : span.end].unflatten(1, (num_kv_heads, groups)).permute(1, 2, 0, 3).float() * scale
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, groups, 1, 1)
    output = torch.empty_like(query)
    step = max(PIECE_SCORES // (queries.shape[1] * key.shape[-1]), 16)
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        low = max(span.start + begin - window + 1 - first, 0) if window else 0
        high = span.start + end - first
        rows = torch.arange(span.start + begin, span.start + end, device=keys.device)[:, None]
        columns = torch.arange(first + low, first + high, device=keys.device)
        is_hidden = (columns > rows) | (columns <= rows - window) if window else columns > rows
        scores = (query[:, :, begin:end].flatten(1, 2) @ key[:, :, low:high]).unflatten(1, (groups, end - begin))
        shares = softmax(scores, is_hidden, softcap, sinks)
        output[:, :, begin:end] = _weighted(shares, value[:, low:high], is_hidden)
    return output.permute(2, 0, 1, 3).flatten(1, 2).to(queries.dtype)


def _weighted(shares: torch.Tensor, value: torch.Tensor, is_hidden: torch.Tensor) -> torch.Tensor:
    """`shares` [KV heads, groups, rows, columns] of `value` [KV heads, columns, dim]: [KV heads, groups, rows, dim].

    A value that is not finite must not reach rows that do not see it, where its share is 0.
    """
    if value.isfinite().all():
        return (shares.flatten(1, 2) @ value).unflatten(1, shares.shape[1:3])
    seen = [value.masked_fill(hidden[:, None], 0.0) for hidden in is_hidden]
    return torch.stack([shares[:, :, row] @ values for row, values in enumerate(seen)], dim=2)


def softmax(scores: torch.Tensor, is_hidden: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension of `scores` [KV heads, groups, rows, columns]; what is hidden gets nothing."""
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(is_hidden, -math.inf)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]

"""Causal attention of some sequences' new tokens over their paged KV: the plain torch form, for any device.

Each chunk's blocks are gathered through its block table; its queries see every position up to their own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, spans: list[Span]
) -> torch.Tensor:
    """`queries` [rows, heads, dim], `keys` [slot, layer, KV head, dim, token], `values` [slot, layer, KV head, token, dim].

    Returns [rows, heads, dim].
    """
    output = torch.empty_like(queries)
    groups = queries.shape[1] // keys.shape[2]
    for span in spans:
        key = keys[span.slots, layer].permute(1, 0, 3, 2).flatten(1, 2)[:, : span.context]
        value = values[span.slots, layer].permute(1, 0, 2, 3).flatten(1, 2)[:, : span.context]
        key, value = (part.repeat_interleave(groups, 0).unsqueeze(0) for part in (key, value))
        query = queries[span.begin : span.end].transpose(0, 1).unsqueeze(0)
        mask = None
        if span.end - span.begin > 1 and span.start > 0:
            rows = torch.arange(span.start, span.context, device=queries.device)
            mask = torch.arange(span.context, device=queries.device) <= rows[:, None]
        is_causal = mask is None and span.end - span.begin > 1
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        output[span.begin : span.end] = attended[0].transpose(0, 1)
    return output

"""Paged attention on a device: few large operations instead of some small ones a span, and nothing that waits for the device.

The reference's numbers (kvferry/engine/attention.py), to a tolerance; scores, shares and sums are float32 whatever queries and KV are.
A step's rows become groups of indices on the device once a step and window; a layer only uses them. Decode rows of many sequences
make one group, padded to its longest; of a chunk, some rows at a time do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvferry.engine.attention import softmax

GROUP_KEYS = 1 << 16
"""So many keys are gathered at once, about: 128 MiB of 16-bit keys in a layer of 8 KV heads of 128 numbers."""
PIECE_SCORES = 1 << 20
"""So many scores of one head are had at once, about."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one span: the first one's place and position, and the slots from the first block that a row sees."""

    begin: int
    position: int
    num_rows: int
    first_block: int
    slots: Ints


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of equally many rows, on the device."""

    rows: torch.Tensor
    """[pieces, rows]: the places of their queries."""
    positions: torch.Tensor
    """[pieces, rows]"""
    table: torch.Tensor
    """[pieces, blocks]; behind a piece's own slots is the padding slot."""
    first_keys: torch.Tensor
    """[pieces, 1]: the position of the table's first token."""

    @staticmethod
    def of(pieces: Sequence[Piece], block_size: int, device: torch.device) -> "Group":
        table = np.zeros((len(pieces), max(len(piece.slots) for piece in pieces)), np.int64)
        for place, piece in enumerate(pieces):
            table[place, : len(piece.slots)] = piece.slots
        numbers = np.array([(one.begin, one.position, one.first_block * block_size) for one in pieces])
        steps = np.arange(pieces[0].num_rows)
        arrays = (numbers[:, :1] + steps, numbers[:, 1:2] + steps, table, numbers[:, 2:])
        return Group(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


class StepSpans:
    """A step's spans, as `reference_operator` has them, on the host."""

    def __init__(
        self, begins: Ints, starts: Ints, tables: Ints, table: Ints, block_size: int, device: torch.device
    ) -> None:
        self._begins, self._starts = begins.tolist(), starts.tolist()
        self._slots = [table[first:last] for first, last in pairwise(tables.tolist())]
        self._block_size, self._device = block_size, device
        self._groups: dict[int, list[Group]] = {}

    def groups(self, window: int) -> list[Group]:
        """All rows, for layers whose rows see so many positions; 0: all."""
        if window not in self._groups:
            pieces = [piece for number in range(len(self._starts)) for piece in self._pieces(number, window)]
            grouped = _grouped(pieces, self._block_size)
            self._groups[window] = [Group.of(group, self._block_size, self._device) for group in grouped]
        return self._groups[window]

    def _pieces(self, number: int, window: int) -> list[Piece]:
        begin, end, start = self._begins[number], self._begins[number + 1], self._starts[number]
        most = max(PIECE_SCORES // (start + end - begin), 16)
        pieces = list[Piece]()
        for first in range(begin, end, most):
            num_rows, position = min(most, end - first), start + first - begin
            low = max(position - window + 1, 0) // self._block_size if window else 0
            slots = self._slots[number][low : -(-(position + num_rows) // self._block_size)]
            pieces.append(Piece(first, position, num_rows, low, slots))
        return pieces


def _grouped(pieces: list[Piece], block_size: int) -> list[list[Piece]]:
    """Single rows together, the shorter first, so that little is padded; of the others, each alone."""
    groups = [[piece] for piece in pieces if piece.num_rows > 1]
    group = list[Piece]()
    for piece in sorted((piece for piece in pieces if piece.num_rows == 1), key=lambda one: len(one.slots)):
        if group and (len(group) + 1) * len(piece.slots) * block_size > GROUP_KEYS:
            groups.append(group)
            group = []
        group.append(piece)
    return [*groups, group] if group else groups


def attend_on_device(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    spans: StepSpans,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention`, which says what the arguments are. Returns [rows, heads, dim] in the queries' dtype."""
    output = torch.zeros_like(queries)
    for group in spans.groups(window):
        attended = _attend(queries[group.rows], keys[:, layer], values[:, layer], group, scale, window, softcap, sinks)
        output[group.rows] = attended.to(queries.dtype)
    return output


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[pieces, rows, heads, dim], as `queries`. A KV head's query heads are so many more rows of it."""
    num_rows, num_kv_heads = queries.shape[1], keys.shape[1]
    groups = queries.shape[2] // num_kv_heads
    kind = torch.promote_types(queries.dtype, keys.dtype)
    query = queries.unflatten(2, (num_kv_heads, groups)).transpose(1, 2).flatten(2, 3).to(kind)
    key = keys[group.table].permute(0, 2, 1, 4, 3).flatten(2, 3).to(kind)
    value = values[group.table].permute(0, 2, 1, 3, 4).flatten(2, 3).to(kind)
    sees = _sees(group, key.shape[2], window).repeat_interleave(groups, dim=1)[:, None]
    is_bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    key, value = (part.masked_fill(is_bad[..., None], 0.0) for part in (key, value))
    if not softcap and sinks is None:
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale)
    else:
        if sinks is not None:
            sinks = sinks.float().view(num_kv_heads, 1, groups).expand(-1, num_rows, -1).reshape(num_kv_heads, -1, 1)
        attended = softmax(query.float() @ key.float().mT * scale, ~sees, softcap, sinks) @ value.float()
    # What is not finite must reach the rows that see it, and no other: its share there is 0, and 0 times it is not.
    attended = attended.masked_fill((sees & is_bad[:, :, None]).any(-1, keepdim=True), math.nan)
    return attended.unflatten(2, (num_rows, groups)).transpose(1, 2).flatten(2, 3)


def _sees(group: Group, num_keys: int, window: int) -> torch.Tensor:
    """[pieces, rows, keys]"""
    columns = (group.first_keys + torch.arange(num_keys, device=group.table.device))[:, None]
    rows = group.positions[..., None]
    return (columns <= rows) & (columns > rows - window) if window else columns <= rows

"""A plan's chunks as flat arrays: one row per token, and where each row's KV goes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engine.plan import Chunk

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """Rows are the chunks' tokens, one chunk after the other."""

    tokens: Ints
    positions: Ints
    slots: Ints
    """[rows]: the slot that each row's KV goes to."""
    offsets: Ints
    """[rows]: its token's place within the block."""
    begins: Ints
    """[chunks + 1]: where each chunk's rows begin."""
    tables: Ints
    """[chunks + 1]: where each chunk's slots begin in `table`."""
    table: Ints
    end_of: dict[int, int]
    """The row after a chunk's last one, by sequence id."""

    @staticmethod
    def of(chunks: Sequence[Chunk], block_size: int) -> "PackedChunks":
        lengths = np.array([len(chunk.tokens) for chunk in chunks], np.int32)
        begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tables = np.cumsum([0, *(len(chunk.slots) for chunk in chunks)], dtype=np.int32)
        table = np.concatenate([np.array(chunk.slots, np.int32) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        positions = np.arange(begins[-1], dtype=np.int32) + np.repeat(starts - begins[:-1], lengths)
        slots = table[np.repeat(tables[:-1], lengths) + positions // block_size]
        return PackedChunks(
            tokens=np.concatenate([np.array(chunk.tokens, np.int32) for chunk in chunks]),
            positions=positions.astype(np.int32),
            slots=slots,
            offsets=(positions % block_size).astype(np.int32),
            begins=begins,
            tables=tables,
            table=table,
            end_of={chunk.sequence_id: int(end) for chunk, end in zip(chunks, begins[1:], strict=True)},
        )

    def last_rows(self, chunks: Sequence[Chunk]) -> Ints:
        return np.array([self.end_of[chunk.sequence_id] - 1 for chunk in chunks], np.int32)

    def rows_of(self, chunk: Chunk, count: int) -> Ints:
        """The chunk's first `count` rows."""
        begin = self.end_of[chunk.sequence_id] - len(chunk.tokens)
        return np.arange(begin, begin + count, dtype=np.int32)

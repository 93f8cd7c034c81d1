"""Who holds which blocks, as far as the workers have told. A hint: a wrong entry costs a miss, never a wrong token.

Pure. One table from a block's key (the first eight bytes of its id) to the set of its holders, an integer with one bit for each
worker's row. Workers tell of every eighth block of a chain and of its end, so an entry stands for up to eight blocks. The table is cut
into shards: each is small enough to grow, or to be swept of a worker that has left, without holding up the event loop. Equal sets
of holders are one object, and a key is a small integer, so that an entry takes under 100 bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.kv.block_id import ANNOUNCED_EVERY

KEY_BYTES = 8
NUM_SHARDS = 256
SHARD_MASK = NUM_SHARDS - 1
MAX_SHARED_SETS = 65536
MAX_LOOKED_FOR_ENDS = 2


def keys_of(block_ids: Iterable[bytes]) -> list[int]:
    """What the index calls blocks."""
    return [int.from_bytes(block_id[:KEY_BYTES], "little") for block_id in block_ids]


class Held(NamedTuple):
    """The workers of `rows` hold the first `num_blocks` of a chain, and no more of it."""

    rows: int
    """One bit for each row."""
    num_blocks: int


class PrefixIndex:
    """Rows are small integers that the caller gives to workers; see `retire`."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._sets: dict[int, int] = {}
        self._retired = 0
        self._to_sweep: deque[tuple[int, int]] = deque()  # a shard, and the rows to be swept out of it

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def add(self, row: int, keys: Iterable[int]) -> None:
        shards, shared, bit = self._shards, self._sets, 1 << row
        if len(shared) > MAX_SHARED_SETS:
            shared.clear()  # costs only that some sets are kept twice
        for key in keys:
            shard = shards[key & SHARD_MASK]
            holders = shard.get(key, 0) | bit
            shard[key] = shared.setdefault(holders, holders)

    def remove(self, row: int, keys: Iterable[int]) -> None:
        shards, shared, bit = self._shards, self._sets, 1 << row
        for key in keys:
            shard = shards[key & SHARD_MASK]
            holders = shard.get(key, 0)
            if holders & bit:
                left = holders & ~bit
                if left:
                    shard[key] = shared.setdefault(left, left)
                else:
                    del shard[key]

    def remove_all(self, row: int) -> None:
        """A worker that stays begins anew; rare, and at once."""
        for number in range(NUM_SHARDS):
            self._sweep_shard(number, 1 << row)

    def retire(self, row: int) -> None:
        """Its worker has left: it holds nothing from now on. The row is free again once `sweep` says so."""
        self._retired |= 1 << row
        self._to_sweep.extend((number, 1 << row) for number in range(NUM_SHARDS))

    def sweep(self) -> int | None:
        """Clears one shard of retired rows. Returns a row that is free again, or None; call while `is_sweeping`."""
        if not self._to_sweep:
            return None
        number, rows = self._to_sweep.popleft()
        self._sweep_shard(number, rows)
        if number < NUM_SHARDS - 1:
            return None
        self._retired &= ~rows
        return rows.bit_length() - 1

    def _sweep_shard(self, number: int, rows: int) -> None:
        shard, shared = self._shards[number], self._sets
        for key in [key for key, holders in shard.items() if holders & rows]:
            left = shard[key] & ~rows
            if left:
                shard[key] = shared.setdefault(left, left)
            else:
                del shard[key]

    @property
    def is_sweeping(self) -> bool:
        return bool(self._to_sweep)

    def held(self, keys: Sequence[int]) -> list[Held]:
        """Who holds how much of the chain of these blocks, those with most of it first; who holds nothing is left out.

        Each lookup is a read of memory that is nowhere near. So strides grow while the holders stay the same: points between two with
        the same holders are taken to have them, too (a worker gives up the end of a chain before its beginning). And where a chain
        ends between two points is looked up for the holders of most of it alone: of the others, up to seven blocks are left out.
        """
        shards = self._shards
        point, rows, stride = 0, ~self._retired, 1
        num_points = len(keys) // ANNOUNCED_EVERY
        parted: list[tuple[int, int]] = []  # a point, and the rows that come to it and not to the next
        while rows and point < num_points:
            stride = min(stride, num_points - point)
            key = keys[(point + stride) * ANNOUNCED_EVERY - 1]
            going_on = shards[key & SHARD_MASK].get(key, 0) & rows
            if going_on == rows:
                point += stride
                stride *= 2
            elif stride > 1:
                stride //= 2
            else:
                parted.append((point, rows & ~going_on))
                point, rows = point + 1, going_on
        if rows:
            parted.append((point, rows))
        found: list[Held] = []
        parted.reverse()
        for number, (point, rows) in enumerate(parted):
            first = point * ANNOUNCED_EVERY
            if number < MAX_LOOKED_FOR_ENDS:
                for depth in range(min(first + ANNOUNCED_EVERY - 1, len(keys)), first, -1):
                    key = keys[depth - 1]
                    ending = shards[key & SHARD_MASK].get(key, 0) & rows
                    if ending:
                        found.append(Held(ending, depth))
                        rows &= ~ending
            if first and rows:
                found.append(Held(rows, first))
        return found

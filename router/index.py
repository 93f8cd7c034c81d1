"""Who holds which blocks, as far as the workers have told. A hint: a wrong entry costs a miss, never a wrong token.

Pure. One table from a block's key (the first eight bytes of its id) to the set of its holders, an integer with one bit for each
worker's row. Workers tell of every eighth block of a chain and of its end, so an entry stands for up to eight blocks. The table is cut
into shards: each is small enough to grow, or to be swept of a worker that has left, without holding up the event loop. Equal sets
of holders are one object, and a key is a small integer, so that an entry takes under 100 bytes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.kv.block_id import ANNOUNCED_EVERY

KEY_BYTES = 8
NUM_SHARDS = 256
SHARD_MASK = NUM_SHARDS - 1
MAX_SHARED_SETS = 65536
MAX_LOOKED_FOR_ENDS = 4


def keys_of(block_ids: Iterable[bytes]) -> list[int]:
    """What the index calls blocks."""
    return [int.from_bytes(block_id[:KEY_BYTES], "little") for block_id in block_ids]


@dataclass(frozen=True, slots=True)
class Held:
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

    def add(self, row: int, block_ids: Iterable[bytes]) -> None:
        shards, shared, bit, from_bytes = self._shards, self._sets, 1 << row, int.from_bytes
        if len(shared) > MAX_SHARED_SETS:
            shared.clear()  # costs only that some sets are kept twice
        for block_id in block_ids:
            key = from_bytes(block_id[:KEY_BYTES], "little")
            shard = shards[key & SHARD_MASK]
            holders = shard.get(key, 0) | bit
            shard[key] = shared.setdefault(holders, holders)

    def remove(self, row: int, block_ids: Iterable[bytes]) -> None:
        shards, shared, bit = self._shards, self._sets, 1 << row
        for block_id in block_ids:
            key = int.from_bytes(block_id[:KEY_BYTES], "little")
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

        Each lookup is a read of memory that is nowhere near. So points between two with the same holders are taken to have them, too
        (a worker gives up the end of a chain before its beginning), and where a chain ends between two points is looked up for the
        holders of most of it alone: of the others, up to seven blocks are left out.
        """
        among, num_points = ~self._retired, len(keys) // ANNOUNCED_EVERY
        at_first = self._at(keys, 1) & among if num_points else 0
        at_last = self._at(keys, num_points) & at_first if at_first else 0
        parted = [(num_points, at_last)] if at_last else []
        if at_first:
            self._part(keys, 1, at_first, num_points, at_last, parted)
        parted.append((0, among & ~at_first))
        found: list[Held] = []
        for number, (point, rows) in enumerate(parted):
            first = point * ANNOUNCED_EVERY
            num_between = min(ANNOUNCED_EVERY - 1, len(keys) - first) if number < MAX_LOOKED_FOR_ENDS else 0
            found += self._with_ends(keys, first, first + num_between, rows)
        return found

    def _part(
        self, keys: Sequence[int], low: int, at_low: int, high: int, at_high: int, parted: list[tuple[int, int]]
    ) -> None:
        """Appends the points below `high` at which some chains come to their last one, and whose; the deepest first."""
        if at_low == at_high:
            return
        if high - low == 1:
            parted.append((low, at_low & ~at_high))
            return
        middle = (low + high) // 2
        at_middle = self._at(keys, middle) & at_low
        self._part(keys, middle, at_middle, high, at_high, parted)
        self._part(keys, low, at_low, middle, at_middle, parted)

    def _at(self, keys: Sequence[int], point: int) -> int:
        key = keys[point * ANNOUNCED_EVERY - 1]
        return self._shards[key & SHARD_MASK].get(key, 0)

    def _with_ends(self, keys: Sequence[int], first: int, last: int, among: int) -> list[Held]:
        """Of the workers `among`, which hold the first `first` blocks: whose chains end before block `last`, and the others."""
        found, shards = list[Held](), self._shards
        for depth in range(last, first, -1):
            key = keys[depth - 1]
            rows = shards[key & SHARD_MASK].get(key, 0) & among
            if rows:
                found.append(Held(rows, depth))
                among &= ~rows
        if first and among:
            found.append(Held(among, first))
        return found

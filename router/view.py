"""How the workers are doing, as columns: a row for each worker of either pool, kept up to date by what they say and what is placed.

Counters of load are the workers' own, so that several routers agree: what others have on a worker is what it says beyond what it
says of this router; what this router has there it knows itself, at once. Pure: no clock, no I/O.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.messages import Role, WorkerDescription, WorkerProgress
from router.placement import Columns

NUM_BUCKETS = 21
"""Powers of two of tokens, up to a million."""
DEFAULT_TOKENS_PER_S = 1000.0
DEFAULT_LINK_BYTES_PER_S = 1e9
ALIKE = 1.5
"""Workers of a pool whose measurements lie within this factor of the median count as equal: what differs is noise."""
MEASURED_ANEW_S = 0.1
"""What follows from all measurements of a pool is worked out at most so often."""
KEPT_S = 10.0
"""And kept up to date for so long after somebody asked for it."""
FADES_S = 10.0
"""What a worker measured before it had nothing to do for so long may not hold any more: it counts as its pool's median."""
LAG_S = 0.25
"""A worker's progress may not yet know of what was placed so shortly before it came."""
SMALLEST, LARGEST = 1e-6, 1e13
"""Of seconds, tokens and bytes a second alike."""
FEW_ROWS = 8
"""Bits of a set that are read one by one; more of them in one piece."""
INTS = (
    "max_active",
    "pool_tokens",
    "num_placed",
    "num_active",
    "active_tokens",
    "foreign_active",
    "foreign_tokens",
    "all_active",
    "all_tokens",
)
"""The last two are sums: what this router has there and what others have."""
DEFAULTS = {"step_base_s": 0.02, "step_slope_s": 0.0}
"""Of workers that have measured nothing, where nobody has."""
FLOATS = tuple(DEFAULTS)
BOOLS = ("is_decode", "is_member", "is_attached", "is_draining", "is_aside", "is_reserved", "is_usable")
"""Usable is a member that is attached and neither draining nor aside."""


@dataclass(slots=True)
class _Smoothed:
    """A column of measurements as placing wants it; see `_alike`."""

    values: NDArray[np.float64]
    at_s: float
    num_told: int
    """Of what workers have told of themselves, so much is in it."""
    asked_s: float


class WorkerView:
    """Rows are given out and taken back by `open_row` and `close_row`."""

    def __init__(self, num_rows: int = 64):
        self.ints = {name: np.zeros(num_rows, np.int64) for name in INTS}
        self.floats = {name: np.zeros(num_rows) for name in FLOATS}
        self.bools = {name: np.zeros(num_rows, np.bool_) for name in BOOLS}
        self._rates = np.full((NUM_BUCKETS, num_rows), math.nan)
        self._reported = np.zeros((NUM_BUCKETS, num_rows), np.int64)
        """Tokens to be computed, of work no larger than that."""
        self._waiting = np.zeros((NUM_BUCKETS, num_rows), np.int64)
        """With what this router placed since."""
        self._last_step: list[tuple[int, float]] = [(-1, 0.0)] * num_rows
        self._pending: list[dict[int, tuple[float, int]]] = [{} for _ in range(num_rows)]
        self._links: list[dict[int, float]] = [{} for _ in range(num_rows)]
        self._free = list(range(num_rows - 1, -1, -1))
        self._smoothed: dict[str | int, _Smoothed] = {}
        self._num_told = 0
        self._smoothed_s = 0.0
        self._block_bytes = 1
        self.num_rows = 0
        """Rows beyond were never used."""
        self._cut_to_rows()

    def set(self, row: int, **values: int) -> None:
        """By the columns' names; what follows from them for this row follows at once."""
        ints, bools = self.ints, self.bools
        for name, value in values.items():
            (bools if name in bools else ints)[name][row] = value
        ints["all_active"][row] = ints["num_active"][row] + ints["foreign_active"][row]
        ints["all_tokens"][row] = ints["active_tokens"][row] + ints["foreign_tokens"][row]
        is_there = bools["is_member"][row] and bools["is_attached"][row]
        bools["is_usable"][row] = is_there and not (bools["is_draining"][row] or bools["is_aside"][row])

    def open_row(self, description: WorkerDescription) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        if row >= self.num_rows:
            self.num_rows = row + 1
            self._cut_to_rows()
        for column in (*self.ints.values(), *self.floats.values(), *self.bools.values()):
            column[row] = 0
        self._rates[:, row] = math.nan
        self.floats["step_base_s"][row] = self.floats["step_slope_s"][row] = math.nan
        self._reported[:, row] = self._waiting[:, row] = 0
        self._pending[row], self._links[row] = {}, {}
        self._last_step[row] = (-1, 0.0)
        self.set(
            row,
            max_active=description.max_sequences,
            pool_tokens=description.pool_tokens,
            is_decode=description.role is Role.DECODE,
            is_member=True,
        )
        self._block_bytes = description.block_bytes
        self._smoothed.clear()
        return row

    def _cut_to_rows(self) -> None:
        """The columns, without what was never used: kept, for each request looks at most of them."""
        self._ints = {name: column[: self.num_rows] for name, column in self.ints.items()}
        self._bools = {name: column[: self.num_rows] for name, column in self.bools.items()}

    def close_row(self, row: int) -> None:
        """Nothing is placed there any more; the row is not given out before `free_row`."""
        self.set(row, is_member=False)
        for links in self._links:
            links.pop(row, None)
        self._smoothed.clear()

    def free_row(self, row: int) -> None:
        self._free.append(row)

    # ------------------------------------------------------------------------------------------------ what workers say

    def progressed(self, row: int, progress: WorkerProgress, rows_of: Mapping[str, int], now: float) -> None:
        if self.bools["is_decode"][row]:
            num_foreign = max(progress.num_sequences - progress.your_sequences, 0)
            foreign_tokens = max(progress.kv_tokens - progress.your_kv_tokens, 0)
            self.set(
                row,
                foreign_active=num_foreign,
                foreign_tokens=foreign_tokens,
                is_draining=progress.is_draining,
            )
        else:  # it has no other stream to the router by which to show life
            self.set(row, is_attached=True, is_draining=progress.is_draining)
        self._reported[:, row] = _cumulative(progress.waiting_by_size)
        pending = self._pending[row]
        for number in [number for number, (at, _) in pending.items() if at < now - LAG_S]:
            del pending[number]
        self._sum_waiting(row)
        if progress.step != self._last_step[row][0]:
            self._last_step[row] = (progress.step, now)
        has_faded = now - self._last_step[row][1] > FADES_S
        base_s, slope_s = _line({} if has_faded else progress.step_s)
        self.floats["step_base_s"][row], self.floats["step_slope_s"][row] = base_s, slope_s
        self._rates[:, row] = _curve({} if has_faded else progress.tokens_per_s)
        for worker_id, rate in progress.link_bytes_per_s.items():
            source = rows_of.get(worker_id)
            if source is not None and SMALLEST < rate < LARGEST:
                self._links[row][source] = rate
        self._num_told += 1
        if now - self._smoothed_s >= MEASURED_ANEW_S:
            self._smooth_anew(now)

    # --------------------------------------------------------------------------------------------- what this router does

    def will_compute(self, row: int, number: int, num_tokens: int, now: float) -> None:
        """A source was asked for so much, which its progress does not show yet."""
        self._pending[row][number] = (now, num_tokens)
        self._sum_waiting(row)

    def has_computed(self, row: int, number: int) -> None:
        if self._pending[row].pop(number, None) is not None:
            self._sum_waiting(row)

    def _sum_waiting(self, row: int) -> None:
        self._waiting[:, row] = self._reported[:, row]
        for _, tokens in self._pending[row].values():
            self._waiting[_bucket(tokens) :, row] += tokens

    # ------------------------------------------------------------------------------------------------------ for placing

    def columns(self, num_tokens: int, held_blocks: NDArray[np.int64], now: float) -> Columns:
        """`num_tokens`: the request's length; `held_blocks`: of its chain, by row."""
        ints, bools, bucket = self._ints, self._bools, _bucket(num_tokens)
        return Columns(
            is_decode=bools["is_decode"],
            is_usable=bools["is_usable"],
            is_reserved=bools["is_reserved"],
            num_active=ints["all_active"],
            max_active=ints["max_active"],
            active_tokens=ints["all_tokens"],
            pool_tokens=ints["pool_tokens"],
            num_placed=ints["num_placed"],
            step_base_s=self._alike("step_base_s", now),
            step_slope_s=self._alike("step_slope_s", now),
            waiting_tokens=self._waits(bucket, num_tokens),
            tokens_per_s=self._alike(bucket, now),
            held_blocks=held_blocks,
            block_s=self.block_s,
        )

    def _waits(self, bucket: int, num_tokens: int) -> NDArray[np.int64]:
        """What is computed before a prompt of that length is done: all that is shorter, and of what is longer as much again as of
        the short, for the oldest has half of each step (kvferry/turns.py)."""
        before = self._waiting[bucket, : self.num_rows]
        most = before + before
        most += num_tokens
        return np.minimum(most, self._waiting[-1, : self.num_rows])

    def most_pool_tokens(self, usable: bool) -> int:
        """Of a decode worker, or of one that requests can be placed on now; 0 without any."""
        of = self._bools["is_decode"] & self._bools["is_usable" if usable else "is_member"]
        return int(self._ints["pool_tokens"].max(where=of, initial=0))

    def block_s(self, row: int) -> NDArray[np.float64]:
        """Seconds a block from each row to this one."""
        links = self._links[row]
        known = sorted(links.values())[len(links) // 2] if links else DEFAULT_LINK_BYTES_PER_S
        times = np.full(self.num_rows, self._block_bytes / known)
        for source, rate in links.items():
            times[source] = self._block_bytes / rate
        times[row] = 0.0
        return times

    def _smooth_anew(self, now: float) -> None:
        """What was asked for of late: now, and not while a request waits for it."""
        self._smoothed_s = now
        for key, found in list(self._smoothed.items()):
            if now - found.asked_s > KEPT_S:
                del self._smoothed[key]
            else:
                found.values, found.at_s, found.num_told = self._smooth(key), now, self._num_told

    def _alike(self, key: str | int, now: float) -> NDArray[np.float64]:
        """Measurements with the unknown and the nearly equal ones at the median of their pool."""
        found = self._smoothed.get(key)
        if found is None or (found.num_told != self._num_told and now - found.at_s >= MEASURED_ANEW_S):
            found = self._smoothed[key] = _Smoothed(self._smooth(key), now, self._num_told, now)
        found.asked_s = now
        return found.values

    def _smooth(self, key: str | int) -> NDArray[np.float64]:
        """`key`: one of FLOATS, or a bucket of rates."""
        raw = self.floats[key] if isinstance(key, str) else self._rates[key]
        default = DEFAULTS[key] if isinstance(key, str) else DEFAULT_TOKENS_PER_S
        values = raw[: self.num_rows].copy()
        of_pool = [self._bools["is_decode"], ~self._bools["is_decode"]]
        is_measured = np.isfinite(values)
        known = is_measured & self._bools["is_member"]
        for mask in of_pool:
            mine = values[mask & known]
            median = _middle(mine if len(mine) else values[known], default)
            differs = (values > median * ALIKE) | (values * ALIKE < median)
            differs &= is_measured
            np.copyto(values, median, where=mask & ~differs)
        return values

    def _grow(self) -> None:
        size = len(self._pending)
        self.ints = {name: np.concatenate([column, np.zeros_like(column)]) for name, column in self.ints.items()}
        self.floats = {name: np.concatenate([column, np.zeros_like(column)]) for name, column in self.floats.items()}
        self.bools = {name: np.concatenate([column, np.zeros_like(column)]) for name, column in self.bools.items()}
        self._rates = np.concatenate([self._rates, np.full_like(self._rates, math.nan)], axis=1)
        self._reported = np.concatenate([self._reported, np.zeros_like(self._reported)], axis=1)
        self._waiting = np.concatenate([self._waiting, np.zeros_like(self._waiting)], axis=1)
        self._last_step += [(-1, 0.0)] * size
        self._pending += [{} for _ in range(size)]
        self._links += [{} for _ in range(size)]
        self._free += range(2 * size - 1, size - 1, -1)


def _middle(values: NDArray[np.float64], default: float) -> float:
    """The upper median: numpy's own takes twenty times as long for a few values."""
    return float(np.sort(values)[len(values) // 2]) if len(values) else default


def _bucket(count: int) -> int:
    return min(max(count - 1, 0).bit_length(), NUM_BUCKETS - 1)


def _cumulative(by_size: Mapping[int, int]) -> NDArray[np.int64]:
    sizes = np.zeros(NUM_BUCKETS, np.int64)
    for size, tokens in by_size.items():
        sizes[_bucket(size)] += min(tokens, 2**40)
    return np.cumsum(sizes)


def sane(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """What can be a measurement: a worker that is broken must not break placing."""
    return sorted((key, value) for key, value in values.items() if 0 < key <= 2**40 and SMALLEST < value < LARGEST)


def _line(step_s: Mapping[int, float]) -> tuple[float, float]:
    """Base and slope through the smallest and the largest batch that were measured; no slope falls. One batch tells no slope."""
    known = sane(step_s)
    if not known:
        return math.nan, math.nan
    (small, small_s), (large, large_s) = known[0], known[-1]
    if large == small:
        return small_s, math.nan
    slope_s = max((large_s - small_s) / (large - small), 0.0)
    return max(small_s - small * slope_s, 1e-6), slope_s


def _curve(tokens_per_s: Mapping[int, float]) -> list[float]:
    """By bucket; between and beyond what was measured, the nearest shorter one, or the shortest."""
    known = sane(tokens_per_s)
    if not known:
        return [math.nan] * NUM_BUCKETS
    by_bucket = {(key - 1).bit_length(): value for key, value in known}
    curve, last = list[float](), known[0][1]
    for bucket in range(NUM_BUCKETS):
        last = by_bucket.get(bucket, last)
        curve.append(last)
    return curve


def held_by_row(held: Iterable[tuple[int, int]], num_rows: int) -> NDArray[np.int64]:
    """From (rows as bits, blocks); a row that occurs more than once has the most of it."""
    blocks = np.zeros(num_rows, np.int64)
    fill_by_row(blocks, held)
    return blocks


def fill_by_row(blocks: NDArray[np.int64], held: Iterable[tuple[int, int]]) -> None:
    """The same into a column of zeros."""
    num_rows = len(blocks)
    all_rows = (1 << num_rows) - 1
    for rows, count in sorted(held, key=_count_of):
        rows &= all_rows
        if rows.bit_count() > FEW_ROWS:
            np.copyto(blocks, count, where=_as_bools(rows, num_rows))
            continue
        while rows:
            row = rows.bit_length() - 1
            rows ^= 1 << row
            blocks[row] = count


def _count_of(of: tuple[int, int]) -> int:
    return of[1]


def _as_bools(rows: int, num_rows: int) -> NDArray[np.bool_]:
    packed = np.frombuffer(rows.to_bytes((num_rows + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=num_rows, bitorder="little").view(np.bool_)

"""Where a request goes: the decode worker first, then who computes what it lacks, and where that comes from.

Pure functions over snapshots held as columns, a row for each worker of either pool: filter, score in [0, 1], pick. What is compared is
time: until the first token (waiting, computing, moving, tail), per token after it, and what a request costs the streams beside it.
Policies differ in the score of decode workers and in the order of sources; what they must not do is the same for all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_SOURCES = 3
MAX_HOLDERS = 2
FETCH_S = 0.003
"""Of a fetch, besides what it moves: opening, notices, the end (`kvferry bench transport`)."""
STALL_S = 0.25
"""Decode workers stretch a step by no more for what is computed beside their streams (`--itl-target-ms`)."""
STREAMS_FIRST = 4.0
"""A second for which streams stand still counts as so many that a request waits for its first token."""
MANY_PLACED = 2**40
"""More than any worker is ever given: how much a worker does and whose turn it is compare as one number."""
NUM_COMPARED_SOURCES = 4
"""Prefill workers that are compared for each decode worker; all of them for the chosen one."""
SAME = 1.01
"""Costs that differ by less are the same: the idler worker takes the request."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NOTHING_HELD: Ints = np.empty(0, np.int64)
NOBODY: NDArray[np.intp] = np.empty(0, np.intp)


class Columns(NamedTuple):
    """The workers as the router sees them at this moment, for one request."""

    is_decode: Bools
    is_usable: Bools
    """Attached, neither draining nor set aside."""
    is_reserved: Bools
    """For a request that must be alone."""
    num_active: Ints
    """Choices there (decode) or chains (prefill)."""
    max_active: Ints
    active_tokens: Ints
    """Tokens of those choices."""
    pool_tokens: Ints
    num_placed: Ints
    """Ever, by this router; breaks ties, so that equal workers take turns."""
    step_base_s: Floats
    step_slope_s: Floats
    """A step in which n choices yield a token takes base + n * slope."""
    waiting_tokens: Ints
    """Yet to be computed there before anything new is."""
    tokens_per_s: Floats
    """Of prompts of this request's length."""
    held_blocks: Ints
    """Of this request's chain, the tail apart."""
    block_s: Callable[[int], Floats]
    """Seconds that a block takes from each worker to the one of that row."""


class Demand(NamedTuple):
    """What a request asks of its place."""

    number: int
    num_tokens: int
    """Prompt and emitted tokens of one choice."""
    num_choices: int
    num_kv_tokens: int
    """The most tokens that one choice will ever have in a pool."""
    num_blocks_before_tail: int
    block_size: int
    output_tokens: int = 1
    """That it will probably yield."""
    slo_ttft_s: float = float("inf")
    slo_tpot_s: float = float("inf")
    failed_rows: frozenset[int] = frozenset()
    """Sources that failed this request before."""
    local_tokens: int = 0
    """Up to so many missing tokens, fetching is not considered."""
    runs_apart: bool = False
    """It may be what kills workers: only where nobody else is."""
    computes_all: bool = False
    """Every position must pass through the decode worker's steps."""
    explains: bool = False

    @property
    def has_slo(self) -> bool:
        return self.slo_ttft_s < float("inf") or self.slo_tpot_s < float("inf")


class Prediction(NamedTuple):
    """Seconds from now on."""

    waiting_s: float = 0.0
    """For the source's other work."""
    computing_s: float = 0.0
    moving_s: float = 0.0
    tail_s: float = 0.0
    tpot_s: float = 0.0
    stall_s: float = 0.0
    """The gap that computing where it decodes makes for the streams there, at most."""

    @property
    def ttft_s(self) -> float:
        """Moving hides behind computing."""
        return self.waiting_s + max(self.computing_s, self.moving_s) + self.tail_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """For people who ask why."""

    row: int
    role: str
    held_tokens: int
    cost_s: float
    ttft_s: float
    score: float


class Placement(NamedTuple):
    decode_row: int
    source_rows: tuple[int, ...]
    holder_rows: tuple[int, ...]
    num_missing_tokens: int
    """Tokens that the decode worker has not, as far as the index knows, the tail apart."""
    local_tokens: int
    """The decode worker shall compute so many by itself before it asks a source."""
    is_local: bool
    prediction: Prediction = Prediction()
    keeps_slos: bool = True
    decided_by: str = ""
    alternative: Prediction | None = None
    """Of the way that was not taken: fetching, where it is computed here, or computing here."""
    candidates: tuple[Candidate, ...] = ()


class _Chain(NamedTuple):
    """What is the same for every decode worker that may be chosen."""

    sources: NDArray[np.intp]
    """Prefill workers that could compute it."""
    waiting_s: Floats
    """Until each source would begin with it."""
    block_s: Floats
    """That each source takes to compute a block."""
    holders: NDArray[np.intp]
    """Usable workers of either pool that hold some of it."""
    held: Ints
    """By each of the holders, in blocks."""
    most_held: int


class _SourceTimes(NamedTuple):
    """Seconds of each source."""

    waiting_s: Floats
    computing_s: Floats
    moving_s: Floats
    total_s: Floats
    """Moving hides behind computing."""


class _DecodeCosts(NamedTuple):
    rows: NDArray[np.intp]
    """Of workers that can take the request."""
    cost_s: Floats
    """Of each row of `rows`; what is below is of all workers."""
    alone_s: Floats
    """Until it would have computed what it lacks."""
    harmful_s: Floats
    """The same, with what that takes from the streams there."""
    remote_s: Floats | None
    """Until it would have that from a source."""

    def ttft_s(self, demand: Demand, columns: Columns) -> Floats:
        """Of each row of `rows`, the way that costs less."""
        fetching_s = self.alone_s[self.rows]
        if self.remote_s is not None:
            remote_s = self.remote_s[self.rows]
            fetching_s = np.where(self.harmful_s[self.rows] <= remote_s, fetching_s, remote_s)
        return fetching_s + _step_s(demand, columns, self.rows)


Scorer = Callable[[Columns, Demand, _DecodeCosts], Floats]


def _cheapness(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    """Those that keep the SLOs are before those that do not."""
    score: Floats = costs.cost_s[costs.cost_s.argmin()] / costs.cost_s
    if not demand.has_slo:
        return score
    keeps = costs.ttft_s(demand, columns) <= demand.slo_ttft_s
    keeps &= _step_s(demand, columns, costs.rows) <= demand.slo_tpot_s
    return np.where(keeps, 0.5 + 0.5 * score, 0.5 * score) if not keeps.all() else score


def _step_s(demand: Demand, columns: Columns, rows: NDArray[np.intp] | int) -> Floats:
    """With the request in it."""
    return columns.step_base_s[rows] + columns.step_slope_s[rows] * (columns.num_active[rows] + demand.num_choices)


def _prefix(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    num_blocks = max(demand.num_blocks_before_tail, 1)
    return columns.held_blocks[costs.rows] / num_blocks


def _idleness(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    del demand
    return 1.0 - np.minimum(columns.num_active[costs.rows] / columns.max_active[costs.rows], 1.0)


def _turn(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    del demand
    placed = columns.num_placed[costs.rows]
    return 1.0 / (1.0 + placed - placed.min())


@dataclass(frozen=True, slots=True)
class Policy:
    score: Scorer
    order: Callable[[Columns, NDArray[np.intp], Floats], Floats]
    """Of sources with their times in seconds; the smallest first."""
    weighs_local: bool = False
    """Whether computing at the decode worker is compared with fetching."""


POLICIES = {
    "cost": Policy(_cheapness, lambda columns, rows, total_s: total_s, weighs_local=True),
    "prefix": Policy(_prefix, lambda columns, rows, total_s: -columns.held_blocks[rows].astype(float)),
    "least-loaded": Policy(_idleness, lambda columns, rows, total_s: columns.waiting_tokens[rows].astype(float)),
    "round-robin": Policy(_turn, lambda columns, rows, total_s: columns.num_placed[rows].astype(float)),
}


def rows_with_room(columns: Columns, demand: Demand) -> NDArray[np.intp]:
    """A worker with nothing to do takes whatever fits into its pool; others must have room beside what they have."""
    able = columns.num_active == 0
    if not demand.runs_apart:
        if not able[able.argmin()]:
            has_room = columns.active_tokens + demand.num_tokens * demand.num_choices <= columns.pool_tokens
            has_room &= columns.num_active + demand.num_choices <= columns.max_active
            able |= has_room
        able = able > columns.is_reserved
    able &= columns.pool_tokens >= demand.num_kv_tokens
    able &= columns.is_decode
    able &= columns.is_usable
    return able.nonzero()[0]


def place(demand: Demand, columns: Columns, policy: Policy, rows: NDArray[np.intp] | None = None) -> Placement | None:
    """None while no decode worker can take the request. `rows`: those with room, where they are known already."""
    if rows is None:
        rows = rows_with_room(columns, demand)
    if not len(rows):
        return None
    chain = _chain(demand, columns)
    if len(rows) == 1 and not demand.explains:  # nothing to compare
        return _with_sources(demand, columns, int(rows[0]), chain, policy)
    costs = _decode_costs(demand, columns, rows, chain)
    scores = policy.score(columns, demand, costs)
    chosen = _pick(columns, rows, scores)
    placement = _with_sources(demand, columns, int(rows[chosen]), chain, policy)
    if not demand.explains:
        return placement
    return _explained(placement, demand, columns, chain, costs, scores)


def _chain(demand: Demand, columns: Columns) -> _Chain:
    sources = _sources(demand, columns)
    rates = columns.tokens_per_s[sources]
    of_sources = (sources, columns.waiting_tokens[sources] / rates, demand.block_size / rates)
    holders = columns.held_blocks.nonzero()[0]
    if len(holders):
        holders = holders[columns.is_usable[holders]]
    if not len(holders):
        return _Chain(*of_sources, holders, NOTHING_HELD, 0)
    held = columns.held_blocks[holders]
    return _Chain(*of_sources, holders, held, int(held[held.argmax()]))


def _sources(demand: Demand, columns: Columns) -> NDArray[np.intp]:
    """Prefill workers that could compute the chain."""
    if demand.computes_all or not demand.num_blocks_before_tail:
        return NOBODY
    able = columns.pool_tokens >= demand.num_blocks_before_tail * demand.block_size
    able &= columns.is_usable
    able = able > columns.is_decode
    return _without(able.nonzero()[0], demand.failed_rows)


def _without(rows: NDArray[np.intp], excluded: Iterable[int]) -> NDArray[np.intp]:
    for row in excluded:
        rows = rows[rows != row]
    return rows


def _decode_costs(demand: Demand, columns: Columns, rows: NDArray[np.intp], chain: _Chain) -> _DecodeCosts:
    """What each decode worker would cost: the request's own time, and what it takes from the streams there.

    Computed for all rows and then read for `rows`: numpy is faster on whole columns than at picking from them.
    """
    num_blocks, num_choices, num_steps = demand.num_blocks_before_tail, demand.num_choices, demand.output_tokens
    missing = num_blocks - columns.held_blocks
    missing *= demand.block_size
    alone_s = (missing + columns.waiting_tokens) / columns.tokens_per_s
    num_active = columns.num_active.astype(np.float64)
    harmful_s = num_active * STREAMS_FIRST
    harmful_s += 1.0
    if (num_blocks - chain.most_held) * demand.block_size <= demand.local_tokens:  # else nobody lacks so little
        np.copyto(harmful_s, 1.0, where=missing <= demand.local_tokens)
    harmful_s *= alone_s
    # Of its own steps, the first token's included, each holds up the request; what it adds to them holds up the streams there.
    cost_s = num_active
    cost_s *= 1 + num_steps + num_choices * num_steps
    cost_s += num_choices * (1 + num_steps)
    cost_s *= columns.step_slope_s
    cost_s += columns.step_base_s * (1 + num_steps)
    remote_s = _remote_s(demand, columns, chain) if len(chain.sources) else None
    cost_s += harmful_s if remote_s is None else np.minimum(harmful_s, remote_s)
    return _DecodeCosts(rows, np.maximum(cost_s[rows], 1e-9), alone_s, harmful_s, remote_s)


def _remote_s(demand: Demand, columns: Columns, chain: _Chain) -> Floats:
    """Seconds until each worker would have the chain from the best of a few sources, no time where nothing is missing.

    Workers differ only in how much they hold, which for most is nothing.
    """
    num_blocks, waiting_s, block_s = demand.num_blocks_before_tail, chain.waiting_s, chain.block_s
    source_held = columns.held_blocks[chain.sources]
    if len(source_held) > NUM_COMPARED_SOURCES:
        alone_s = (num_blocks - source_held) * block_s
        alone_s += waiting_s
        compared = alone_s.argpartition(NUM_COMPARED_SOURCES)[:NUM_COMPARED_SOURCES]
        source_held, block_s, waiting_s = source_held[compared], block_s[compared], waiting_s[compared]
    held = np.zeros(len(chain.holders) + 1, np.int64)
    held[1:] = chain.held
    # One row for each source: long rows are what numpy is fast at.
    times_s = (num_blocks - np.maximum(source_held[:, None], held)) * block_s[:, None]
    times_s += waiting_s[:, None]
    least_s = np.minimum.reduce(times_s)
    least_s += FETCH_S
    if chain.most_held == num_blocks:
        least_s[held == num_blocks] = 0.0
    remote_s = np.empty(len(columns.held_blocks))
    remote_s.fill(least_s[0])
    remote_s[chain.holders] = least_s[1:]
    return remote_s


def _pick(columns: Columns, rows: NDArray[np.intp], scores: Floats) -> int:
    """The best; of equals the one with the least to do, then the one whose turn it is."""
    best = (scores >= scores[scores.argmax()] / SAME).nonzero()[0]
    if len(best) == 1:
        return int(best[0])
    of = rows[best]
    return int(best[(columns.num_active[of] * MANY_PLACED + columns.num_placed[of]).argmin()])


def _with_sources(demand: Demand, columns: Columns, decode: int, chain: _Chain, policy: Policy) -> Placement:
    step_s = float(_step_s(demand, columns, decode))
    size, num_blocks = demand.block_size, demand.num_blocks_before_tail
    held = int(columns.held_blocks[decode])
    missing_blocks = num_blocks - held
    missing = missing_blocks * size
    if demand.computes_all:
        here_s = float(demand.num_tokens / columns.tokens_per_s[decode])
        local = Prediction(computing_s=here_s, tail_s=step_s, tpot_s=step_s)
        return Placement(decode, (), (), missing, demand.num_tokens, True, local, _keeps(local, demand), "scores")
    here_s = float((columns.waiting_tokens[decode] + missing) / columns.tokens_per_s[decode])
    stall_s = min(here_s, STALL_S) if columns.num_active[decode] else 0.0
    here = Prediction(computing_s=here_s, tail_s=step_s, tpot_s=step_s, stall_s=stall_s)
    givers = _givers(demand, columns, chain, decode) if chain.most_held == num_blocks else NOBODY
    if not len(chain.sources) and not len(givers):
        return Placement(decode, (), (), missing, missing, True, here, _keeps(here, demand), "no source")
    block_s = columns.block_s(decode)
    times = _source_times(demand, columns, chain, held, block_s)
    sources, first = _ordered(demand, columns, chain.sources, times.total_s, policy)
    if first is not None and missing:
        of = (float(times.waiting_s[first]), float(times.computing_s[first]), float(times.moving_s[first]))
        remote = Prediction(*of, FETCH_S + step_s, step_s)
    else:
        remote = Prediction(tail_s=FETCH_S + step_s, tpot_s=step_s)
    if len(givers) and missing:
        nearest = np.lexsort((columns.num_placed[givers], columns.num_active[givers], block_s[givers]))[0]
        giver = int(givers[nearest])
        moved = Prediction(0.0, 0.0, float(missing_blocks * block_s[giver]), FETCH_S + step_s, step_s)
        if not sources or not policy.weighs_local or moved.ttft_s <= remote.ttft_s:
            sources, remote = (giver, *sources)[:MAX_SOURCES], moved
    is_local, decided_by = _computes_here(demand, columns, decode, missing, here, remote, policy)
    chosen = here if is_local else remote
    if not missing:
        chosen = Prediction(tail_s=step_s, tpot_s=step_s)
    return Placement(
        decode,
        sources,
        _holders(demand, columns, chain, sources),
        missing,
        max(missing, demand.local_tokens) if is_local else demand.local_tokens,
        is_local,
        chosen,
        _keeps(chosen, demand),
        decided_by,
        (remote if is_local else here) if missing else None,
    )


def _computes_here(
    demand: Demand, columns: Columns, decode: int, missing: int, here: Prediction, remote: Prediction, policy: Policy
) -> tuple[bool, str]:
    """Computing here holds up every stream here for as long as it takes; one more is always expected."""
    if not missing:
        return True, "nothing is missing"
    if missing <= demand.local_tokens:
        return True, "local_tokens"
    if not policy.weighs_local:
        return False, "policy"
    if (keeps := _keeps(here, demand)) != _keeps(remote, demand):
        return keeps, f"only {'computing here' if keeps else 'fetching'} keeps the SLOs"
    num_streams = max(int(columns.num_active[decode]), 1)
    here_cost_s = here.computing_s * (1 + STREAMS_FIRST * num_streams)
    remote_cost_s = remote.ttft_s - remote.tail_s + FETCH_S
    if here_cost_s < remote_cost_s:
        return True, "computing here costs less"
    return False, "fetching costs less"


def _source_times(demand: Demand, columns: Columns, chain: _Chain, held: int, block_s: Floats) -> _SourceTimes:
    """A source reads the beginning of the chain where somebody holds it, be it itself."""
    num_blocks, sources = demand.num_blocks_before_tail, chain.sources
    waiting_s = chain.waiting_s
    computing_s = (num_blocks - chain.most_held) * chain.block_s
    moving_s = (num_blocks - held) * block_s[sources]
    total_s = np.maximum(computing_s, moving_s)
    total_s += waiting_s
    total_s += FETCH_S
    return _SourceTimes(waiting_s, computing_s, moving_s, total_s)


def _ordered(
    demand: Demand, columns: Columns, prefill: NDArray[np.intp], total_s: Floats, policy: Policy
) -> tuple[tuple[int, ...], int | None]:
    """The best source, then others that differ from request to request; and the best one's place in `prefill`."""
    if not len(prefill):
        return (), None
    keys = policy.order(columns, prefill, total_s)
    least = keys[keys.argmin()]
    best = (keys <= least + abs(least) * (SAME - 1)).nonzero()[0]
    first = int(best[columns.num_placed[prefill[best]].argmin()])
    begin = (demand.number + demand.number // len(prefill)) % len(prefill)  # not in step with who is first in turn
    chosen, num_turned = int(prefill[first]), MAX_SOURCES + 1
    turned = [*prefill[begin : begin + num_turned].tolist(), *prefill[: min(begin, num_turned)].tolist()]
    others = [row for row in turned[:num_turned] if row != chosen]
    return (chosen, *others)[:MAX_SOURCES], first


def _givers(demand: Demand, columns: Columns, chain: _Chain, decode: int) -> NDArray[np.intp]:
    """Other decode workers that hold all of the chain."""
    rows = chain.holders[chain.held == demand.num_blocks_before_tail]
    return _without(rows[columns.is_decode[rows]], (decode, *demand.failed_rows))


def _holders(demand: Demand, columns: Columns, chain: _Chain, sources: tuple[int, ...]) -> tuple[int, ...]:
    """Who has more of the chain's beginning than the first source that computes; the decode worker may be among them."""
    first = next((row for row in sources if not columns.is_decode[row]), None)
    if first is None:
        return ()
    at_least = int(columns.held_blocks[first]) + demand.local_tokens // demand.block_size
    left, rows = chain.held.copy(), list[int]()
    while len(rows) < MAX_HOLDERS and len(left) and left[most := left.argmax()] > at_least:
        left[most] = 0
        row = int(chain.holders[most])
        if row != first and row not in demand.failed_rows:
            rows.append(row)
    return tuple(rows)


def _keeps(prediction: Prediction, demand: Demand) -> bool:
    return prediction.ttft_s <= demand.slo_ttft_s and prediction.tpot_s + prediction.stall_s <= demand.slo_tpot_s


def _explained(
    placement: Placement, demand: Demand, columns: Columns, chain: _Chain, costs: _DecodeCosts, scores: Floats
) -> Placement:
    best, ttft_s = np.argsort(-scores, kind="stable")[:8].tolist(), costs.ttft_s(demand, columns)
    candidates = [
        Candidate(
            int(costs.rows[k]),
            "decode",
            int(columns.held_blocks[costs.rows[k]]) * demand.block_size,
            float(costs.cost_s[k]),
            float(ttft_s[k]),
            float(scores[k]),
        )
        for k in best
    ]
    prefill = chain.sources
    if len(prefill):
        held, block_s = int(columns.held_blocks[placement.decode_row]), columns.block_s(placement.decode_row)
        total_s = _source_times(demand, columns, chain, held, block_s).total_s
        least = float(total_s.min())
        candidates += [
            Candidate(
                int(prefill[k]),
                "prefill",
                int(columns.held_blocks[prefill[k]]) * demand.block_size,
                float(total_s[k]),
                float(total_s[k]) + placement.prediction.tpot_s,
                least / float(total_s[k]),
            )
            for k in np.argsort(total_s, kind="stable")[:8].tolist()
        ]
    return placement._replace(candidates=tuple(candidates))

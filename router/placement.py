"""Where a request goes: the decode worker first, then who computes what it lacks, and where that comes from.

Pure functions over snapshots held as columns, a row for each worker of either pool: filter, score in [0, 1], pick. What is compared is
time: until the first token (waiting, computing, moving, tail), per token after it, and what a request costs the streams beside it.
Policies differ in the score of decode workers and in the order of sources; what they must not do is the same for all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
NUM_COMPARED_SOURCES = 4
"""Prefill workers that are compared for each decode worker; all of them for the chosen one."""
SAME = 1.01
"""Costs that differ by less are the same: the idler worker takes the request."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
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
    """Of this request's chain."""
    block_s: Callable[[int], Floats]
    """Seconds that a block takes from each worker to the one of that row."""


@dataclass(frozen=True, slots=True)
class Demand:
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


@dataclass(frozen=True, slots=True)
class Prediction:
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


@dataclass(frozen=True, slots=True)
class Placement:
    decode_row: int
    source_rows: tuple[int, ...]
    holder_rows: tuple[int, ...]
    num_missing_tokens: int
    """Tokens that the decode worker has not, as far as the index knows, the tail apart."""
    local_tokens: int
    """The decode worker shall compute so many by itself before it asks a source."""
    is_local: bool
    prediction: Prediction = field(default_factory=Prediction)
    keeps_slos: bool = True
    decided_by: str = ""
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class _DecodeCosts:
    """Of each row of `rows`."""

    rows: NDArray[np.intp]
    ttft_s: Floats
    step_s: Floats
    cost_s: Floats


Scorer = Callable[[Columns, Demand, _DecodeCosts], Floats]


def _cheapness(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    """Those that keep the SLOs are before those that do not."""
    del columns
    keeps = (costs.ttft_s <= demand.slo_ttft_s) & (costs.step_s <= demand.slo_tpot_s)
    score: Floats = costs.cost_s.min() / costs.cost_s
    return np.where(keeps, 0.5 + 0.5 * score, 0.5 * score) if not keeps.all() else score


def _prefix(columns: Columns, demand: Demand, costs: _DecodeCosts) -> Floats:
    num_blocks = max(demand.num_blocks_before_tail, 1)
    return np.minimum(columns.held_blocks[costs.rows], num_blocks) / num_blocks


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
    tokens = demand.num_tokens * demand.num_choices
    has_room = columns.num_active + demand.num_choices <= columns.max_active
    has_room &= columns.active_tokens + tokens <= columns.pool_tokens
    is_idle = columns.num_active == 0
    able = columns.is_decode & columns.is_usable & (columns.pool_tokens >= demand.num_kv_tokens)
    if not demand.runs_apart:
        able &= ~columns.is_reserved
    return np.flatnonzero(able & (is_idle if demand.runs_apart else is_idle | has_room))


def place(demand: Demand, columns: Columns, policy: Policy) -> Placement | None:
    """None while no decode worker can take the request."""
    rows = rows_with_room(columns, demand)
    if not len(rows):
        return None
    sources = _sources(demand, columns)
    costs = _decode_costs(demand, columns, rows, sources)
    scores = policy.score(columns, demand, costs)
    chosen = _pick(columns, rows, scores)
    placement = _with_sources(demand, columns, int(rows[chosen]), sources, policy, float(costs.step_s[chosen]))
    if not demand.explains:
        return placement
    return _explained(placement, demand, columns, costs, scores)


def _sources(demand: Demand, columns: Columns) -> NDArray[np.intp]:
    """Prefill workers that could compute the chain."""
    if demand.computes_all or not demand.num_blocks_before_tail:
        return np.empty(0, np.intp)
    chain_tokens = demand.num_blocks_before_tail * demand.block_size
    able = ~columns.is_decode & columns.is_usable & (columns.pool_tokens >= chain_tokens)
    return _without(able, demand.failed_rows)


def _without(rows: Bools, excluded: Iterable[int]) -> NDArray[np.intp]:
    """`rows` is the caller's to change."""
    for row in excluded:
        if row < len(rows):
            rows[row] = False
    return np.flatnonzero(rows)


def _decode_costs(demand: Demand, columns: Columns, rows: NDArray[np.intp], sources: NDArray[np.intp]) -> _DecodeCosts:
    """What each decode worker would cost: the request's own time, and what it takes from the streams there."""
    size, num_blocks = demand.block_size, demand.num_blocks_before_tail
    active = columns.num_active[rows]
    missing = np.maximum(num_blocks - columns.held_blocks[rows], 0) * size
    fetching_s = columns.waiting_tokens[rows] / columns.tokens_per_s[rows]
    fetching_s += missing / columns.tokens_per_s[rows]
    harm_s = np.where(missing > demand.local_tokens, fetching_s * STREAMS_FIRST * active, 0.0)
    if len(sources):
        wait_s = columns.waiting_tokens[sources] / columns.tokens_per_s[sources]
        lacking = num_blocks - np.minimum(columns.held_blocks[sources], num_blocks)
        total_s = wait_s + lacking * size / columns.tokens_per_s[sources]
        if len(sources) > NUM_COMPARED_SOURCES:
            best = np.argpartition(total_s, NUM_COMPARED_SOURCES)[:NUM_COMPARED_SOURCES]
            sources, wait_s = sources[best], wait_s[best]
        held, block_s = columns.held_blocks[rows], size / columns.tokens_per_s[sources]
        start = np.maximum(columns.held_blocks[sources][:, None], np.minimum(held, num_blocks)[None, :])
        # One row for each source: long rows are what numpy is fast at.
        times_s = (num_blocks - start) * block_s[:, None]
        times_s += wait_s[:, None]
        remote_s = times_s.min(axis=0) + FETCH_S
        is_here = fetching_s + harm_s <= remote_s
        fetching_s = np.where(missing > 0, np.where(is_here, fetching_s, remote_s), 0.0)
        harm_s = np.where(is_here, harm_s, 0.0)
    step_s = columns.step_base_s[rows] + columns.step_slope_s[rows] * (active + demand.num_choices)
    ttft_s = fetching_s + step_s
    slowed_s = columns.step_slope_s[rows] * active * demand.num_choices
    cost_s = ttft_s + harm_s + (step_s + slowed_s) * demand.output_tokens
    return _DecodeCosts(rows, ttft_s, step_s, np.maximum(cost_s, 1e-9))


def _pick(columns: Columns, rows: NDArray[np.intp], scores: Floats) -> int:
    """The best; of equals the one with the least to do, then the one whose turn it is."""
    best = np.flatnonzero(scores * SAME >= scores.max())
    if len(best) == 1:
        return int(best[0])
    of = rows[best]
    return int(best[np.lexsort((columns.num_placed[of], columns.num_active[of]))[0]])


def _with_sources(
    demand: Demand, columns: Columns, decode: int, prefill: NDArray[np.intp], policy: Policy, step_s: float
) -> Placement:
    size, num_blocks = demand.block_size, demand.num_blocks_before_tail
    held = min(int(columns.held_blocks[decode]), num_blocks)
    missing_blocks = num_blocks - held
    missing = missing_blocks * size
    here_s = float((columns.waiting_tokens[decode] + missing) / columns.tokens_per_s[decode])
    stall_s = min(here_s, STALL_S) if columns.num_active[decode] else 0.0
    here = Prediction(computing_s=here_s, tail_s=step_s, tpot_s=step_s, stall_s=stall_s)
    if demand.computes_all:
        here_s = float(demand.num_tokens / columns.tokens_per_s[decode])
        local = Prediction(computing_s=here_s, tail_s=step_s, tpot_s=step_s)
        return Placement(decode, (), (), missing, demand.num_tokens, True, local, _keeps(local, demand), "scores")
    holders = _decode_holders(demand, columns, decode)
    if not len(prefill) and not len(holders):
        return Placement(decode, (), (), missing, missing, True, here, _keeps(here, demand), "no source")
    block_s = columns.block_s(decode)
    waiting_s, computing_s, moving_s = _source_times(demand, columns, held, prefill, block_s)
    total_s = waiting_s + np.maximum(computing_s, moving_s) + FETCH_S
    sources, first = _ordered(demand, columns, prefill, total_s, policy)
    remote = Prediction(tail_s=FETCH_S + step_s, tpot_s=step_s)
    if first is not None and missing:
        of = (float(waiting_s[first]), float(computing_s[first]), float(moving_s[first]))
        remote = Prediction(*of, FETCH_S + step_s, step_s)
    whole = [row for row in holders.tolist() if columns.held_blocks[row] >= num_blocks]
    if whole and missing:
        giver = min(
            whole, key=lambda row: (float(block_s[row]), int(columns.num_active[row]), int(columns.num_placed[row]))
        )
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
        _holders(demand, columns, sources),
        missing,
        max(missing, demand.local_tokens) if is_local else demand.local_tokens,
        is_local,
        chosen,
        _keeps(chosen, demand),
        decided_by,
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
    num_streams = max(int(columns.num_active[decode]), 1)
    here_cost_s = here.computing_s * (1 + STREAMS_FIRST * num_streams)
    remote_cost_s = remote.ttft_s - remote.tail_s + FETCH_S
    if here_cost_s < remote_cost_s and (_keeps(here, demand) or not _keeps(remote, demand)):
        return True, "computing here costs less"
    return False, "fetching costs less"


def _source_times(
    demand: Demand, columns: Columns, held: int, prefill: NDArray[np.intp], block_s: Floats
) -> tuple[Floats, Floats, Floats]:
    """Waiting, computing and moving of each; a source reads the beginning of the chain where somebody holds it."""
    num_blocks, rates = demand.num_blocks_before_tail, columns.tokens_per_s[prefill]
    readable = int(columns.held_blocks[columns.is_usable].max(initial=0))
    begin = np.minimum(np.maximum(columns.held_blocks[prefill], readable), num_blocks)
    waiting_s = columns.waiting_tokens[prefill] / rates
    computing_s = (num_blocks - begin) * demand.block_size / rates
    moving_s = (num_blocks - held) * block_s[prefill]
    return waiting_s, computing_s, moving_s


def _ordered(
    demand: Demand, columns: Columns, prefill: NDArray[np.intp], total_s: Floats, policy: Policy
) -> tuple[tuple[int, ...], int | None]:
    """The best source, then others that differ from request to request; and the best one's place in `prefill`."""
    if not len(prefill):
        return (), None
    keys = policy.order(columns, prefill, total_s)
    best = np.flatnonzero(keys <= keys.min() + abs(keys.min()) * (SAME - 1))
    first = int(best[np.argmin(columns.num_placed[prefill[best]])])
    begin = (demand.number + demand.number // len(prefill)) % len(prefill)  # not in step with who is first in turn
    turned = (*prefill[begin:].tolist(), *prefill[:begin].tolist())[: MAX_SOURCES + 1]
    others = [row for row in turned if row != int(prefill[first])]
    return (int(prefill[first]), *others)[:MAX_SOURCES], first


def _decode_holders(demand: Demand, columns: Columns, decode: int) -> NDArray[np.intp]:
    holds = columns.held_blocks > 0
    if not holds.any():
        return np.empty(0, np.intp)
    return _without(holds & columns.is_decode & columns.is_usable, demand.failed_rows | {decode})


def _holders(demand: Demand, columns: Columns, sources: tuple[int, ...]) -> tuple[int, ...]:
    """Who has more of the chain's beginning than the first source that computes; the decode worker may be among them."""
    first = next((row for row in sources if not columns.is_decode[row]), None)
    if first is None:
        return ()
    at_least = int(columns.held_blocks[first]) + demand.local_tokens // demand.block_size
    rows = np.flatnonzero(columns.is_usable & (columns.held_blocks > at_least))
    if not len(rows):
        return ()
    rows = rows[np.argsort(-columns.held_blocks[rows], kind="stable")][: MAX_HOLDERS + len(demand.failed_rows) + 1]
    kept = [row for row in rows.tolist() if row != first and row not in demand.failed_rows]
    return tuple(kept[:MAX_HOLDERS])


def _keeps(prediction: Prediction, demand: Demand) -> bool:
    return prediction.ttft_s <= demand.slo_ttft_s and prediction.tpot_s + prediction.stall_s <= demand.slo_tpot_s


def _explained(
    placement: Placement, demand: Demand, columns: Columns, costs: _DecodeCosts, scores: Floats
) -> Placement:
    best = np.argsort(-scores, kind="stable")[:8].tolist()
    candidates = [
        Candidate(
            int(costs.rows[k]),
            "decode",
            int(columns.held_blocks[costs.rows[k]]) * demand.block_size,
            float(costs.cost_s[k]),
            float(costs.ttft_s[k]),
            float(scores[k]),
        )
        for k in best
    ]
    prefill = _sources(demand, columns)
    if len(prefill):
        times = _source_times(
            demand,
            columns,
            int(columns.held_blocks[placement.decode_row]),
            prefill,
            columns.block_s(placement.decode_row),
        )
        total_s = times[0] + np.maximum(times[1], times[2]) + FETCH_S
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
    return replace(placement, candidates=tuple(candidates))

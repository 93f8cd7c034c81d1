"""Where a request goes: the decode worker first, then whether blocks are worth fetching, and from whom.

Pure functions over snapshots: filter, score in [0, 1], pick. The policy here is *least loaded*, with a static threshold: a request
that lacks no more than `local_tokens` at its decode worker gets no source, because computing them with the tail is cheaper
than asking for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SOURCES = 3
MAX_HOLDERS = 2


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker as the router sees it at this moment, for one request."""

    worker_id: str
    num_active: int
    """Choices (decode) or chains (prefill) that this router has on it."""
    max_active: int
    active_tokens: int
    """Tokens of those choices (decode), or tokens it has yet to compute for this router (prefill)."""
    pool_tokens: int
    num_placed: int
    """Ever; breaks ties, so that equal workers take turns."""
    num_held_blocks: int
    """Of this request's chain."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of its place."""

    num_tokens: int
    """Prompt and emitted tokens of one choice."""
    num_choices: int
    num_kv_tokens: int
    """The most tokens that one choice will ever have in a pool."""
    num_blocks_before_tail: int
    block_size: int
    failed_worker_ids: frozenset[str] = frozenset()
    """Sources that failed this request before."""


@dataclass(frozen=True, slots=True)
class Placement:
    decode_id: str
    source_ids: tuple[str, ...]
    holder_ids: tuple[str, ...]
    num_missing_tokens: int
    """Tokens that the decode worker has not, as far as the index knows, the tail apart."""


def can_take(worker: WorkerSnapshot, demand: Demand) -> bool:
    """A worker with nothing to do takes whatever fits into its pool; others must have room beside what they have."""
    if worker.pool_tokens < demand.num_kv_tokens:
        return False
    if worker.num_active == 0:
        return True
    has_sequences = worker.num_active + demand.num_choices <= worker.max_active
    return has_sequences and worker.active_tokens + demand.num_tokens * demand.num_choices <= worker.pool_tokens


def score_decode(worker: WorkerSnapshot) -> float:
    """1 is idle, 0 is full."""
    return 1.0 - min(worker.num_active / worker.max_active, 1.0)


def place(
    demand: Demand, decode: Sequence[WorkerSnapshot], prefill: Sequence[WorkerSnapshot], local_tokens: int
) -> Placement | None:
    """None while no decode worker can take the request."""
    candidates = [worker for worker in decode if can_take(worker, demand)]
    if not candidates:
        return None
    chosen = max(candidates, key=lambda worker: (score_decode(worker), worker.num_held_blocks, -worker.num_placed))
    held = min(chosen.num_held_blocks, demand.num_blocks_before_tail)
    missing = (demand.num_blocks_before_tail - held) * demand.block_size
    if missing <= local_tokens:
        return Placement(chosen.worker_id, (), (), missing)
    others = [worker for worker in decode if worker.worker_id != chosen.worker_id]
    computing = _sources(demand, prefill)
    sources = (*_whole_holder(demand, others), *computing)[:MAX_SOURCES]
    holders: tuple[str, ...] = ()
    if computing:
        first = next(worker for worker in prefill if worker.worker_id == computing[0])
        at_least = first.num_held_blocks + local_tokens // demand.block_size
        others = [worker for worker in (*decode, *prefill) if worker.worker_id != first.worker_id]
        holders = _holders(demand, others, at_least)
    return Placement(chosen.worker_id, sources, holders, missing)


def _whole_holder(demand: Demand, decode: Sequence[WorkerSnapshot]) -> tuple[str, ...]:
    """Another decode worker that has all whole blocks before the tail: nothing needs to be computed for them."""
    at_least = demand.num_blocks_before_tail
    able = [w for w in decode if w.num_held_blocks >= at_least and w.worker_id not in demand.failed_worker_ids]
    able.sort(key=lambda worker: (worker.num_active, worker.num_placed))
    return tuple(worker.worker_id for worker in able[:1])


def _sources(demand: Demand, prefill: Sequence[WorkerSnapshot]) -> tuple[str, ...]:
    chain_tokens = demand.num_blocks_before_tail * demand.block_size
    able = [
        worker
        for worker in prefill
        if worker.pool_tokens >= chain_tokens and worker.worker_id not in demand.failed_worker_ids
    ]
    able.sort(key=lambda w: (w.active_tokens - w.num_held_blocks * demand.block_size, w.num_placed))
    return tuple(worker.worker_id for worker in able[:MAX_SOURCES])


def _holders(demand: Demand, others: Sequence[WorkerSnapshot], at_least: int) -> tuple[str, ...]:
    better = [w for w in others if w.num_held_blocks > at_least and w.worker_id not in demand.failed_worker_ids]
    better.sort(key=lambda worker: -worker.num_held_blocks)
    return tuple(worker.worker_id for worker in better[:MAX_HOLDERS])

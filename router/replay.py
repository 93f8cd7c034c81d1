"""What each policy would do with a trace: the real placement over a model of pools, in no time at all.

Pure. A prefill worker computes one prompt after the other at its measured rate, a decode worker takes a step for all of its choices
at once, and each has a cache of blocks, the least recently used of which go first. Good for comparing policies on one's own traffic;
for times that include everything else, run simulated workers (`--engine sim`). Called by `kvferry explain --trace`.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.kv.block_id import announced
from router.index import PrefixIndex
from router.placement import POLICIES, Columns, Demand, Placement, place
from router.view import held_by_row

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ReplayWorker:
    """One worker of the described pools."""

    name: str
    is_decode: bool
    tokens_per_s: float
    """Of prompts."""
    pool_tokens: int
    step_base_s: float = 0.02
    step_slope_s: float = 0.0
    max_sequences: int = 64


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    at_s: float
    num_prompt: int
    num_output: int
    keys: tuple[int, ...]
    """Of the prompt's whole blocks: equal keys are equal beginnings."""


@dataclass(slots=True)
class ReplayOutcome:
    """Of one policy. One entry for each request that found a place."""

    policy: str
    ttft_s: list[float] = field(default_factory=list[float])
    tpot_s: list[float] = field(default_factory=list[float])
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """That nobody had to compute."""
    num_local: int = 0
    num_beyond_slo: int = 0
    num_unplaced: int = 0
    num_by_worker: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Cache:
    max_blocks: int
    keys: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])


class Replay:
    """One policy over one description of pools."""

    def __init__(
        self,
        workers: Sequence[ReplayWorker],
        policy: str,
        block_s: float,
        slo_ttft_s: float = float("inf"),
        slo_tpot_s: float = float("inf"),
    ):
        """`block_s`: seconds to move a block between any two workers."""
        self._workers, self._policy, self._block_s = workers, POLICIES[policy], block_s
        self._slo_ttft_s, self._slo_tpot_s = slo_ttft_s, slo_tpot_s
        self._index = PrefixIndex()
        self._caches = [_Cache(worker.pool_tokens // BLOCK_SIZE) for worker in workers]
        self._busy_until = [0.0] * len(workers)
        self._active = np.zeros(len(workers), np.int64)
        self._tokens = np.zeros(len(workers), np.int64)
        self._placed = np.zeros(len(workers), np.int64)
        self._ends: list[tuple[float, int, int]] = []  # when, at which decode worker, how many tokens
        self.outcome = ReplayOutcome(policy)

    def run(self, requests: Iterable[ReplayRequest]) -> ReplayOutcome:
        for number, request in enumerate(requests):
            self._take(number, request)
        names = [worker.name for worker in self._workers]
        self.outcome.num_by_worker = dict(zip(names, self._placed.tolist(), strict=True))
        return self.outcome

    def _take(self, number: int, request: ReplayRequest) -> None:
        now = request.at_s
        self._release(now)
        demand = self._demand(number, request)
        while (placement := place(demand, self._columns(request, now), self._policy)) is None:
            if not self._ends:
                self.outcome.num_unplaced += 1
                return
            now = max(now, self._ends[0][0])
            self._release(now)
        self._count(request, demand, placement, now)
        self._carry_out(request, placement, now)

    def _demand(self, number: int, request: ReplayRequest) -> Demand:
        return Demand(
            number=number,
            num_tokens=request.num_prompt,
            num_choices=1,
            num_kv_tokens=request.num_prompt + request.num_output - 1,
            num_blocks_before_tail=max(request.num_prompt - 1, 0) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            output_tokens=request.num_output,
            slo_ttft_s=self._slo_ttft_s,
            slo_tpot_s=self._slo_tpot_s,
            local_tokens=BLOCK_SIZE,
        )

    def _columns(self, request: ReplayRequest, now: float) -> Columns:
        workers, n = self._workers, len(self._workers)
        rates = np.array([worker.tokens_per_s for worker in workers])
        waiting = np.maximum(np.array(self._busy_until) - now, 0.0) * rates
        held = held_by_row(self._index.held(request.keys), n)
        return Columns(
            is_decode=np.array([worker.is_decode for worker in workers]),
            is_usable=np.ones(n, np.bool_),
            is_reserved=np.zeros(n, np.bool_),
            num_active=self._active,
            max_active=np.array([worker.max_sequences for worker in workers]),
            active_tokens=self._tokens,
            pool_tokens=np.array([worker.pool_tokens for worker in workers]),
            num_placed=self._placed,
            step_base_s=np.array([worker.step_base_s for worker in workers]),
            step_slope_s=np.array([worker.step_slope_s for worker in workers]),
            waiting_tokens=waiting.astype(np.int64),
            tokens_per_s=rates,
            held_blocks=held,
            block_s=lambda row: np.full(n, self._block_s),
        )

    def _count(self, request: ReplayRequest, demand: Demand, placement: Placement, now: float) -> None:
        outcome, predicted = self.outcome, placement.prediction
        computing = placement.decode_row if placement.is_local else placement.source_rows[0]
        num_computed = round(predicted.computing_s * self._workers[computing].tokens_per_s)
        outcome.ttft_s.append(now - request.at_s + predicted.ttft_s)
        outcome.tpot_s.append(predicted.tpot_s)
        outcome.num_prompt_tokens += request.num_prompt
        num_before_tail = demand.num_blocks_before_tail * BLOCK_SIZE
        outcome.num_cached_tokens += max(num_before_tail - num_computed, 0)
        outcome.num_local += placement.is_local
        outcome.num_beyond_slo += not placement.keeps_slos

    def _carry_out(self, request: ReplayRequest, placement: Placement, now: float) -> None:
        decode, predicted = placement.decode_row, placement.prediction
        computing = decode if placement.is_local else placement.source_rows[0]
        self._busy_until[computing] = max(self._busy_until[computing], now) + predicted.computing_s
        num_tokens = request.num_prompt + request.num_output
        end_s = now + predicted.ttft_s + predicted.tpot_s * request.num_output
        heapq.heappush(self._ends, (end_s, decode, num_tokens))
        self._active[decode] += 1
        self._tokens[decode] += num_tokens
        for row in {decode, computing}:
            self._placed[row] += 1
            self._keep(row, request.keys)

    def _release(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, row, num_tokens = heapq.heappop(self._ends)
            self._active[row] -= 1
            self._tokens[row] -= num_tokens

    def _keep(self, row: int, keys: tuple[int, ...]) -> None:
        """The chain's end is the first to go, as in a worker's pool."""
        cache = self._caches[row]
        for key in reversed(keys):
            cache.keys[key] = None
            cache.keys.move_to_end(key)
        gone: list[int] = []
        while len(cache.keys) > cache.max_blocks:
            gone.append(cache.keys.popitem(last=False)[0])
        self._index.add(row, announced(keys))
        self._index.remove(row, gone)

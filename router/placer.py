"""From a live request and what is known of the workers to a placement: between the dispatcher, which acts, and placement.py.

It knows the index, the view and the policy; it opens nothing and changes nobody's load.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ConfigurationError
from kvferry.kv.block_id import num_whole_blocks_before_tail
from router.live import Live
from router.members import Member, Members
from router.placement import POLICIES, Candidate, Demand, Placement, Prediction, place, rows_with_room
from router.view import fill_by_row, held_by_row

SMOOTHING = 0.05
INITIAL_OUTPUT_TOKENS = 128.0
SLO_MARGIN = 0.7
"""Of the time that a request may wait: a queue that is let in up to its limit settles there, and half of it comes too late."""


@dataclass(frozen=True, slots=True)
class PlacingRules:
    policy: str = "cost"
    local_tokens: int = 16
    """Up to so many missing tokens, a request fetches nothing."""
    slo_ttft_s: float = float("inf")
    slo_tpot_s: float = float("inf")
    """For requests that name none."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigurationError(f"policy {self.policy!r} is not known; known: {', '.join(POLICIES)}")


class Placer:
    def __init__(self, members: Members, rules: PlacingRules):
        self._members, self.rules = members, rules
        self._output_tokens = INITIAL_OUTPUT_TOKENS
        self._placed_ttft_s = 0.0

    def finished(self, live: Live) -> None:
        """What the next ones are expected to yield, and to take until their first token once they have a place."""
        num_tokens = live.journal.num_tokens // len(live.journal.choices)
        self._output_tokens += SMOOTHING * (num_tokens - self._output_tokens)
        first_token_s = live.instants_s.get("first_token")
        if first_token_s is not None and live.journal.attempt == 1:
            self._placed_ttft_s += SMOOTHING * (first_token_s - live.instants_s["placed"] - self._placed_ttft_s)

    def most_kv_tokens(self) -> int:
        """Of one choice that can be placed now, if there were room."""
        description = self._members.any_description
        most = self._members.view.most_pool_tokens(usable=True)
        return 0 if description is None else min(most, description.context_tokens)

    def max_wait_s(self, live: Live) -> float:
        """For a place, if its time to the first token is to be kept: with a margin, for none of this is exact."""
        return max(self._slo_ttft_s(live) - self._placed_ttft_s, 0.0) * SLO_MARGIN

    def _slo_ttft_s(self, live: Live) -> float:
        return self.rules.slo_ttft_s if live.request.slo_ttft_s is None else live.request.slo_ttft_s

    def is_prefill_behind(self, now: float) -> bool:
        """What waits at the idlest prefill worker takes longer than a usual answer has of steps."""
        view, description = self._members.view, self._members.any_description
        if description is None:
            return False
        columns = view.columns(description.context_tokens, held_by_row((), view.num_rows), now)
        prefill, decode = columns.is_usable > columns.is_decode, columns.is_usable & columns.is_decode
        waiting_s = (columns.waiting_tokens / columns.tokens_per_s).min(where=prefill, initial=np.inf)
        step_s = columns.step_base_s + columns.step_slope_s * columns.num_active
        decoding_s = self._output_tokens * step_s.min(where=decode, initial=np.inf)
        return bool(decoding_s < waiting_s < np.inf)

    def place(self, live: Live, now: float) -> Placement | None:
        """None at once where there is no room: asked of every request that waits."""
        members, description = self._members, self._members.any_description
        root = members.root(live.request.salt)
        if root is None or description is None:
            return None
        demand = self._demand(live, now, description.block_size)
        columns = members.view.columns(demand.num_tokens, held_by_row((), members.view.num_rows), now)
        rows = rows_with_room(columns, demand)
        if not len(rows):
            return None
        if live.has_yielded:
            rows = self._equals_before_others(live, rows)
        keys = live.block_keys(root, description.block_size)[: demand.num_blocks_before_tail]
        fill_by_row(columns.held_blocks, members.held(keys, now))
        return place(demand, columns, POLICIES[self.rules.policy], rows)

    def _equals_before_others(self, live: Live, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """A continuation is bit-equal on workers of one numerics id; others take it where none of these has room."""
        equals = [row for row in rows.tolist() if live.is_bit_equal_on(self._members.at_row(row).description)]
        return np.array(equals, np.intp) if equals else rows

    def expect(self, live: Live, placement: Placement, now: float) -> None:
        """The chain will be where it was placed, and where it is computed."""
        description, root = self._members.any_description, self._members.root(live.request.salt)
        if description is None or root is None:
            return
        num_blocks = num_whole_blocks_before_tail(len(live.request.prompt_tokens), description.block_size)
        keys = live.block_keys(root, description.block_size)[:num_blocks]
        if keys:
            rows = [placement.decode_row, *([] if placement.is_local else placement.source_rows[:1])]
            for row in rows:
                self._members.expected.add(row, keys, now)

    def _demand(self, live: Live, now: float, block_size: int) -> Demand:
        request, num_tokens = live.request, live.longest_tokens
        left = request.sampling.max_tokens - (num_tokens - len(request.prompt_tokens))
        waited_s = 0.0 if live.journal.num_tokens else now - live.accepted_s
        return Demand(
            number=live.number,
            num_tokens=num_tokens,
            num_choices=live.journal.num_open,
            num_kv_tokens=num_kv_tokens(live),
            num_blocks_before_tail=num_whole_blocks_before_tail(num_tokens, block_size),
            block_size=block_size,
            output_tokens=max(min(left, round(self._output_tokens)), 1),
            slo_ttft_s=max(self._slo_ttft_s(live) - waited_s, 0.0),
            slo_tpot_s=self.rules.slo_tpot_s if request.slo_tpot_s is None else request.slo_tpot_s,
            failed_rows=self._rows(live.failed_worker_ids),
            local_tokens=self.rules.local_tokens,
            runs_apart=live.suspicion.is_suspect(now),
            computes_all=live.wants_prompt_logprobs,
            explains=request.explains,
        )

    def _rows(self, worker_ids: Collection[str]) -> frozenset[int]:
        if not worker_ids:
            return frozenset()
        members = (self._members.get(worker_id) for worker_id in worker_ids)
        return frozenset(member.row for member in members if member is not None)

    def explanation(self, placement: Placement) -> dict[str, Any]:
        """For the client that asked: JSON values, times in milliseconds."""
        at_row = self._members.at_row
        return {
            "policy": self.rules.policy,
            "decode": at_row(placement.decode_row).worker_id,
            "sources": [at_row(row).worker_id for row in placement.source_rows],
            "holders": [at_row(row).worker_id for row in placement.holder_rows],
            "missing_tokens": placement.num_missing_tokens,
            "computes_here": placement.is_local,
            "decided_by": placement.decided_by,
            "keeps_slos": placement.keeps_slos,
            "predicted_ms": _parts(placement.prediction),
            "alternative": None
            if placement.alternative is None
            else {"computes_here": not placement.is_local, "predicted_ms": _parts(placement.alternative)},
            "candidates": [self._candidate(at_row(one.row), one) for one in placement.candidates],
        }

    @staticmethod
    def _candidate(member: Member, one: Candidate) -> dict[str, Any]:
        return {
            "worker": member.worker_id,
            "role": one.role,
            "cached_tokens": one.held_tokens,
            "cost_ms": _ms(one.cost_s),
            "ttft_ms": _ms(one.ttft_s),
            "score": round(one.score, 4),
        }


def num_kv_tokens(live: Live) -> int:
    """The most tokens that one of its choices will have in a pool: the answer's last one needs no room."""
    return len(live.request.prompt_tokens) + max(live.request.sampling.max_tokens - 1, 0)


def _parts(predicted: Prediction) -> dict[str, float]:
    return {
        "waiting": _ms(predicted.waiting_s),
        "computing": _ms(predicted.computing_s),
        "moving": _ms(predicted.moving_s),
        "tail": _ms(predicted.tail_s),
        "ttft": _ms(predicted.ttft_s),
        "tpot": _ms(predicted.tpot_s),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

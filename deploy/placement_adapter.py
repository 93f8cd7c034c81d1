"""The router's placement as loadtest/placement_load.py drives it, and the process in which it does.

The router's modules are imported by name when needed: deploy imports no role. `python -m deploy.placement_adapter NUM_BLOCKS EVERY`
prints the figures as one JSON list.
"""

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvferry.kv.block_id import chain, chain_root
from kvferry.messages import Role, WorkerDescription, WorkerProgress
from loadtest.placement_load import PlacementScale, figures_of, measure_placement
from loadtest.router_figures import RouterFigure

BLOCK_SIZE = 16
ROOT = chain_root("model", "float16")
PREFILL_EVERY = 5
"""One worker in so many computes prompts; the others decode."""
OUTPUT_TOKENS = 128
MEASURED = WorkerProgress(step_s={1: 0.010, 64: 0.030}, tokens_per_s={512: 8000.0, 8192: 12000.0})
"""What every worker has told of itself."""


class PlacementAdapter:
    """As router/placer.py does it: who holds what, and will soon; the columns; the policy; what is expected from then on."""

    def __init__(self, num_workers: int):
        self._module: Any = importlib.import_module("router.placement")
        self._as_column: Any = importlib.import_module("router.view").held_by_row
        self._keys_of: Any = importlib.import_module("router.index").keys_of
        self._index: Any = importlib.import_module("router.index").PrefixIndex()
        self._expected: Any = importlib.import_module("router.expected").ExpectedBlocks()
        self._view: Any = importlib.import_module("router.view").WorkerView()
        self._rows = [self._open(number) for number in range(num_workers)]
        self._num_placed = 0

    def _open(self, number: int) -> int:
        row: int = self._view.open_row(_description(number))
        self._view.set(row, is_attached=True)
        self._view.progressed(row, MEASURED, {}, time.monotonic())
        return row

    def apply_events(self, worker: int, sealed: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self._index.add(self._rows[worker], self._keys_of(sealed))
        self._index.remove(self._rows[worker], self._keys_of(evicted))

    def hash(self, tokens: Sequence[int]) -> list[bytes]:
        return chain(ROOT, tokens, BLOCK_SIZE)

    def prepare(self, block_ids: Sequence[bytes]) -> list[int]:
        return self._keys_of(block_ids)

    def place(self, prepared: list[int]) -> Any:
        now, tokens = time.monotonic(), len(prepared) * BLOCK_SIZE
        keys = prepared[:-1]
        held = [*self._index.held(keys), *self._expected.held(keys, now)]
        column = self._as_column(held, self._view.num_rows)
        demand = self._module.Demand(
            number=self._num_placed,
            num_tokens=tokens,
            num_choices=1,
            num_kv_tokens=tokens + OUTPUT_TOKENS,
            num_blocks_before_tail=len(keys),
            block_size=BLOCK_SIZE,
            output_tokens=OUTPUT_TOKENS,
            local_tokens=BLOCK_SIZE,
        )
        columns = self._view.columns(tokens, column, now)
        return self._module.place(demand, columns, self._module.POLICIES["cost"])

    def note(self, prepared: list[int], placement: Any) -> None:
        self._num_placed += 1
        for row in (placement.decode_row, *placement.source_rows[:1]):
            self._view.set(row, num_placed=self._view.ints["num_placed"][row] + 1)
            self._expected.add(row, prepared[:-1], time.monotonic())


def _description(number: int) -> WorkerDescription:
    is_prefill = number % PREFILL_EVERY == 0
    return WorkerDescription(
        worker_id=f"worker-{number}",
        incarnation="",
        role=Role.PREFILL if is_prefill else Role.DECODE,
        address=f"10.0.0.1:{number}",
        model_id="model",
        fidelity="float16",
        numerics_id="",
        block_size=BLOCK_SIZE,
        block_bytes=1 << 20,
        pool_tokens=1_000_000,
        context_tokens=131_072,
        vocabulary_size=128_256,
        max_sequences=64,
    )


def new_index(num_workers: int) -> PlacementAdapter:
    return PlacementAdapter(num_workers)


def main() -> None:
    num_blocks, announce_every = int(sys.argv[1]), int(sys.argv[2])
    scale = PlacementScale(num_blocks=num_blocks, announce_every=announce_every)
    figures: list[RouterFigure] = figures_of(measure_placement(new_index, scale))
    print(json.dumps([dataclasses.asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()

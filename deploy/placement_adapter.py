"""The router's placement as loadtest/placement_load.py drives it, and the process in which it does.

The router's modules are imported by name when needed: deploy imports no role. `python -m deploy.placement_adapter NUM_BLOCKS EVERY`
prints the figures as one JSON list.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from loadtest.placement_load import PlacementScale, figures_of, measure_placement
from loadtest.router_figures import RouterFigure

BLOCK_SIZE = 16
IDLE = {"num_active": 0, "max_active": 64, "active_tokens": 0, "pool_tokens": 1_000_000, "num_placed": 0}


class PlacementAdapter:
    """All workers decode, and none has anything to do: every one is a candidate."""

    def __init__(self, num_workers: int):
        self._placement: Any = importlib.import_module("router.placement")
        self._index: Any = importlib.import_module("router.index").PrefixIndex()
        self._names = [f"decode-{number}" for number in range(num_workers)]

    def apply_events(self, worker: int, sealed: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self._index.update(self._names[worker], sealed, evicted)

    def prepare(self, block_ids: Sequence[bytes]) -> Sequence[bytes]:
        return block_ids

    def place(self, prepared: Sequence[bytes]) -> Any:
        block_ids = prepared
        tokens = len(block_ids) * BLOCK_SIZE
        demand = self._placement.Demand(tokens, 1, tokens + BLOCK_SIZE, len(block_ids) - 1, BLOCK_SIZE)
        workers = [
            self._placement.WorkerSnapshot(name, num_held_blocks=self._index.num_held(name, block_ids), **IDLE)
            for name in self._names
        ]
        return self._placement.place(demand, workers, [], BLOCK_SIZE)

    def note(self, prepared: Sequence[bytes], placement: Any) -> None:
        """Nothing: the next one is told by the workers."""


def new_index(num_workers: int) -> PlacementAdapter:
    return PlacementAdapter(num_workers)


def main() -> None:
    num_blocks, announce_every = int(sys.argv[1]), int(sys.argv[2])
    scale = PlacementScale(num_blocks=num_blocks, announce_every=announce_every)
    figures: list[RouterFigure] = figures_of(measure_placement(new_index, scale))
    print(json.dumps([dataclasses.asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()

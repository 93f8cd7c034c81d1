"""What schedules draw, whatever they are about: workers with their roads, and faults."""

from dataclasses import dataclass
from typing import Any

from tests.faulty_roads import faulty, small_frames


@dataclass(frozen=True)
class DrawnWorker:
    num_slots: int
    max_step_tokens: int
    max_local_tokens: int
    max_sequences: int
    roads: str
    frame_blocks: int
    fault_of_roads: str

    def settings(self, seed: object) -> dict[str, Any]:
        names = ("num_slots", "max_step_tokens", "max_local_tokens", "max_sequences")
        roads = (faulty(road, self.fault_of_roads, seed) for road in small_frames(self.frame_blocks, self.roads))
        return {name: getattr(self, name) for name in names} | {"roads": tuple(roads)}


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    name: str
    for_s: float
    """Until it is over, or the new worker comes. Those that happen at once are over, or for good."""

"""What the log says of a step at level debug, and back: measurements read it, and so may a person."""

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"step=(\d+) chunks=(\d+) tokens=(\d+) planned_s=([\d.]+) duration_s=([\d.]+)")


@dataclass(frozen=True, slots=True)
class StepLine:
    """Times are the monotonic clock's, which is the same in all processes of a host."""

    step: int
    num_chunks: int
    num_tokens: int
    planned_s: float
    duration_s: float

    def __str__(self) -> str:
        counts = f"step={self.step} chunks={self.num_chunks} tokens={self.num_tokens}"
        return f"{counts} planned_s={self.planned_s:.6f} duration_s={self.duration_s:.6f}"


def step_in(line: str) -> StepLine | None:
    """None for any other line."""
    found = _PATTERN.search(line)
    if found is None:
        return None
    return StepLine(int(found[1]), int(found[2]), int(found[3]), float(found[4]), float(found[5]))

"""What a router is to reach, and one figure of it beside its target. Pure."""

from dataclasses import dataclass

# Set by the project beforehand.
MAX_ADDED_TTFT_MS, MIN_TOKENS_PER_S = 1.5, 15_000.0
MAX_PLACE_US, MAX_ENTRY_BYTES, MAX_EVENTS_CORE_SHARE = 300.0, 150.0, 0.30
EVENTS_PER_S = 200_000
"""Blocks that all workers together seal and evict in a second."""
MIN_GOODPUT_SHARE, MAX_REFUSAL_MS, MAX_RSS_RATIO, MAX_RECOVERY_S, MAX_BROKEN = 0.90, 50.0, 1.05, 10.0, 0.0
NORMAL_TTFT = 1.5
"""Times the idle TTFT: what counts as back to normal."""


@dataclass(frozen=True, slots=True)
class RouterFigure:
    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """None where no target is set."""
        if self.at_most is None and self.at_least is None:
            return None
        is_low_enough = self.at_most is None or self.value <= self.at_most
        return is_low_enough and (self.at_least is None or self.value >= self.at_least)

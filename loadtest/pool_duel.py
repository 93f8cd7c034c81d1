"""Two pools against one at the same rate: how many times better, where splitting loses, and the target set for it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.lengths import CHAT
from loadtest.trial import Measured

COMPARED = (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99), ("e2e", 50))
EVEN = 0.05
"""Nearer than this, nobody wins."""
TARGET_ITL_P99 = 4.0
"""Set by the project beforehand: gaps of chats amid long prompts, on the real machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    part: str
    rate: float
    against: str
    """The layout with one pool."""
    figure: str
    kind: str
    ratio: float
    """So many times better with two pools; below 1, splitting loses."""
    target: float | None = None

    @property
    def loses(self) -> bool:
        return self.ratio < 1 - EVEN

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.ratio >= self.target


def verdicts(measured: Sequence[Measured]) -> Iterator[Verdict]:
    """In the order of parts and rates."""
    for two in measured:
        if two.layout.has_two_pools:
            for one in measured:
                if not one.layout.has_two_pools and (one.part, one.rate) == (two.part, two.rate):
                    yield from _of(two, one)


def _of(two: Measured, one: Measured) -> Iterator[Verdict]:
    def verdict(figure: str, kind: str, ratio: float, target: float | None = None) -> Verdict:
        return Verdict(two.part, two.rate, one.layout.name, figure, kind, ratio, target)

    kinds = ["", *two.report.kinds] if len(two.report.kinds) > 1 else [""]
    for name, share in COMPARED:
        for kind in kinds:
            ours, theirs = (side.report.percentile_s(name, share, kind) for side in (two, one))
            if ours and theirs:
                is_aim = (two.part, name, share, kind) == ("real", "itl", 99, CHAT) and is_like_for_like(two, one)
                yield verdict(f"{name}_p{share}", kind, theirs / ours, TARGET_ITL_P99 if is_aim else None)
    if one.report.goodput:
        yield verdict("goodput", "", two.report.goodput / one.report.goodput)


def is_like_for_like(two: Measured, one: Measured) -> bool:
    """As many workers, so each with as many threads."""
    return two.layout.num_workers == one.layout.num_workers

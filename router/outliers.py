"""Slow workers are set aside for a while, and come back by themselves. Pure: the clock comes in as an argument.

A worker that takes several times as long as its pool's median for the same work is slow: a throttled processor, a failing card, a
neighbour. It gets nothing new, what it has goes on, and after a time that doubles each time it is tried again. At most half of
a pool is set aside at once: then it is the work that is slow.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

SLOW = 3.0
"""Times the median of the others."""
FIRST_S, MAX_S = 5.0, 60.0
MIN_WORKERS = 2


@dataclass(slots=True)
class _Aside:
    until_s: float
    for_s: float


class Outliers:
    def __init__(self) -> None:
        self._aside: dict[str, _Aside] = {}

    def judge(self, slowness: Mapping[str, float], fresh: Collection[str], now: float) -> frozenset[str]:
        """Who is aside. `slowness`: of the workers of one pool, seconds for the same work; who was not measured is left out.

        `fresh` were measured anew since the last time: only they are judged, so that one that is back is really tried.
        """
        for name in [name for name in self._aside if name not in slowness]:
            del self._aside[name]
        limit = len(slowness) // 2
        ordered = sorted(slowness.items(), key=lambda item: -item[1])
        for place, (name, seconds) in enumerate(ordered):
            if name not in fresh:
                continue
            if len(ordered) < MIN_WORKERS or seconds <= SLOW * _median_without(ordered, place):
                self._forgive(name, now)
                continue
            found = self._aside.get(name)
            if (found is None or now >= found.until_s) and len(self._now_aside(now)) < limit:
                for_s = FIRST_S if found is None else min(2 * found.for_s, MAX_S)
                self._aside[name] = _Aside(now + for_s, for_s)
        self._release_beyond(limit, ordered, now)
        return self._now_aside(now)

    def _release_beyond(self, limit: int, ordered: Sequence[tuple[str, float]], now: float) -> None:
        """Healthy ones may have left: of those aside, the fastest are tried again before their time."""
        aside = self._now_aside(now)
        slowest_first = [name for name, _ in ordered if name in aside]
        for name in slowest_first[limit:]:
            self._aside[name].until_s = now

    def _forgive(self, name: str, now: float) -> None:
        found = self._aside.get(name)
        if found is not None and now >= found.until_s:
            del self._aside[name]

    def _now_aside(self, now: float) -> frozenset[str]:
        return frozenset(name for name, found in self._aside.items() if now < found.until_s)


def _median_without(ordered: Sequence[tuple[str, float]], place: int) -> float:
    """Of the others: the lower one of the two in the middle."""
    middle = len(ordered) // 2
    return ordered[middle if middle != place else min(middle + 1, len(ordered) - 1)][1]

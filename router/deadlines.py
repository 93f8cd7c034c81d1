"""When which request must be looked at again. Pure: the clock comes in as an argument.

A heap of instants by request number. Requests end before most of their instants come, so entries of ended ones are dropped as they
come up, and all together when they are many: a client that names long time limits takes no memory with them.
"""

import heapq
from collections.abc import Collection, Iterator

SLACK = 1024


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, number: int, live: Collection[int]) -> None:
        heapq.heappush(self._heap, (at_s, number))
        if len(self._heap) > 4 * len(live) + SLACK:
            self._heap = [entry for entry in set(self._heap) if entry[1] in live]
            heapq.heapify(self._heap)

    def is_first(self, number: int) -> bool:
        """The next instant of all is this request's: who sleeps until another one must hear of it."""
        return bool(self._heap) and self._heap[0][1] == number

    def due(self, now: float) -> Iterator[int]:
        """Requests whose instants have come; each entry once."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    def next_s(self, live: Collection[int]) -> float | None:
        """The next instant of a request that is live."""
        while self._heap and self._heap[0][1] not in live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

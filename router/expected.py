"""What workers will hold soon: the chains of requests that were placed a moment ago. Pure.

A worker tells of a block once it has it; requests with the same beginning that come in the meantime should not be computed again
elsewhere. What is expected is forgotten after a few seconds: by then the workers have told, or it did not come to pass.
"""

from collections.abc import Sequence

from kvferry.kv.block_id import announced
from router.index import Held, PrefixIndex

GENERATION_S = 4.0


class ExpectedBlocks:
    """Two generations of an index; the older one is dropped whole."""

    def __init__(self) -> None:
        self._young, self._old = PrefixIndex(), PrefixIndex()
        self._turned_at = 0.0

    def add(self, row: int, keys: Sequence[int], now: float) -> None:
        self._turn(now)
        self._young.add(row, announced(keys))

    def remove(self, row: int, keys: Sequence[int]) -> None:
        """It had them, and has them no longer."""
        for index in (self._young, self._old):
            index.remove(row, keys)

    def forget(self, row: int) -> None:
        """Its worker has left; the row may be another's next."""
        for index in (self._young, self._old):
            index.retire(row)
            while index.is_sweeping:
                index.sweep()

    def held(self, keys: Sequence[int], now: float) -> list[Held]:
        self._turn(now)
        return [*self._young.held(keys), *self._old.held(keys)]

    def _turn(self, now: float) -> None:
        if now - self._turned_at >= 2 * GENERATION_S:
            self._young, self._old = PrefixIndex(), PrefixIndex()
            self._turned_at = now
        elif now - self._turned_at >= GENERATION_S:
            self._young, self._old = PrefixIndex(), self._young
            self._turned_at = now

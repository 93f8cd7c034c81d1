"""Which blocks are on their way to which choice: what the service shall fetch, and what it shall drop. Pure.

A choice has at most one fetch. Before, while there is no room for it, its source may be asked to compute what it will want
(*warming*). A block is brought by the first fetch that asks for it; whoever else wants it waits for that one. Which source is asked,
and when, is the scheduler's to say.
"""

from dataclasses import dataclass

from decode_worker.choice import Choice
from kvferry.messages import Source


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """What the service shall fetch into `choice`'s sequence: its blocks from where it is up to `num_blocks`."""

    choice: Choice
    source: Source
    first_block: int
    num_blocks: int
    is_warm: bool = False
    """The source shall only compute them: there is no room for them here yet."""


class Fetches:
    """Of all choices of one worker."""

    def __init__(self) -> None:
        self._of: dict[Choice, FetchOrder] = {}
        self._warming: dict[Choice, FetchOrder] = {}
        self._bringing: dict[bytes, FetchOrder] = {}
        self._opened: list[FetchOrder] = []
        self._dropped: list[FetchOrder] = []

    def take(self) -> tuple[list[FetchOrder], list[FetchOrder]]:
        """To open, and to drop, since the last call."""
        fetches = self._opened, self._dropped
        self._opened, self._dropped = [], []
        return fetches

    def __contains__(self, choice: Choice) -> bool:
        """It has a fetch of its own."""
        return choice in self._of

    def brings(self, block_id: bytes | None) -> bool:
        return block_id in self._bringing

    def open(self, choice: Choice) -> None:
        """Of what it lacks before its tail, from its first source."""
        first, last = choice.sequence.num_sealed_blocks, choice.sequence.num_blocks_before_tail
        order = self._of[choice] = FetchOrder(choice, choice.sources[0], first, last)
        for block_id in choice.sequence.block_ids[first:last]:
            self._bringing.setdefault(block_id, order)
        self._opened.append(order)

    def warm(self, choice: Choice) -> None:
        last = choice.sequence.num_blocks_before_tail
        order = self._warming[choice] = FetchOrder(choice, choice.sources[0], 0, last, is_warm=True)
        self._opened.append(order)

    def ended(self, order: FetchOrder) -> bool:
        """By itself. False: it was dropped before. Until here, warming kept its place among those whom the source computes for."""
        if self._of.get(order.choice) is not order:
            return False
        self._forget(order)
        self.stop_warming(order.choice)
        return True

    def drop(self, choice: Choice) -> None:
        """Nothing is to be brought to it any more. Idempotent."""
        order = self._of.get(choice)
        if order is not None:
            self._drop(order)
            self._forget(order)
        self.stop_warming(choice)

    def stop_warming(self, choice: Choice) -> None:
        order = self._warming.pop(choice, None)
        if order is not None:
            self._drop(order)

    def _drop(self, order: FetchOrder) -> None:
        if order in self._opened:
            self._opened.remove(order)
        else:
            self._dropped.append(order)

    def _forget(self, order: FetchOrder) -> None:
        del self._of[order.choice]
        for block_id in order.choice.sequence.block_ids[order.first_block : order.num_blocks]:
            if self._bringing.get(block_id) is order:
                del self._bringing[block_id]

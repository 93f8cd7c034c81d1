"""How many blocks a source puts into a frame: as many as are through in half a second, by the frames that were acknowledged before.

What a source shows of its progress waits behind its frames on the line: on a slow one, large frames make it look silent. Pure: the
clock is handed in.
"""

from collections import deque

MAX_FRAMES_IN_FLIGHT = 2
FRAME_S = 0.5


class FramePace:
    """Of one fetch. Frames are acknowledged in the order in which they were sent."""

    def __init__(self, first: int, largest: int):
        """Blocks: of a frame while nothing is known, and of any."""
        self._first, self._largest = first, largest
        self._sent: deque[tuple[float, int]] = deque()
        self._acknowledged_s = 0.0
        self._blocks_per_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """At most, in the next frame."""
        if self._blocks_per_s is None:
            return self._first
        return max(min(int(self._blocks_per_s * FRAME_S), self._largest), 1)

    @property
    def num_in_flight(self) -> int:
        """At most: a block that takes longer than a frame may goes alone."""
        is_slow = self._blocks_per_s is not None and self._blocks_per_s * FRAME_S < 1
        return 1 if is_slow else MAX_FRAMES_IN_FLIGHT

    def sent(self, num_blocks: int, now: float) -> None:
        self._sent.append((now, num_blocks))

    def acknowledged(self, now: float) -> None:
        """The oldest of those that were sent: on its way since then, or since the one before it was through."""
        if not self._sent:
            return  # a reader that lies
        sent_s, num_blocks = self._sent.popleft()
        measured = num_blocks / max(now - max(sent_s, self._acknowledged_s), 1e-9)
        # Two may be heard of at once, which would make a slow line look fast.
        self._blocks_per_s = measured if self._blocks_per_s is None else min(measured, 2 * self._blocks_per_s)
        self._acknowledged_s = now

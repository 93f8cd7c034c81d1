"""How many placements that failed before a first token may be made again: a tenth of what succeeds, and never under ten. Pure.

Without it, a fault that makes placements fail multiplies the load that they are. Streams that have yielded a token are not counted:
they were accepted, and their deadline bounds them.
"""

WINDOW_S = 30.0
SHARE = 0.1
LEAST = 10


class RetryBudget:
    """Counts over this window and the one before it."""

    def __init__(self) -> None:
        self._window = 0
        self._successes = [0, 0]
        self._retries = [0, 0]

    def succeeded(self, now: float) -> None:
        self._turn(now)
        self._successes[0] += 1

    def take(self, now: float) -> bool:
        """Whether one more may be made; it is counted."""
        self._turn(now)
        if sum(self._retries) >= max(LEAST, SHARE * sum(self._successes)):
            return False
        self._retries[0] += 1
        return True

    def _turn(self, now: float) -> None:
        window = int(now / WINDOW_S)
        if window != self._window:
            is_next = window == self._window + 1
            self._successes = [0, self._successes[0] if is_next else 0]
            self._retries = [0, self._retries[0] if is_next else 0]
            self._window = window

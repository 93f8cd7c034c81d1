"""What this worker was measured to do: how long its steps take, how fast it computes prompts, how fast blocks come from others.

Running means over what really happened, by power of two of what they depend on; the router's placement goes by them. Pure.
"""

from typing import TypeVar

from kvferry.engine.plan import Plan
from kvferry.turns import bucket

SMOOTHING = 0.2
MAX_LINKS = 256
"""Workers come and go."""
MOST = 4.0
"""A single measurement counts as at most so many times the mean, and at least its inverse: a process that was stopped for a while is
not slow for long."""


class MeasuredRates:
    def __init__(self) -> None:
        self.step_s: dict[int, float] = {}
        """Of steps that only yield tokens, by the bucket of how many."""
        self.tokens_per_s: dict[int, float] = {}
        """Of steps that mostly catch up, by the bucket of the position up to which they do."""
        self.link_bytes_per_s: dict[str, float] = {}
        """By the worker that blocks came from."""
        self._only_probed: set[str] = set()

    def stepped(self, plan: Plan, duration_s: float) -> None:
        if duration_s <= 0:
            return
        num_behind = sum(len(chunk.tokens) for chunk in plan.chunks if len(chunk.tokens) > 1)
        if num_behind == 0:
            _mix(self.step_s, bucket(len(plan.chunks)), duration_s)
        elif 2 * num_behind > plan.num_tokens:
            end = max(chunk.start + len(chunk.tokens) for chunk in plan.chunks)
            _mix(self.tokens_per_s, bucket(end), num_behind / duration_s)

    def probed(self, source_id: str, bytes_per_s: float) -> None:
        """By a single frame, when the two met: holds until there is something better."""
        if source_id not in self.link_bytes_per_s:
            self.link_bytes_per_s[source_id] = bytes_per_s
            self._only_probed.add(source_id)
            self._forget_the_oldest()

    def fetched(self, source_id: str, num_bytes: int, duration_s: float) -> None:
        """Blocks that nobody had to compute meanwhile: only then does the time say something of the link."""
        if num_bytes and duration_s > 0:
            if source_id in self._only_probed:
                self._only_probed.remove(source_id)
                self.link_bytes_per_s.pop(source_id, None)
            _mix(self.link_bytes_per_s, source_id, num_bytes / duration_s)
            self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        while len(self.link_bytes_per_s) > MAX_LINKS:
            source_id = next(iter(self.link_bytes_per_s))
            del self.link_bytes_per_s[source_id]
            self._only_probed.discard(source_id)


K = TypeVar("K")


def _mix(means: dict[K, float], key: K, value: float) -> None:
    if key in means:
        mean = means[key]
        means[key] = mean + SMOOTHING * (min(max(value, mean / MOST), mean * MOST) - mean)
    else:
        means[key] = value

"""How many tokens of catching up fit into a step of a given time, from measured steps.

Pure. A step of n tokens is taken to cost `n / rate`; the rate is a running mean over steps that are mostly catching up.
"""

INITIAL_TOKENS_PER_S = 400.0
SMOOTHING = 0.3


class StepBudget:
    """`target_s` is the time of a step; the answer is a multiple of the block size and at least one block."""

    def __init__(self, target_s: float, block_size: int, max_tokens: int):
        self._target_s, self._block_size = target_s, block_size
        self._max_tokens = max(max_tokens, block_size)
        self.tokens_per_s = INITIAL_TOKENS_PER_S

    def num_tokens(self) -> int:
        wanted = min(self._target_s * self.tokens_per_s, self._max_tokens)
        return max(int(wanted) // self._block_size, 1) * self._block_size

    def measured(self, num_tokens: int, duration_s: float) -> None:
        """One step's tokens and time. Steps smaller than a block say little about the rate and are left out."""
        if num_tokens >= self._block_size and duration_s > 0:
            self.tokens_per_s += SMOOTHING * (num_tokens / duration_s - self.tokens_per_s)

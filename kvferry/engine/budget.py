"""How many tokens of catching up fit into a step, from measured steps. Pure.

A step of n tokens is taken to cost `n / rate`; the rate begins as the engine's warm-up measured it, and is a running mean over steps
that are mostly catching up. A decode worker's budget is what its target for the gap between two tokens leaves, after the steps that
only yield tokens have been measured.
"""

SMOOTHING = 0.3
MAX_STRETCH = 1.35
"""A tail that makes a step longer than this, and is the only one to do so, is spread over several: it costs its request a step or
a few, and the others no gap that they would notice. With more of them behind, spreading would only make them queue. Measured, it comes
to about half as long again: the kernels take rows by the tile, so a part costs more than its share.
"""


class StepBudget:
    """`target_s` is the time of catching up in a step; the answer is a multiple of the block size and at least one block."""

    def __init__(
        self, target_s: float, block_size: int, max_tokens: int, tokens_per_s: float, itl_target_s: float = 0.0
    ):
        """`tokens_per_s`: the rate to begin with.

        `itl_target_s`: the whole time of a step in which others yield tokens; 0: the same as if there were none.
        """
        self._target_s, self._block_size, self._itl_target_s = target_s, block_size, itl_target_s
        self._max_tokens = max(max_tokens, block_size)
        self.tokens_per_s = tokens_per_s
        self.yielding_s = 0.0
        """What yielding tokens takes of a step."""
        self.quiet_s = 0.0
        """A step that only yields tokens."""
        self.s_per_token = 0.0
        """What a token of catching up adds to it."""

    def num_tokens(self, is_yielding: bool = False) -> int:
        """`is_yielding`: sequences that yield a token take part in the step, and wait for all of it."""
        target_s = self._target_s
        if is_yielding and self._itl_target_s:
            target_s = min(target_s, self._itl_target_s - self.yielding_s)
        wanted = min(target_s * self.tokens_per_s, self._max_tokens)
        return max(int(wanted) // self._block_size, 1) * self._block_size

    def num_lone_tail_tokens(self) -> int:
        """Of a tail that alone catches up beside sequences that yield tokens: so many make the step `MAX_STRETCH` times as long."""
        if not (self.quiet_s and self.s_per_token):
            return self._block_size
        return max(int((MAX_STRETCH - 1) * self.quiet_s / self.s_per_token), 1)

    def measured(self, num_tokens: int, duration_s: float) -> None:
        """One step's tokens and time. Steps smaller than a block say little about the rate and are left out."""
        if num_tokens >= self._block_size and duration_s > 0:
            self.tokens_per_s += SMOOTHING * (num_tokens / duration_s - self.tokens_per_s)

    def measured_yielding(self, num_catching_up: int, duration_s: float) -> None:
        """A step in which sequences yielded tokens: what it took without the `num_catching_up` tokens beside them."""
        if num_catching_up == 0:
            self.quiet_s += SMOOTHING * (duration_s - self.quiet_s) if self.quiet_s else duration_s
        elif self.quiet_s:
            added_s = max(duration_s - self.quiet_s, 0.0) / num_catching_up
            self.s_per_token += SMOOTHING * (added_s - self.s_per_token) if self.s_per_token else added_s
        yielding_s = max(duration_s - num_catching_up / self.tokens_per_s, 0.0)
        self.yielding_s += SMOOTHING * (yielding_s - self.yielding_s) if self.yielding_s else yielding_s

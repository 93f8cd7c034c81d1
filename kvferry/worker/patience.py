"""How long a reader waits for a source: judged by what the source says it does, not by one time-out.

Pure: the clock is handed in. A source that says nothing at all for `silence_s` is dead. One that speaks has a budget for what it is
doing, which begins anew whenever it gets on: it may let the fetch wait, compute without a new step or block, or have blocks and not
send them, each for so long. What ran out is named in the error, the log and the metric.
"""

from dataclasses import dataclass

from kvferry.errors import FetchFailed
from kvferry.messages import FetchDown, FetchFailureKind, FetchProgress, FetchState


@dataclass(frozen=True, slots=True)
class FetchBudgets:
    """Seconds."""

    silence_s: float = 3.0
    """Without any message (a source shows its progress every second)."""
    queued_s: float = 300.0
    """Waiting at the source for room or its turn."""
    computing_s: float = 30.0
    """Computing without a new step and without a new block."""
    sending_s: float = 10.0
    """With all blocks there, without a frame."""


_KINDS = {
    FetchState.QUEUED: FetchFailureKind.QUEUED,
    FetchState.COMPUTING: FetchFailureKind.COMPUTING,
    FetchState.SENDING: FetchFailureKind.SENDING,
}
_WORDS = {
    FetchState.QUEUED: "the source let the fetch wait for",
    FetchState.COMPUTING: "the source computed without getting on for",
    FetchState.SENDING: "the source had the blocks and sent none for",
}


class Patience:
    """Of one fetch. `heard` each message, wait no longer than `left_s`, and `run_out` if nothing came."""

    def __init__(self, budgets: FetchBudgets, now: float):
        self._budgets = budgets
        self._heard_s = self._advanced_s = now
        self._state: FetchState | None = None
        self._mark: tuple[int, int] | None = None

    def heard(self, message: FetchDown, now: float) -> None:
        self._heard_s = now
        if isinstance(message, FetchProgress):
            mark = (message.step, message.num_sealed_blocks) if message.state is FetchState.COMPUTING else None
            if message.state is not self._state or mark != self._mark:
                self._advanced_s = now
            self._state, self._mark = message.state, mark
        else:
            self._advanced_s = now

    def rested(self, seconds: float) -> None:
        """Nobody listened for so long: the reader was busy with what it had, which is not the source's fault."""
        self._heard_s += seconds
        self._advanced_s += seconds

    def left_s(self, now: float) -> float:
        return min(self._heard_s + self._budgets.silence_s, self._advanced_s + self._budget_s) - now

    def run_out(self, now: float) -> FetchFailed:
        """What to raise."""
        if self._state is None or self._heard_s + self._budgets.silence_s <= now:
            return FetchFailed(
                FetchFailureKind.SILENT.value, f"the source was silent for {self._budgets.silence_s:g} s"
            )
        return FetchFailed(_KINDS[self._state].value, f"{_WORDS[self._state]} {self._budget_s:g} s")

    @property
    def _budget_s(self) -> float:
        return float("inf") if self._state is None else float(getattr(self._budgets, f"{self._state.value}_s"))

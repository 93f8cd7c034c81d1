"""Stop strings over streamed text: nothing of a stop string is ever given out unless it is wanted in the output.

Pure. Text that might be the beginning of a stop string is held back until it is decided.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """`text` may go out; `is_stopped` says that a stop string has been found and nothing more may."""

    text: str
    is_stopped: bool = False


class StopStrings:
    """`stops` are not empty. Of several that begin at different places, the one that begins first counts."""

    def __init__(self, stops: tuple[str, ...], is_included: bool):
        self._stops, self._is_included = stops, is_included
        self._held = ""

    def push(self, text: str) -> Cut:
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            at, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            return Cut(held[: at + len(stop) if self._is_included else at], True)
        keep = self._num_undecided(held)
        self._held = held[len(held) - keep :]
        return Cut(held[: len(held) - keep])

    def flush(self) -> str:
        """At the end of the text: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

"""What penalties look at: the tokens of one choice's prompt and of its answer so far, as ids and counts.

A prompt is looked at once, each token of the answer once, however many steps there are. Reads the sequence's own list, which only
grows: a preemption changes nothing, and a continuation begins with the answer that it was given. Not for two threads at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]


class History:
    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int):
        self._tokens, self._num_prompt_tokens = tokens, num_prompt_tokens
        self._of_prompt: Ids | None = None
        self._places: dict[int, int] = {}
        self._ids, self._counts = np.empty(64, np.intp), np.zeros(64, np.int64)
        self._num_counted = num_prompt_tokens

    @property
    def prompt_tokens(self) -> Sequence[int]:
        return self._tokens[: self._num_prompt_tokens]

    @property
    def answer_tokens(self) -> Sequence[int]:
        return self._tokens[self._num_prompt_tokens :]

    @property
    def of_prompt(self) -> Ids:
        """Each id of the prompt once."""
        if self._of_prompt is None:
            self._of_prompt = np.unique(np.array(self.prompt_tokens, np.intp))
        return self._of_prompt

    @property
    def of_answer(self) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Each id of the answer once, and how often it is there. Good until the answer grows."""
        for token in self._tokens[self._num_counted :]:
            self._count(token)
        self._num_counted = len(self._tokens)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (np.concatenate([one, np.zeros_like(one)]) for one in (self._ids, self._counts))
        self._ids[place] = token
        self._counts[place] += 1

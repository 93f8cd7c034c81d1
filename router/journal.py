"""The journal: what has been emitted of a live request, by index, whatever worker it came from.

Pure: no I/O, no clock. Tokens are accepted once, in order, from the current attempt; text and the end of each choice are decided
here, so that they do not depend on what a dying worker managed to say last. Readers keep a position of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvferry.messages import ChoiceStart, NewTokens, PromptLogprobs, Sampling, TokenLogprobs
from kvferry.text.decoding import TextStream
from kvferry.text.stops import StopStrings


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class Acceptance(Enum):
    """What became of tokens from a worker."""

    NEW = "new"
    STALE = "stale"
    """Of an older attempt, of a finished choice, or already there: dropped and counted."""
    GAP = "gap"
    """An index was skipped, or log-probabilities are lacking: the attempt is broken."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a reader has not seen of one choice. `finish` is set in the last delta of a choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of the tokens, if asked for."""


class ChoiceJournal:
    def __init__(self, choice: int, sampling: Sampling, text: TextStream, stops: StopStrings | None):
        self.choice = choice
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self._sampling, self._text, self._stops = sampling, text, stops
        self._pieces: list[str] = []  # piece k became final with token k; one more holds the rest, once finished

    @property
    def wants_logprobs(self) -> bool:
        return self._sampling.num_logprobs is not None

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self._sampling.stop_token_ids:
            self._pieces.append("")
            self._end(FinishReason.STOP)
            return
        piece = self._text.push(token)
        if self._stops is not None and len(self.tokens) > self._sampling.min_tokens:
            cut = self._stops.push(piece)
            piece = cut.text
            if cut.is_stopped:
                self._pieces += [piece, ""]
                self.finish = FinishReason.STOP
                return
        self._pieces.append(piece)
        if len(self.tokens) >= self._sampling.max_tokens:
            self._end(FinishReason.LENGTH)

    def end_without_tokens(self) -> None:
        """Nothing was to be sampled, and the prompt has been computed."""
        if self.finish is None:
            self._end(FinishReason.LENGTH)

    def _end(self, finish: FinishReason) -> None:
        """The rest of the text: it may hold a stop string itself."""
        rest = self._text.flush()
        if self._stops is not None and len(self.tokens) > self._sampling.min_tokens:
            cut = self._stops.push(rest)
            rest = cut.text if cut.is_stopped else cut.text + self._stops.flush()
            finish = FinishReason.STOP if cut.is_stopped else finish
        self._pieces.append(rest)
        self.finish = finish

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def has_after(self, position: int) -> bool:
        return position < len(self._pieces)

    def read(self, position: int) -> tuple[Delta | None, int]:
        """What follows `position`, and the position after it; None if there is nothing."""
        if position >= len(self._pieces):
            return None, position
        text = "".join(self._pieces[position:])
        tokens, logprobs = tuple(self.tokens[position:]), tuple(self.logprobs[position:])
        return Delta(self.choice, text, tokens, self.finish, logprobs), len(self._pieces)


class Journal:
    """Of one request with one or more choices."""

    def __init__(
        self,
        num_choices: int,
        sampling: Sampling,
        new_text: Callable[[], TextStream],
        stops: tuple[str, ...] = (),
        is_stop_included: bool = False,
    ):
        self.attempt = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they have come."""
        self.choices = [
            ChoiceJournal(k, sampling, new_text(), StopStrings(stops, is_stop_included) if stops else None)
            for k in range(num_choices)
        ]

    @property
    def is_done(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return sum(choice.finish is None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def next_attempt(self) -> int:
        """Begins an attempt; what older ones still say is stale from now on."""
        self.attempt += 1
        return self.attempt

    def starts(self) -> tuple[ChoiceStart, ...]:
        """The choices that another attempt must go on with, and where."""
        return tuple(
            ChoiceStart(choice.choice, tuple(choice.tokens)) for choice in self.choices if choice.finish is None
        )

    def accept(self, new: NewTokens) -> Acceptance:
        if new.attempt != self.attempt or new.choice >= len(self.choices):
            return Acceptance.STALE
        choice = self.choices[new.choice]
        if new.index > len(choice.tokens):
            return Acceptance.GAP if choice.finish is None else Acceptance.STALE
        if len(new.logprobs) != (len(new.token_ids) if choice.wants_logprobs else 0):
            return Acceptance.GAP if choice.finish is None else Acceptance.STALE
        fresh = new.token_ids[len(choice.tokens) - new.index :]
        is_new = False
        logprobs = new.logprobs[len(choice.tokens) - new.index :] or (None,) * len(fresh)
        for token, of_token in zip(fresh, logprobs, strict=True):
            if choice.finish is not None:
                break
            choice.append(token, of_token)
            is_new = True
        return Acceptance.NEW if is_new else Acceptance.STALE

    def accept_prompt(self, new: PromptLogprobs) -> Acceptance:
        if new.attempt != self.attempt:
            return Acceptance.STALE
        skipped = new.position - 1 - len(self.prompt_logprobs)
        if skipped > 0:
            return Acceptance.GAP
        fresh = new.logprobs[-skipped:] if skipped else new.logprobs
        self.prompt_logprobs += fresh
        return Acceptance.NEW if fresh else Acceptance.STALE

"""Log-probabilities in OpenAI's two shapes (chat and completions) and in vLLM's for prompts. Pure: from values to JSON values."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from kvferry.messages import TokenLogprobs
from kvferry.text.decoding import TextStream
from kvferry.text.model_text import ModelText


def chat_logprobs(text: ModelText, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """One entry for each token. The entries' bytes join up to the answer's text, if no stop text cut it; special tokens have null."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = text.token_bytes(token)
        return {
            "token": text.token_name(token),
            "logprob": logprob,
            "bytes": None if content is None else list(content),
        }

    content = [
        {**entry(token, of_token.logprob), "top_logprobs": [entry(*pair) for pair in of_token.top]}
        for token, of_token in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(text: ModelText, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Any]:
    """As vLLM gives them: by token id, null for the prompt's first token."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text.token_name(token)}

    places: list[Any] = [None]
    for token, of_token in zip(tokens[1:], logprobs, strict=True):
        top = {str(other): entry(other, logprob, k) for k, (other, logprob) in enumerate(of_token.top, start=1)}
        places.append({**top, str(token): entry(token, of_token.logprob, of_token.rank)})
    return places


class CompletionLogprobs:
    """The completions' shape, of one choice, in one piece or several: it counts the offsets in the text."""

    def __init__(self, text: ModelText):
        self._text = text
        self._offset = 0

    @cached_property
    def _stream(self) -> TextStream:
        return self._text.stream()

    def prompt(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], echo: str) -> dict[str, Any]:
        """Of an echoed prompt, whose first token has none. Special tokens that stand in its text take their room there."""
        return self._take(tokens, [None, *logprobs], echo)

    def answer(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._take(tokens, logprobs, "")

    def _take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], echo: str) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            if self._text.token_bytes(token) is not None:
                self._offset += len(self._stream.push(token))
            elif echo.startswith(name := self._text.token_name(token), self._offset):
                self._offset += len(name)
        return {
            "tokens": [self._text.token_name(token) for token in tokens],
            "token_logprobs": [None if one is None else one.logprob for one in logprobs],
            "top_logprobs": [self._top(token, one) for token, one in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: int, of_token: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest, and always the token that stands there."""
        if of_token is None:
            return None
        top = {self._text.token_name(other): logprob for other, logprob in of_token.top}
        return {**top, self._text.token_name(token): of_token.logprob}


def cut(logprobs: Sequence[TokenLogprobs], num_top: int) -> list[TokenLogprobs]:
    """With no more of the likeliest than that."""
    return [replace(one, top=one.top[:num_top]) if len(one.top) > num_top else one for one in logprobs]


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}

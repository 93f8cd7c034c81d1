"""Log-probabilities in OpenAI's two shapes (chat and completions) and in vLLM's for prompts. Pure: from values to JSON values."""

from collections.abc import Sequence
from typing import Any

from kvferry.messages import TokenLogprobs
from kvferry.text.model_text import ModelText


def chat_logprobs(text: ModelText, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """One entry for each token. The entries' bytes join up to the answer's text; special tokens have null."""

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
        self._text, self._stream = text, text.stream()
        self._offset = 0

    def prompt(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of an echoed prompt, whose first token has none; special tokens are part of its text."""
        return self._take(tokens, [None, *logprobs], has_special=True)

    def answer(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._take(tokens, logprobs, has_special=False)

    def _take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], has_special: bool
    ) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            if self._text.token_bytes(token) is not None:
                self._offset += len(self._stream.push(token))
            elif has_special:
                self._offset += len(self._text.token_name(token))
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


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}

"""OpenAI-shaped answers: whole ones, streamed chunks, errors. Pure: from journal and summary to JSON values."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from kvferry.errors import KvferryError
from kvferry.text.model_text import ModelText
from router.journal import ChoiceJournal, Delta, FinishReason
from router.live import Live
from router.openai_logprobs import CompletionLogprobs, chat_logprobs, cut, joined, prompt_logprobs
from router.openai_request import Body, ChatBody
from router.request import Summary


def error_body(error: KvferryError) -> dict[str, Any]:
    param = getattr(error, "param", None)
    return {"error": {"message": error.message, "type": error.openai_type, "param": param, "code": error.code}}


def usage_of(summaries: Sequence[Summary]) -> dict[str, Any]:
    prompt = sum(summary.num_prompt_tokens for summary in summaries)
    completion = sum(summary.num_completion_tokens for summary in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(summary.num_cached_tokens for summary in summaries)},
    }


def numbers_of(summary: Summary) -> dict[str, Any]:
    """kvferry's own numbers; times in milliseconds since the request was accepted."""
    return {
        "instants_ms": {name: round(seconds * 1e3, 3) for name, seconds in summary.instants_s.items()},
        "decode_worker": summary.decode_worker_id,
        "source_worker": summary.source_worker_id or None,
        "road": summary.road or None,
        "fetched_blocks": summary.num_fetched_blocks,
        "fetched_bytes": summary.fetched_bytes,
        "attempts": summary.num_attempts,
        "seed": summary.seed,
        **({"numerics_changed": True} if summary.has_changed_numerics else {}),
        **({} if summary.explanation is None else {"explain": summary.explanation}),
    }


def server_timing(summary: Summary) -> str:
    """A Server-Timing header: the parts of a request's life, each in milliseconds."""
    at = summary.instants_s
    parts = {
        "queue": ("placed", None),
        "fetch": ("last_block", "fetch_opened"),
        "tail": ("first_token", "tail_planned"),
        "ttft": ("first_token", None),
        "decode": ("last_token", "first_token"),
        "total": ("closed", None),
    }
    found = [
        f"{name};dur={(at[end] - (at[begin] if begin else 0.0)) * 1e3:.2f}"
        for name, (end, begin) in parts.items()
        if end in at and (begin is None or begin in at)
    ]
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What differs between chat and completions, and is the same for all of an answer."""

    is_chat: bool
    model: str
    text: ModelText
    returns_token_ids: bool = False
    num_prompt_logprobs: int | None = None
    """Of the field of that name; an echo has the answer's count."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def new(model: str, text: ModelText, body: Body) -> "AnswerShape":
        is_chat = isinstance(body, ChatBody)
        return AnswerShape(
            is_chat,
            model,
            text,
            bool(body.return_token_ids),
            body.prompt_logprobs,
            f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        )

    def whole(self, lives: Sequence[Live]) -> dict[str, Any]:
        """The choices of several prompts are numbered through."""
        summaries = [live.summary() for live in lives]
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        pairs = [(live, choice) for live in lives for choice in live.journal.choices]
        body["choices"] = [self._choice(index, live, choice) for index, (live, choice) in enumerate(pairs)]
        body |= {"usage": usage_of(summaries), "kvferry": [numbers_of(summary) for summary in summaries]}
        if self.is_chat and self.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(lives[0])
        return body

    def _choice(self, index: int, live: Live, choice: ChoiceJournal) -> dict[str, Any]:
        assert choice.finish is not None
        delta = Delta(choice.choice, choice.text, tuple(choice.tokens), choice.finish, tuple(choice.logprobs))
        one = ChoiceShape(self, index, live)
        body: dict[str, Any] = {"index": index, "logprobs": one.logprobs(delta), "finish_reason": choice.finish.value}
        if self.is_chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = (live.request.echo or "") + choice.text
            if self.num_prompt_logprobs is not None:
                body["prompt_logprobs"] = self._prompt_logprobs(live)
        if self.returns_token_ids:
            body["token_ids"] = list(choice.tokens)
            body["prompt_token_ids"] = list(live.request.prompt_tokens)
        return body

    def _prompt_logprobs(self, live: Live) -> list[Any]:
        assert self.num_prompt_logprobs is not None
        scores = cut(live.journal.prompt_logprobs, self.num_prompt_logprobs)
        return prompt_logprobs(self.text, live.request.prompt_tokens, scores)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choice: dict[str, Any], includes_usage: bool) -> bytes:
        """One event of a stream."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        body["choices"] = [choice]
        if includes_usage:
            body["usage"] = None
        return event(body)

    def usage_chunk(self, lives: Sequence[Live]) -> bytes:
        return self._last_chunk(lives, {"usage": usage_of([live.summary() for live in lives])})

    def numbers_chunk(self, lives: Sequence[Live]) -> bytes:
        """For who asked why, and not for the usage."""
        return self._last_chunk(lives, {})

    def _last_chunk(self, lives: Sequence[Live], usage: dict[str, Any]) -> bytes:
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        numbers = [numbers_of(live.summary()) for live in lives]
        return event({**body, "choices": [], **usage, "kvferry": numbers})


class ChoiceShape:
    """One choice of an answer, piece by piece: the first has the role, or the echoed prompt."""

    def __init__(self, shape: AnswerShape, index: int, live: Live):
        self._shape, self._index, self._live = shape, index, live
        self._places = CompletionLogprobs(shape.text)
        self._has_begun = False
        self._is_plain = not shape.returns_token_ids and live.request.sampling.num_logprobs is None
        """From piece to piece, nothing but the text differs."""
        self._around: dict[tuple[bool, FinishReason | None], tuple[bytes, bytes]] = {}

    def is_worth_sending(self, delta: Delta) -> bool:
        """Not half a character, nor text that may begin a stop string, unless tokens are of interest themselves."""
        has_tokens = self._shape.returns_token_ids or self._live.request.sampling.num_logprobs is not None
        return bool(delta.text or delta.finish or (has_tokens and delta.token_ids))

    @property
    def begins_with_scores(self) -> bool:
        """The next piece is long: it has the log-probabilities of an echoed prompt."""
        request = self._live.request
        return not self._has_begun and request.echo is not None and request.sampling.num_prompt_logprobs is not None

    def prepare(self, includes_usage: bool) -> None:
        """Makes what is around the text before there is one: then nobody waits for it."""
        if self._is_plain:
            for is_first in (True, False):
                self._made_around(is_first, None, includes_usage)

    def chunk(self, delta: Delta, includes_usage: bool) -> bytes:
        """One event of a stream."""
        if not self._is_plain:
            return self._shape.chunk(self._piece(delta), includes_usage)
        before, after = self._made_around(not self._has_begun, delta.finish, includes_usage)
        text = encode_basestring(self._echoed(delta.text)).encode()
        self._has_begun = True
        return b"".join((before, text, after))

    def _made_around(self, is_first: bool, finish: FinishReason | None, includes_usage: bool) -> tuple[bytes, bytes]:
        """Around the text of a piece; made once."""
        around = self._around.get((is_first, finish))
        if around is None:
            whole = self._shape.chunk(self._body(PLACE_OF_TEXT, is_first, finish, None), includes_usage)
            before, _, after = whole.rpartition(f'"{PLACE_OF_TEXT}"'.encode())
            around = self._around[is_first, finish] = (before, after)
        return around

    def _piece(self, delta: Delta) -> dict[str, Any]:
        body = self._body(self._echoed(delta.text), not self._has_begun, delta.finish, self.logprobs(delta))
        if self._shape.returns_token_ids:
            body["token_ids"] = list(delta.token_ids)
        self._has_begun = True
        return body

    def _echoed(self, text: str) -> str:
        echo = None if self._has_begun else self._live.request.echo
        return text if echo is None else echo + text

    def _body(
        self, text: str, is_first: bool, finish: FinishReason | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": self._index,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
        }
        if self._shape.is_chat:
            body["delta"] = {"role": "assistant", "content": text} if is_first else {"content": text}
        else:
            body["text"] = text
        return body

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        request = self._live.request
        if request.sampling.num_logprobs is None:
            return None
        if self._shape.is_chat:
            return chat_logprobs(self._shape.text, delta.token_ids, delta.logprobs)
        if request.echo is not None and not self._has_begun:
            scores = cut(self._live.journal.prompt_logprobs, request.sampling.num_logprobs)
            prompt = self._places.prompt(request.prompt_tokens, scores, request.echo)
            return joined(prompt, self._places.answer(delta.token_ids, delta.logprobs))
        return self._places.answer(delta.token_ids, delta.logprobs)


DONE = b"data: [DONE]\n\n"
PLACE_OF_TEXT = "@the text@"
"""The last of its kind in a chunk: what follows it are a finish reason and the usage's null."""


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

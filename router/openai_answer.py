"""OpenAI-shaped answers: whole ones, streamed chunks, errors. Pure: from journal and summary to JSON values."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import KvferryError
from router.journal import Delta
from router.live import Live
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
        "fetched_blocks": summary.num_fetched_blocks,
        "fetched_bytes": summary.fetched_bytes,
        "attempts": summary.num_attempts,
        "seed": summary.seed,
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
    returns_token_ids: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def new(is_chat: bool, model: str, returns_token_ids: bool) -> "AnswerShape":
        return AnswerShape(is_chat, model, returns_token_ids, f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}")

    def whole(self, lives: Sequence[Live]) -> dict[str, Any]:
        """The choices of several prompts are numbered through."""
        summaries = [live.summary() for live in lives]
        choices: list[dict[str, Any]] = []
        for live in lives:
            for choice in live.journal.choices:
                assert choice.finish is not None
                one = self._choice(len(choices), choice.text, choice.finish.value)
                if self.returns_token_ids:
                    one["token_ids"] = list(choice.tokens)
                    one["prompt_token_ids"] = list(live.request.prompt_tokens)
                choices.append(one)
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return {**head, "choices": choices, "usage": usage_of(summaries), "kvferry": [numbers_of(s) for s in summaries]}

    def _choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        one: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if self.is_chat:
            return {**one, "message": {"role": "assistant", "content": text, "refusal": None}}
        return {**one, "text": text}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, index: int, delta: Delta, is_first: bool, includes_usage: bool) -> bytes:
        """One event of a stream. The role is in the first of each choice."""
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": None if delta.finish is None else delta.finish.value,
        }
        if self.is_chat:
            choice["delta"] = {"role": "assistant", "content": delta.text} if is_first else {"content": delta.text}
        else:
            choice["text"] = delta.text
        if self.returns_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        body["choices"] = [choice]
        if includes_usage:
            body["usage"] = None
        return event(body)

    def usage_chunk(self, lives: Sequence[Live]) -> bytes:
        summaries = [live.summary() for live in lives]
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        numbers = [numbers_of(summary) for summary in summaries]
        return event({**body, "choices": [], "usage": usage_of(summaries), "kvferry": numbers})


DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

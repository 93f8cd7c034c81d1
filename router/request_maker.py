"""From a checked body to a request: tokens, defaults, limits. The same rules for HTTP and gRPC.

Tokenising long texts happens off the event loop. The limits are those of the model and of the pools that have joined:
prompt and answer may have `limit` tokens in the pools together, and the answer's last token needs no room there.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import InvalidRequest, NotFound, NoWorker
from kvferry.messages import Sampling
from kvferry.text.model_text import ModelText
from router.dispatcher import Dispatcher
from router.idempotency import checked_key, seed_of
from router.openai_request import MAX_SCORES, Body
from router.request import GenerationRequest

INLINE_CHARACTERS = 2000
"""Longer texts are tokenised on a thread."""


@dataclass(frozen=True, slots=True)
class Defaults:
    model_name: str
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client says beside the body: headers, or the fields of the same meaning."""

    key: str | None = None
    """Idempotency-Key."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    explains: bool = False

    def seed(self, salt: bytes) -> int:
        """For a request that names none."""
        return secrets.randbits(63) if self.key is None else seed_of(self.key, salt)

    @staticmethod
    def of_headers(headers: Mapping[str, str]) -> "Wishes":
        """Names in lower case. Raises InvalidRequest."""
        return Wishes(
            checked_key(headers.get("idempotency-key")),
            _positive_ms(headers, "x-slo-ttft-ms"),
            _positive_ms(headers, "x-slo-tpot-ms"),
            headers.get("x-kvferry-explain", "0").strip().lower() in ("1", "true", "yes"),
        )


NO_WISHES = Wishes()


def _positive_ms(headers: Mapping[str, str], name: str) -> float | None:
    """In seconds."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a positive number of milliseconds", name)
    return value / 1000


class RequestMaker:
    def __init__(self, text: ModelText, dispatcher: Dispatcher, defaults: Defaults):
        self.text, self._dispatcher, self.defaults = text, dispatcher, defaults

    def check_model(self, model: str | None) -> None:
        if model and model != self.defaults.model_name:
            message = f"the model {model!r} does not exist; this server has {self.defaults.model_name!r}"
            raise NotFound(message, "model", "model_not_found")

    async def encode_text(self, text: str, param: str) -> list[int]:
        self._refuse_hopeless(len(text), param)
        return await _off_loop(lambda: self.text.encode(text), len(text))

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        size = sum(len(message["content"]) for message in messages)
        self._refuse_hopeless(size, "messages")
        return await _off_loop(lambda: self.text.encode_chat(messages), size)

    def make(
        self,
        tokens: list[int],
        body: Body,
        max_tokens: int | None,
        param: str,
        salt: bytes,
        limit_name: str = "max_tokens",
        wishes: Wishes = NO_WISHES,
        tenant: bytes = b"",
        continues_prompt: bool = False,
    ) -> GenerationRequest:
        """Raises InvalidRequest naming `param` (the prompt) or another field, NoWorker while nothing can be judged."""
        limit = self._limit()
        if not tokens:
            raise InvalidRequest(f"{param} has no tokens", param)
        if max(tokens) >= self.text.sizes.vocabulary_size:
            size = self.text.sizes.vocabulary_size
            raise InvalidRequest(f"{param}: token id {max(tokens)} is not in the vocabulary of {size}", param)
        if len(tokens) > limit:
            raise InvalidRequest(
                f"{param} has {len(tokens)} tokens, the limit is {limit}: shorten it", param, "context_length_exceeded"
            )
        if max_tokens is not None and max_tokens > limit:
            raise InvalidRequest(f"{limit_name} is {max_tokens}, the limit is {limit}: lower it", limit_name)
        if body.num_prompt_logprobs is not None:
            self.check_scores(len(tokens), body, param)
        left = limit + 1 - len(tokens)
        return GenerationRequest(
            prompt_tokens=tuple(tokens),
            sampling=self._sampling(
                body, left if max_tokens is None else min(max_tokens, left), max_tokens, wishes.seed(salt)
            ),
            num_choices=body.n or 1,
            stops=body.stops,
            is_stop_included=bool(body.include_stop_str_in_output),
            continues_prompt=continues_prompt,
            salt=salt,
            tenant=tenant,
            priority=body.priority or 0,
            timeout_s=body.timeout_s,
            slo_ttft_s=wishes.slo_ttft_s,
            slo_tpot_s=wishes.slo_tpot_s,
            explains=wishes.explains,
        )

    def _sampling(self, body: Body, max_tokens: int, asked_tokens: int | None, seed: int) -> Sampling:
        """`max_tokens` is what there is room for; `asked_tokens` what the client asked for."""
        min_tokens = body.min_tokens or 0
        if min_tokens > (max_tokens if asked_tokens is None else asked_tokens):
            raise InvalidRequest(f"min_tokens is {min_tokens}, more than the answer may have: lower it", "min_tokens")
        biases = body.biases
        self._check_ids(body.stop_token_ids or (), "stop_token_ids")
        self._check_ids([token for token, _ in biases], "logit_bias")
        end_ids = () if body.ignore_eos else self.text.eos_token_ids

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return Sampling(
            seed=seed if body.seed is None else body.seed % 2**64,
            max_tokens=max_tokens,
            temperature=given(body.temperature, self.defaults.temperature),
            top_k=max(body.top_k or 0, 0),
            top_p=given(body.top_p, 1.0),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=given(body.repetition_penalty, 1.0),
            logit_bias=biases,
            min_tokens=min_tokens,
            stop_token_ids=tuple({*end_ids, *(body.stop_token_ids or ())}),
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.num_prompt_logprobs,
        )

    @staticmethod
    def check_scores(num_tokens: int, body: Body, param: str) -> None:
        """Raises InvalidRequest if an answer would have too many log-probabilities of so many prompt tokens."""
        count = num_tokens * ((body.num_prompt_logprobs or 0) + 1) * (body.n or 1)
        if count > MAX_SCORES:
            raise InvalidRequest(
                f"{param}: its log-probabilities would be {count:,} numbers, the limit is {MAX_SCORES:,}: shorten it, or ask "
                "for fewer at each place",
                param,
            )

    def _check_ids(self, tokens: Sequence[int], param: str) -> None:
        size = self.text.sizes.vocabulary_size
        if max(tokens, default=0) >= size:
            raise InvalidRequest(f"{param}: token id {max(tokens)} is not in the vocabulary of {size}", param)

    def _limit(self) -> int:
        limit = self._dispatcher.max_kv_tokens
        if limit is None:
            raise NoWorker("no decode worker is ready: the decode pool is empty; try again shortly", retry_after_s=2)
        return limit

    def _refuse_hopeless(self, num_characters: int, param: str) -> None:
        """No tokenizer makes so few tokens of so many characters: refuse before it tries."""
        limit = self._limit()
        least = num_characters // self.text.max_token_characters
        if least > limit:
            raise InvalidRequest(
                f"{param} has {num_characters} characters, which are at least {least} tokens; the limit is {limit}: shorten it",
                param,
                "context_length_exceeded",
            )


def salt_of(cache_salt: str | None, api_key: str | None) -> bytes:
    """The tenant's part of the chain's root: an API key's holder shares cached blocks with nobody else."""
    if not cache_salt and not api_key:
        return b""
    return hashlib.blake2b(
        f"{api_key or ''}\0{cache_salt or ''}".encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def tenant_of(api_key: str | None) -> bytes:
    """All without a key are one tenant."""
    return hashlib.blake2b(api_key.encode("utf-8", "surrogatepass"), digest_size=8).digest() if api_key else b""


async def _off_loop(work: Callable[[], list[int]], num_characters: int) -> list[int]:
    return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)

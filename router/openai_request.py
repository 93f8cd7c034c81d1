"""OpenAI-shaped request bodies, checked: what is wrong is named, what is not supported is refused, what is harmless is ignored.

Parsing is strict (a number is a number, never a string or a boolean), and every size has a documented cap before anything is
allocated for it. Knows no HTTP and no tokenizer.
"""

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvferry.errors import InvalidRequest

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_MESSAGES = 4096
MAX_BIASES = 1024
MAX_LOGPROBS = 20

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, True),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "logits_processors": (None, []),
    "prompt_embeds": (None,),
    "guided_whitespace_pattern": (None,),
    "thinking_token_budget": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, "", []),
    "json_schema": (None, {}),
    "grammar": (None, ""),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1),
    "tfs_z": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, -1, 0),
    "repeat_penalty": (None, 1),
    "mirostat": (None, 0),
    "mirostat_mode": (None, 0),
    "dynatemp_range": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "samplers": (None,),
    "n_predict": (None,),
    "n_probs": (None, 0),
    "max_new_tokens": (None,),
    "top_n_tokens": (None, 0),
    "watermark": (None, False),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "lora_path": (None,),
    "adapter_id": (None,),
}
"""Fields that would change the answer, with the values that do not. Any other value is refused loudly."""
NOT_OF_CHAT = {"echo": (None, False), "prompt": (None,)}
NOT_OF_COMPLETIONS = {"top_logprobs": (None, 0), "max_completion_tokens": (None,), "messages": (None,)}
"""Fields that one of the routes alone has."""
MAX_SCORES = 200_000
"""Log-probabilities of prompts in one answer: places, times those wanted at each and one more, times choices."""

PLACES = ("role", "content", "type", "text")
"""Names that may stand in the place of a fault within `messages`; a union's alternatives are named there too."""

Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Body(BaseModel):
    """What chat and completions share. null means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    prompt_logprobs: NumLogprobs | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, max_length=1024)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    timeout_s: float | None = Field(None, gt=0, le=86400, allow_inf_nan=False)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        """Of the answer's tokens; None: none are wanted."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Raises InvalidRequest for a key that is not a token id."""
        if not self.logit_bias:
            return ()
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
                raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id (an integer from 0)", "logit_bias")
        return tuple((int(key), bias) for key, bias in self.logit_bias.items())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None

    def rendered(self) -> dict[str, str]:
        """For the chat template: parts are joined by line breaks; "developer" is "system"."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content or ""}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    prompt: Any = None
    """Checked by `read_prompts`: a million token ids are checked in one pass, and only the first fault is told."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """0 with `echo` or `prompt_logprobs` only."""
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has the log-probabilities that the answer has."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return read_prompts(self.prompt)


def read_prompts(value: Any) -> list[str] | list[list[int]]:
    """The four forms of a prompt: a text, texts, token ids, lists of token ids. Raises InvalidRequest."""
    if isinstance(value, str):
        return _texts([value])
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt must be a text, a list of texts, token ids or a list of those, and not empty", "prompt"
        )
    if isinstance(value[0], int):
        return [_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt is a list of {len(value)} prompts, the limit is {MAX_PROMPTS}", "prompt")
    return _texts(value) if isinstance(value[0], str) else [_ids(one) for one in value]


def _texts(values: list[Any]) -> list[str]:
    if not all(isinstance(value, str) and value for value in values):
        raise InvalidRequest("prompt must hold texts of at least one character only", "prompt")
    return values


def _ids(values: Any) -> list[int]:
    if not isinstance(values, list) or not values:
        raise InvalidRequest("prompt must hold non-empty lists of token ids", "prompt")
    if not all(type(value) is int and 0 <= value < 2**32 for value in values):
        raise InvalidRequest("prompt holds something that is not a token id (an integer from 0)", "prompt")
    return values


B = TypeVar("B", ChatBody, CompletionBody)


def parse_body(kind: type[B], raw: bytes) -> B:
    """Raises InvalidRequest, with `param` where a field is to blame."""
    content = _read_json(raw)
    _refuse_unsupported(content, NOT_OF_CHAT if kind is ChatBody else NOT_OF_COMPLETIONS)
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise _invalid(error) from error
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream: leave one of them out", "prompt_logprobs")
    if isinstance(body, ChatBody):
        _check_messages(body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    else:
        read_prompts(body.prompt)
        if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
            raise InvalidRequest("max_tokens is 0: only with echo or prompt_logprobs is there an answer", "max_tokens")
    return body


def _read_json(raw: bytes) -> dict[str, Any]:
    try:
        content = _JSON.decode(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _refuse_unsupported(content: dict[str, Any], of_other_route: dict[str, tuple[Any, ...]]) -> None:
    for name, value in content.items():
        harmless = of_other_route.get(name) or NOT_SUPPORTED.get(name)
        if harmless is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
        ):
            where = "a field of this route" if name in of_other_route else "supported by this server"
            raise InvalidRequest(f"{name} is not {where}: leave it out", name, "unsupported_parameter")


def _invalid(error: ValidationError) -> InvalidRequest:
    """Of several faults (a union reports one for each of its kinds), the first names the field, the deepest the place."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    of_first = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    deepest = max((fault["loc"] for fault in of_first), key=len)
    location = [part for k, part in enumerate(deepest) if k == 0 or isinstance(part, int) or part in PLACES]
    param = str(location[0]) if location else None
    if param == "messages":  # the only field that is deep enough to need the place within it
        param += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    messages = dict.fromkeys(fault["msg"] for fault in of_first)
    return InvalidRequest(f"{param}: {'; or '.join(list(messages)[:4])}", param)


def _check_messages(body: ChatBody) -> None:
    for number, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"messages[{number}].content is missing", f"messages[{number}].content")

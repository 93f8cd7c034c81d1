"""The chat template of a checkpoint: Jinja, sandboxed, with the few names that templates of the field expect.

The environment follows what Hugging Face documents for chat templates (trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` that leaves characters alone). It is rendered in the router alone, once a request.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.errors import ConfigurationError, InvalidRequest


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`special_tokens` are the names that templates may use: bos_token, eos_token and the like."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"the model's chat template is not a template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that ends where the assistant begins. A template that refuses the messages is an InvalidRequest."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"the model's chat template cannot render these messages: {error}"
            raise InvalidRequest(message, "messages") from error

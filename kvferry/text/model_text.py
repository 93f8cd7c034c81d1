"""All that the router knows of a checkpoint: tokenizer, chat template, end-of-sequence ids, sizes. Never its weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry.errors import ConfigurationError, InvalidRequest
from kvferry.shape import read_checkpoint_shape
from kvferry.text.decoding import ByteLevelStream, TextStream, TokenBytes, WindowStream
from kvferry.text.template import ChatTemplate

WINDOW_TOKENS = 6
"""Of a prompt: enough to tell whether the text that follows begins with a space."""


@dataclass(frozen=True, slots=True)
class TextSizes:
    vocabulary_size: int
    context_tokens: int


class ModelText:
    """Text to tokens and back, for one checkpoint directory."""

    def __init__(self, directory: Path):
        config = _read_json(directory / "config.json")
        settings = _read_json(directory / "tokenizer_config.json", is_required=False)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"{path} is missing: kvferry needs a fast tokenizer (tokenizer.json)")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no other kind
            raise ConfigurationError(f"{path}: tokenizers cannot read it: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        shape = read_checkpoint_shape(directory)
        self.sizes = TextSizes(shape.vocabulary_size, shape.context_tokens)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if size > self.sizes.vocabulary_size:
            raise ConfigurationError(
                f"{path}: the tokenizer has {size} tokens, the model's vocab_size is {self.sizes.vocabulary_size}: "
                "they do not belong together"
            )
        self._special_tokens = {
            name: _token_text(settings[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if settings.get(name)
        }
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_names = {token: one.content for token, one in added.items() if one.special}
        self.max_token_characters = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self._template = self._load_template(directory, settings)
        self.eos_token_ids = self._find_eos(directory, config)
        self._token_bytes = TokenBytes(self._tokenizer) if self._is_byte_level(path) else None

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does by default, special tokens added."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Rendered with the chat template, which writes its special tokens itself."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use completions with a prompt", "messages")
        return self._encode(self._template.render(messages), "messages", add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        stream = self.stream()
        return "".join([*(stream.push(token) for token in tokens), stream.flush()])

    def decode_with_special(self, tokens: list[int]) -> str:
        """Special tokens as they are written in a prompt."""
        stream, pieces = self.stream(), list[str]()
        for token in tokens:
            pieces += (
                [stream.flush(), self._special_names[token]] if token in self._special_names else [stream.push(token)]
            )
        return "".join([*pieces, stream.flush()])

    def token_bytes(self, token: int) -> bytes | None:
        """What a token adds to a text; None for special tokens."""
        if token in self._special_names:
            return None
        if self._token_bytes is not None:
            return self._token_bytes[token]
        piece = self._tokenizer.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])  # SentencePiece's byte fallback
        return piece.replace("\u2581", " ").encode()

    def token_name(self, token: int) -> str:
        """For people: its text, or `bytes:\\x..` where it is no whole characters, as OpenAI's service writes it."""
        content = self.token_bytes(token)
        if content is None:
            return self._special_names[token]
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Of an answer; `after` are the tokens that its text goes on from, if it does."""
        if self._token_bytes is not None:
            return ByteLevelStream(self._token_bytes)
        return WindowStream(self._tokenizer, list(after[-WINDOW_TOKENS:]))

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param} holds half of a surrogate pair: it is not valid Unicode", param) from None
        # The batch form gives up the interpreter's lock while it works; the single form does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _load_template(self, directory: Path, settings: dict[str, Any]) -> ChatTemplate | None:
        path = directory / "chat_template.jinja"
        source: Any = path.read_text() if path.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        return ChatTemplate(source, self._special_tokens) if source else None

    def _find_eos(self, directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
        """The generation configuration's, else the configuration's, and the tokenizer's."""
        ids = _read_json(directory / "generation_config.json", is_required=False).get(
            "eos_token_id", config.get("eos_token_id")
        )
        found = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if "eos_token" in self._special_tokens:
            token = self._tokenizer.token_to_id(self._special_tokens["eos_token"])
            found |= set() if token is None else {token}
        for token in found:
            if type(token) is not int or not 0 <= token < self.sizes.vocabulary_size:
                raise ConfigurationError(
                    f"{directory}: eos_token_id {token!r} of generation_config.json or config.json is no token of the "
                    f"model, whose vocab_size is {self.sizes.vocabulary_size}"
                )
        return tuple(sorted(found))

    def _is_byte_level(self, path: Path) -> bool:
        decoder: Any = json.loads(path.read_text()).get("decoder") or {}
        return decoder.get("type") == "ByteLevel"


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _read_json(path: Path, is_required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if is_required:
            raise ConfigurationError(f"{path} is missing: --model takes a Hugging Face checkpoint directory")
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error

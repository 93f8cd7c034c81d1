"""Token ids to text, incrementally: what is given out is final, and never half a character.

Byte-level vocabularies (GPT-2's, most of today's) map each token to bytes, and an incremental UTF-8 decoder does the rest exactly:
the joined pieces equal the decoding of all ids. Other vocabularies go through `tokenizers`' own decoder over a short window.
"""

import codecs
from typing import Protocol

from tokenizers import Tokenizer

NEW_DECODER = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """One choice's text."""

    def push(self, token: int) -> str:
        """The text that is final now; it may be empty, and belong to earlier tokens."""
        ...

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD, as it does when all ids are decoded at once."""
        ...


def byte_of_character() -> dict[str, int]:
    """GPT-2's reversible map of bytes to printable characters, inverted (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + k): byte for k, byte in enumerate(others)})
    return table


class TokenBytes:
    """The bytes of each token of a byte-level vocabulary. Special tokens have none; other added tokens are their text."""

    def __init__(self, tokenizer: Tokenizer):
        table = byte_of_character()
        added = tokenizer.get_added_tokens_decoder()
        self._bytes: list[bytes] = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if token in added:
                self._bytes[token] = b"" if added[token].special else text.encode()
            else:
                self._bytes[token] = bytes(table[character] for character in text if character in table)

    def __getitem__(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""


class ByteLevelStream:
    def __init__(self, token_bytes: TokenBytes):
        self._token_bytes = token_bytes
        self._decoder = NEW_DECODER("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any tokenizer: decodes a window twice, with and without the new token, and gives out the difference."""

    def __init__(self, tokenizer: Tokenizer, after: list[int] | None = None):
        """`after`: tokens whose text is there already."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = list(after or ())
        self._begin = 0  # of the window
        self._given = len(self._tokens)  # tokens whose text has been given out

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._begin, self._given = self._given, len(self._tokens)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._begin = self._given = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._begin : self._given], skip_special_tokens=True)
        return self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)[len(before) :]

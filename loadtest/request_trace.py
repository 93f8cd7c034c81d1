"""Recorded requests from a file: Azure's CSV, or Mooncake's JSON lines. Instants, lengths and shared beginnings; never text.

Azure 2023: columns TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake (FAST '25): timestamp in ms, input_length, output_length, and
hash_ids: one for each 512 tokens of the prompt, equal ids for equal tokens.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvferry.errors import ConfigurationError

TOKENS_PER_HASH = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    """Since the trace's first row."""
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """In the order of time. Raises ConfigurationError naming the file and the row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read trace {path}: {error}") from error
    lines = text.splitlines()
    parse = _mooncake if text.lstrip().startswith("{") else _azure
    rows = sorted(_checked(path, parse, lines), key=lambda row: row.at_s)
    if not rows:
        raise ConfigurationError(f"trace {path} has no rows")
    began = rows[0].at_s
    return tuple(TraceRow(row.at_s - began, row.num_prompt, row.num_output, row.hash_ids) for row in rows)


def _checked(
    path: Path, parse: Callable[[Iterable[str]], Iterator[TraceRow]], lines: Iterable[str]
) -> Iterator[TraceRow]:
    number = 0
    try:
        for row in parse(lines):
            if row.num_prompt < 0 or row.num_output < 0:
                raise ValueError("a length is negative")
            number += 1
            yield row
    except (KeyError, ValueError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(
            f"trace {path}: after row {number}: {reason}; expected Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or "
            "Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids)"
        ) from error


def _azure(lines: Iterable[str]) -> Iterator[TraceRow]:
    for row in csv.DictReader(lines):
        at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            hash_ids = tuple(int(one) for one in row.get("hash_ids", ()))
            yield TraceRow(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), hash_ids)

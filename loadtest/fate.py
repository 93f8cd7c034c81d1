"""How a request ended, as a load test counts it: what `StreamRecord.failure` says of one stream, told apart by kind. Pure."""

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from loadtest.stream import StreamRecord


class Fate(Enum):
    SUCCEEDED = "succeeded"
    NO_TEXT = "no_text"
    """Whole, with a finish reason and the usage, but the first token was the last."""
    FAILED = "failed"


def fate_of(record: StreamRecord) -> Fate:
    if not record.failure:
        return Fate.SUCCEEDED
    return Fate.NO_TEXT if record.failure == "empty" else Fate.FAILED


def failure_kind(record: StreamRecord) -> str:
    """Of a failed one: as loadtest/stream.py says, but what ended before it said anything is told from what was cut in mid-answer."""
    return "empty" if record.failure == "cut" and not record.event_s else record.failure


def count_failures(records: Iterable[StreamRecord]) -> Counter[str]:
    """By kind."""
    return Counter(failure_kind(record) for record in records if fate_of(record) is Fate.FAILED)


def count_no_text(records: Iterable[StreamRecord]) -> int:
    return sum(fate_of(record) is Fate.NO_TEXT for record in records)

"""How much of a first token's wait was for blocks that had been computed already. Pure.

The server tells instants since it accepted a request, the source tells when its steps ended: on one clock, once the instant of
accepting is known. That lies between the client's sending and the first event less the server's own time to the first token. The later
bound tells which step it was (no step of this request ends between the two), and the middle how long ago.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from loadtest.stream import StreamRecord

ROUNDING_S = 1e-5
"""Of the server's instants."""


def transfer_s(record: StreamRecord, ends_s: Mapping[str, Sequence[float]]) -> float | None:
    """From the source's last step before the last block came, until then. None if nothing was fetched, or its source is not known.

    `ends_s`: rising, by worker.
    """
    at, source = record.numbers.get("instants_ms", {}), record.numbers.get("source_worker")
    if (
        not isinstance(source, str)
        or source not in ends_s
        or "last_block" not in at
        or "first_token" not in at
        or not record.event_s
    ):
        return None
    latest_s = record.event_s[0] - at["first_token"] / 1e3
    middle_s = (record.began_s + max(latest_s, record.began_s)) / 2
    steps = ends_s[source]
    place = bisect_right(steps, latest_s + at["last_block"] / 1e3 + ROUNDING_S)
    if place == 0 or steps[place - 1] < record.began_s:
        return None  # it had them all: nothing was computed
    return max(middle_s + at["last_block"] / 1e3 - steps[place - 1], 0.0)

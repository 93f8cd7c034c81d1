"""How much of a first token's wait was for blocks that had been computed already. Pure.

The server tells instants since it accepted a request, the source tells when its steps ended: on one clock, once the instant of
accepting is known. That lies between the client's sending and the first event less the server's own time to the first token; the
middle is taken.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from loadtest.stream import StreamRecord


def transfer_s(record: StreamRecord, ends_s: Mapping[str, Sequence[float]], slack_s: float = 0.0) -> float | None:
    """From the source's last step before the last block came, until then. None if nothing was fetched, or its source is not known.

    `ends_s`: rising, by worker. `slack_s`: a step that seems to have ended so much later may still be the one, as the clocks are read.
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
    came_s = (record.began_s + max(latest_s, record.began_s)) / 2 + at["last_block"] / 1e3
    steps = ends_s[source]
    place = bisect_right(steps, came_s + slack_s)
    return max(came_s - steps[place - 1], 0.0) if place else None

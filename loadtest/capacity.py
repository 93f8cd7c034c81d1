"""What a service can do at most: requests that come all at once, over the time until the last of them has ended. Pure.

An underestimate, since towards the end there is not enough left to do; the same one for every layout that is compared.
"""

from collections.abc import Sequence

from kvferry.errors import KvferryError
from loadtest.fate import Fate, fate_of
from loadtest.open_loop import Sent

PER_WORKER = 16
"""So many requests come at once: enough that none of the workers waits for work."""


def capacity_of(sent: Sequence[Sent]) -> float:
    """Requests/s that succeeded. Raises KvferryError if none did."""
    records = [one.record for one in sent if fate_of(one.record) is Fate.SUCCEEDED]
    ends_s = [record.event_s[-1] for record in records]
    if not ends_s or max(ends_s) <= min(record.began_s for record in records):
        raise KvferryError("no request of those that came at once succeeded: there is no capacity to take a share of")
    return len(records) / (max(ends_s) - min(record.began_s for record in records))

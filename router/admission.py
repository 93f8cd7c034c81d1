"""Who waits for a decode worker, in which order, and who is refused at once. Pure: the clock comes in as an argument.

Between tenants by tokens: whoever was given the fewest is next (start-time fair queueing, after Goyal, Vin and Cheng, 1996: a tenant
that was away gets no credit for it). What a request may come to have is charged when it is placed, and what it did not use is given
back. Within a tenant by priority, then by the earlier deadline. The queue is bounded by requests, tokens and bytes, and by time: a
request that would wait longer than it may is refused when it comes, not when its time is up. A tenant with less than its share is
still let in.
"""

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.errors import KvferryError, Overloaded
from router.live import Live

WINDOW_S = 5.0
MIN_PLACED = 4
"""Placements within the window, before a wait is foretold from them."""
MAX_RETRY_AFTER_S = 60.0
MAX_REMEMBERED = 1024
"""Tenants that have nothing here, and were given more than others a moment ago."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_requests: int = 1024
    max_tokens: int = 4_000_000
    """Of prompts and the answers that they may have."""
    max_bytes: int = 256 * 1024 * 1024


class FairQueue:
    """Requests by tenant."""

    def __init__(self) -> None:
        self._of_tenant: dict[bytes, list[tuple[tuple[int, float, int], Live]]] = {}
        self._served: dict[bytes, float] = {}
        self._virtual = 0.0
        self._keys: dict[int, tuple[int, float, int]] = {}
        self._charged: set[int] = set()
        """Numbers of requests that are in `_served`."""
        self._tokens_of: Counter[bytes] = Counter()
        self.num_tokens = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, live: Live) -> bool:
        return live.number in self._keys

    def push(self, live: Live) -> None:
        tenant = live.request.tenant
        waiting = self._of_tenant.setdefault(tenant, [])
        if not waiting:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._virtual)
        key = self._keys[live.number] = (-live.priority, live.deadline_s, live.number)
        bisect.insort(waiting, (key, live), key=lambda entry: entry[0])
        self._count(live, 1)

    def remove(self, live: Live) -> None:
        tenant, key = live.request.tenant, self._keys.pop(live.number)
        waiting = self._of_tenant[tenant]
        del waiting[bisect.bisect_left(waiting, key, key=lambda entry: entry[0])]
        if not waiting:
            del self._of_tenant[tenant]
        self._count(live, -1)
        if not self._keys:
            self._forget()

    def _forget(self) -> None:
        """Everybody has what they asked for."""
        self._served.clear()
        self._charged.clear()
        self._tokens_of.clear()
        self._virtual = 0.0

    def _count(self, live: Live, sign: int) -> None:
        self.num_tokens += sign * live.size
        self.num_bytes += sign * live.num_bytes
        self._tokens_of[live.request.tenant] += sign * live.size

    def charge(self, live: Live) -> None:
        """It is being placed: its tenant is given so much."""
        tenant = live.request.tenant
        self._charged.add(live.number)
        self._virtual = max(self._virtual, self._served.get(tenant, 0.0))
        self._served[tenant] = self._served.get(tenant, self._virtual) + live.size
        if len(self._served) > 2 * len(self._of_tenant) + MAX_REMEMBERED:
            idle = [tenant for tenant in self._served if tenant not in self._of_tenant]
            for tenant in idle[: len(idle) - MAX_REMEMBERED // 2]:  # those that came first
                del self._served[tenant]

    def pass_by(self, live: Live) -> None:
        """It is placed as it comes, and nobody waits: as if it had been pushed, removed and charged."""
        self._forget()
        self.charge(live)

    def settle(self, live: Live) -> None:
        """It has ended: what it was charged and did not have is given back. One that ended while it waited was charged nothing."""
        if live.number not in self._charged:
            return
        self._charged.remove(live.number)
        tenant, used = live.request.tenant, live.used_tokens
        if tenant in self._served:
            self._served[tenant] = max(self._served[tenant] - max(live.size - used, 0), self._virtual)

    def in_order(self) -> Iterator[Live]:
        """As they would be placed one after the other; taken only as far as somebody looks."""
        heap = [(self._served[tenant], tenant, 0) for tenant in self._of_tenant]
        heapq.heapify(heap)
        lists = {tenant: list(waiting) for tenant, waiting in self._of_tenant.items()}
        while heap:
            served, tenant, place = heapq.heappop(heap)
            live = lists[tenant][place][1]
            yield live
            if place + 1 < len(lists[tenant]):
                heapq.heappush(heap, (served + live.size, tenant, place + 1))

    def num_tokens_before(self, live: Live) -> int:
        """That are placed before a request of its tenant that comes now, if all tenants take turns."""
        tenant = live.request.tenant
        num_tenants = len(self._of_tenant) + (tenant not in self._of_tenant)
        return min(self.num_tokens, num_tenants * (self._tokens_of[tenant] + live.size))

    def has_its_share(self, live: Live, most: int) -> bool:
        """Whether the tenant has as many requests here as each may, if all have equally many of `most`."""
        tenant = live.request.tenant
        num_tenants = len(self._of_tenant) + (tenant not in self._of_tenant)
        return len(self._of_tenant.get(tenant, ())) >= most / num_tenants


class Admission:
    """Refuses what would wait too long, from how fast the queue has been moving."""

    def __init__(self, queue: FairQueue, limits: QueueLimits, short_pool: Callable[[], str] = lambda: "decode"):
        """`short_pool` names the pool that holds up the queue; asked of only where a request is refused."""
        self._queue, self._limits, self._short_pool = queue, limits, short_pool
        self._placed: deque[tuple[float, int]] = deque()

    def placed(self, live: Live, now: float, has_queue: bool) -> None:
        """Only while others wait does the pace say what the pools can take."""
        if not has_queue:
            self._placed.clear()
            return
        self._placed.append((now, live.size))
        while self._placed and self._placed[0][0] < now - WINDOW_S:
            self._placed.popleft()

    def wait_s(self, now: float, num_tokens: int) -> float | None:
        """What so many tokens before it make a request wait; None if nothing can be said."""
        recent = [(at, tokens) for at, tokens in self._placed if at >= now - WINDOW_S]
        if len(recent) < MIN_PLACED:
            return None
        pace = sum(tokens for _, tokens in recent[1:]) / max(now - recent[0][0], 0.001)
        return num_tokens / max(pace, 1e-9)

    def refusal(self, live: Live, now: float, max_wait_s: float) -> KvferryError | None:
        """Why the request cannot be taken now."""
        limits, queue = self._limits, self._queue
        is_over = len(queue) >= limits.max_requests
        if is_over and (len(queue) >= 2 * limits.max_requests or queue.has_its_share(live, limits.max_requests)):
            return self._too_full(f"{len(queue)} requests are", now)
        if len(queue) and queue.num_tokens + live.size > limits.max_tokens:
            return self._too_full(f"requests with {queue.num_tokens:,} tokens are", now)
        if len(queue) and queue.num_bytes + live.num_bytes > limits.max_bytes:
            return self._too_full(f"requests with {queue.num_bytes:,} bytes are", now)
        wait_s = self.wait_s(now, queue.num_tokens_before(live)) if len(queue) else None
        if wait_s is not None and wait_s > max_wait_s:
            return Overloaded(
                f"the {self._short_pool()} pool is short: a request that comes now would wait {wait_s:.1f} s, and may wait "
                f"{max_wait_s:.1f} s; try again later",
                min(max(wait_s - max_wait_s, 1.0), MAX_RETRY_AFTER_S),
            )
        return None

    def _too_full(self, what: str, now: float) -> Overloaded:
        retry_s = min(max(self.wait_s(now, self._queue.num_tokens) or 2.0, 1.0), MAX_RETRY_AFTER_S)
        message = f"{what} waiting for the {self._short_pool()} pool, which is the limit; try again later"
        return Overloaded(message, retry_s)

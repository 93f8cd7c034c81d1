"""An open-loop load test: requests go out when they are due, however late the service is, over real HTTP or in virtual time.

What an arrival becomes is told by a function that is passed in. Not more than `max_outstanding` wait at once: who would be one more is
refused here and counted as failed, so that an overloaded service cannot take the client with it. What the outcome is worth is told
by loadtest/goodput.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from loadtest.arrivals import Arrival, prompt_of
from loadtest.stream import StreamRecord, stream_completion

MAX_OUTSTANDING = 256
REFUSED_HERE = "refused_by_client"
READ_TIMEOUT_S = 120.0

Ask = Callable[[Arrival], Awaitable[StreamRecord]]


@dataclass(frozen=True, slots=True)
class Sent:
    """An arrival and what became of it."""

    arrival: Arrival
    record: StreamRecord
    lag_s: float
    """How much later than due the client got round to it: the client's own fault, and small if the figures mean anything."""
    transfer_s: float | None = None
    """Of its first token's time, what passed between the last step that computed for it and its last block; where that is known."""


async def drive(arrivals: Sequence[Arrival], ask: Ask, max_outstanding: int = MAX_OUTSTANDING) -> tuple[Sent, ...]:
    """Until all have ended. `arrivals` in the order of time; instants are the event loop's."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    sent: list[Sent] = []
    num_outstanding = 0

    async def one(arrival: Arrival) -> None:
        nonlocal num_outstanding
        lag_s = loop.time() - began_s - arrival.at_s
        sent.append(Sent(arrival, await ask(arrival), lag_s))
        num_outstanding -= 1

    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            await asyncio.sleep(max(began_s + arrival.at_s - loop.time(), 0.0))
            if num_outstanding >= max_outstanding:
                sent.append(Sent(arrival, StreamRecord(loop.time(), failure=REFUSED_HERE), 0.0))
                continue
            num_outstanding += 1
            group.create_task(one(arrival))
    return tuple(sorted(sent, key=lambda one: one.arrival.number))


async def drive_http(
    url: str, arrivals: Sequence[Arrival], run: object, max_outstanding: int = MAX_OUTSTANDING
) -> tuple[Sent, ...]:
    """`run` tells runs apart that must find nothing of each other in the service's caches."""
    limits = httpx.Limits(max_connections=max_outstanding, max_keepalive_connections=max_outstanding)
    timeout = httpx.Timeout(30.0, read=READ_TIMEOUT_S)
    bodies = {arrival.number: completion_body(arrival, run) for arrival in arrivals}
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:

        async def ask(arrival: Arrival) -> StreamRecord:
            return await stream_completion(client, url, bodies[arrival.number])

        return await drive(arrivals, ask, max_outstanding)


def completion_body(arrival: Arrival, run: object) -> dict[str, object]:
    """Of a completion of exactly that length, whose events carry token ids, so that none is missed for want of text."""
    return {
        "prompt": prompt_of(arrival, run),
        "max_tokens": arrival.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

"""Loads over raw connections: so many streams one after the other, or arrivals at a rate whatever becomes of them.

A process of its own, so that the one who measures is not measured: `python -m loadtest.raw_load` reads one order as JSON from standard
input and writes one answer a line, as a JSON list. `run_load` is how others start it.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from loadtest.own_process import said_by
from loadtest.raw_stream import LOST, RawAnswer, RawConnection, completion_request, open_connection

WORDS = (
    "river",
    "mountain",
    "bread",
    "paper",
    "window",
    "garden",
    "train",
    "music",
    "stone",
    "light",
    "harbour",
    "bridge",
)
TIMEOUT_S = 30.0
"""An open-loop answer that takes longer is given up."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """`rate_per_s` makes it an open loop of Poisson arrivals for `duration_s`; else `num_streams` ask `num_rounds` times each."""

    url: str
    model: str
    num_streams: int = 1
    num_rounds: int = 1
    rate_per_s: float = 0.0
    duration_s: float = 0.0
    prompt_words: int = 20
    output_tokens: int = 64
    is_kept: bool = True
    """Closed loop: a stream's requests share its connection; else each has one of its own, made before its clock starts."""
    seed: int = 0


async def run_load(order: LoadOrder) -> list[RawAnswer]:
    """In a process of its own. Raises KvferryError with its reason if it fails."""
    said = await said_by("loadtest.raw_load", asked=json.dumps(dataclasses.asdict(order)).encode())
    return [RawAnswer(*json.loads(line)) for line in said.splitlines()]


async def load(order: LoadOrder) -> list[RawAnswer]:
    """In this process. Raises OSError if nothing listens at the address."""
    rng = random.Random(order.seed)
    return await (_open_loop(order, rng) if order.rate_per_s else _closed_loop(order, rng))


async def _closed_loop(order: LoadOrder, rng: random.Random) -> list[RawAnswer]:
    requests = [[_request(order, rng) for _ in range(order.num_rounds)] for _ in range(order.num_streams)]
    answers: list[RawAnswer] = []

    async def one(stream: list[bytes]) -> None:
        connection = await open_connection(order.url)
        for request in stream:
            if not (connection.is_open and order.is_kept):
                connection.close()
                connection = await open_connection(order.url)
            answers.append(await connection.ask(request))
        connection.close()

    async with asyncio.TaskGroup() as group:
        for stream in requests:
            group.create_task(one(stream))
    return answers


async def _open_loop(order: LoadOrder, rng: random.Random) -> list[RawAnswer]:
    idle: list[RawConnection] = []
    answers: list[RawAnswer] = []

    async def one(request: bytes) -> None:
        asked_s = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = next(_usable(idle), None) or await open_connection(order.url)
                answers.append(await connection.ask(request))
            idle.append(connection)
        except (TimeoutError, OSError):
            now = time.perf_counter()
            answers.append(RawAnswer(LOST, asked_s, now, now))

    async with asyncio.TaskGroup() as group:
        async for _ in _arrivals(order, rng):
            group.create_task(one(_request(order, rng)))
    for connection in idle:
        connection.close()
    return answers


def _usable(idle: list[RawConnection]) -> Iterator[RawConnection]:
    while idle:
        if (connection := idle.pop()).is_open:
            yield connection


async def _arrivals(order: LoadOrder, rng: random.Random) -> AsyncIterator[float]:
    """Each at its own instant, however late the loop is."""
    loop = asyncio.get_running_loop()
    at, ends_at = loop.time(), loop.time() + order.duration_s
    while (at := at + rng.expovariate(order.rate_per_s)) < ends_at:
        if (left_s := at - loop.time()) > 0:
            await asyncio.sleep(left_s)
        yield at


def _request(order: LoadOrder, rng: random.Random) -> bytes:
    """A prompt of its own: no two share more than their first words by chance."""
    prompt = " ".join(rng.choices(WORDS, k=order.prompt_words))
    return completion_request(order.model, prompt, order.output_tokens)


def main() -> None:
    order = LoadOrder(**json.loads(sys.stdin.read()))
    for answer in asyncio.run(load(order)):
        print(json.dumps(dataclasses.astuple(answer)))


if __name__ == "__main__":
    main()

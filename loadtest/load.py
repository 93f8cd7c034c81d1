"""A closed-loop load test: so many streams at a time, each with a prompt of its own, over real HTTP."""

import asyncio
import random
import time
from dataclasses import dataclass

import httpx

from kvferry.errors import KvferryError, NoWorker
from loadtest.report import LoadReport
from loadtest.stream import StreamRecord, stream_completion

FIRST_ID, LAST_ID = 100, 30000
"""Prompt token ids are drawn from here: within every vocabulary of the sizes in use."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int = 0


async def load_test(url: str, plan: LoadPlan) -> LoadReport:
    """Raises NoWorker if nothing answers at `url`."""
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    timeout = httpx.Timeout(30.0, read=600.0)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
        await check_ready(client, url)
        await stream_completion(client, url, _body(plan, -1))  # the connection and the first step are not measured
        records: list[StreamRecord] = []
        left = iter(range(plan.requests))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(plan.concurrency):
                group.create_task(_one_stream(client, url, plan, left, records))
        return LoadReport(records, time.perf_counter() - began)


async def _one_stream(client: httpx.AsyncClient, url: str, plan: LoadPlan, left, records: list[StreamRecord]) -> None:
    for number in left:
        records.append(await stream_completion(client, url, _body(plan, number)))


def _body(plan: LoadPlan, number: int) -> dict[str, object]:
    rng = random.Random(f"{plan.seed} {number}")
    return {
        "prompt": [rng.randrange(FIRST_ID, LAST_ID) for _ in range(plan.input_tokens)],
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def check_ready(client: httpx.AsyncClient, url: str) -> None:
    """Raises KvferryError for a service that cannot be asked."""
    try:
        response = await client.get(f"{url}/health/ready")
    except httpx.TransportError as error:
        raise NoWorker(
            f"nothing answers at {url}: {error or type(error).__name__}; is `kvferry up` running?"
        ) from error
    if response.status_code != 200:
        raise KvferryError(f"{url} is not ready: HTTP {response.status_code} {response.text[:200]}")

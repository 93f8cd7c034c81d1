"""The load test from several nodes of a Ray cluster at once: each runs its share, and every stream's record comes back.

So figures are those of all records together, not averages of percentiles. Knows Ray's tasks, and nothing of a deployment.
"""

import asyncio
import itertools
import math
import time
from dataclasses import asdict, replace
from typing import Any

from kvferry.errors import KvferryError
from loadtest.load import LoadPlan, load_test
from loadtest.report import LoadReport
from loadtest.stream import StreamRecord

STREAMS_EACH = 64
"""That one generator is given at most; a node that has more of them has more generators, so that none is the bottleneck."""


def num_generators(plan: LoadPlan, num_nodes: int) -> int:
    return max(num_nodes, math.ceil(plan.concurrency / STREAMS_EACH))


def shares(plan: LoadPlan, count: int) -> list[LoadPlan]:
    """Of streams and requests, as even as can be, with prompts that differ; no more than there are streams or requests."""
    count = max(min(count, plan.concurrency, plan.requests), 1)

    def part(total: int, number: int) -> int:
        return total // count + (number < total % count)

    return [
        replace(
            plan,
            concurrency=part(plan.concurrency, number),
            requests=part(plan.requests, number),
            seed=plan.seed * count + number,
        )
        for number in range(count)
    ]


def merged(parts: list[dict[str, Any]]) -> LoadReport:
    """What `run_share` returned, as if one had run it all: from when the first began until the last had ended.

    Shares do not begin together, so rates are of all that time. The nodes' clocks are taken to agree.
    """
    records = [StreamRecord(**record) for part in parts for record in part["records"]]
    began_at = min(part["began_at"] for part in parts)
    return LoadReport(records, max(part["began_at"] + part["duration_s"] for part in parts) - began_at)


def run_share(url: str, plan: dict[str, Any]) -> dict[str, Any]:
    """A task's body: plain values in and out. Raises NoWorker."""
    report = asyncio.run(load_test(url, LoadPlan(**plan)))
    at_zero = time.time() - time.perf_counter()  # the records' clock begins at another time on each node
    return {
        "records": [asdict(record) for record in report.records],
        "began_at": at_zero + min(record.began_s for record in report.records),
        "duration_s": report.duration_s,
    }


async def load_from_nodes(url: str, plan: LoadPlan, node_ids: list[str]) -> LoadReport:
    """From a process that is connected to the cluster. Raises NoWorker if nothing answers at `url` from there."""
    import ray
    from ray.exceptions import RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(run_share)
    running = [
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            url, asdict(share)
        )
        for node_id, share in zip(itertools.cycle(node_ids), shares(plan, num_generators(plan, len(node_ids))))
    ]
    try:
        return merged(await asyncio.gather(*(asyncio.wrap_future(one.future()) for one in running)))
    except RayTaskError as error:
        if isinstance(error.cause, KvferryError):
            raise error.cause from None
        raise

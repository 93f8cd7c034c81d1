"""The load test from several nodes of a Ray cluster at once: each runs its share, and every stream's record comes back.

So figures are those of all records together, not averages of percentiles. A share that is lost with its process or node has failed
with all of its requests; it is not run again, as it had run in part. Knows Ray's tasks, and nothing of a deployment.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from kvferry.errors import KvferryError, NoWorker
from loadtest.load import LoadPlan, load_test
from loadtest.report import LoadReport
from loadtest.stream import StreamRecord

STREAMS_EACH = 64
"""That one generator is given at most; a node that has more of them has more generators, so that none is the bottleneck."""


def num_generators(plan: LoadPlan, num_nodes: int, num_urls: int) -> int:
    return max(num_nodes, num_urls, math.ceil(plan.concurrency / STREAMS_EACH))


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


@dataclass(frozen=True, slots=True)
class Share:
    """Of the load: `words` say which, for people."""

    words: str
    url: str
    node_id: str
    plan: LoadPlan


def shares_over(plan: LoadPlan, urls: list[str], nodes: dict[str, str]) -> list[Share]:
    """From every node to every URL in turn. `nodes`: what people call them, by id."""
    parts = shares(plan, num_generators(plan, len(nodes), len(urls)))
    places = zip(parts, itertools.cycle(nodes.items()), itertools.cycle(urls))
    return [
        Share(f"share {number} of {len(parts)}, from node {name} to {url}", url, node_id, part)
        for number, (part, (node_id, name), url) in enumerate(places, 1)
    ]


def merged(parts: list[dict[str, Any]], num_lost: int = 0) -> LoadReport:
    """What `run_share` returned, as if one had run it all: from when the first began until the last had ended.

    Shares do not begin together, so rates are of all that time. The nodes' clocks are taken to agree. `num_lost`: requests of shares
    that returned nothing.
    """
    records = [StreamRecord(**record) for part in parts for record in part["records"]]
    records += [StreamRecord(0.0, failure="share_lost") for _ in range(num_lost)]
    began_at = min(part["began_at"] for part in parts)
    return LoadReport(records, max(part["began_at"] + part["duration_s"] for part in parts) - began_at)


def outcome(parts: list[Share], ends: list[Any], on_loss: Callable[[str], None]) -> LoadReport:
    """`ends`: what each share returned, or raised. Raises what the first one did if none returned anything."""
    whole = [end for end in ends if not isinstance(end, BaseException)]
    num_lost = 0
    for share, end in zip(parts, ends, strict=True):
        if isinstance(end, BaseException):
            reason = _reason(share, end)
            if not whole:
                raise reason from None
            on_loss(reason.message)
            num_lost += share.plan.requests
    return merged(whole, num_lost)


def _reason(share: Share, error: BaseException) -> NoWorker:
    """What it raised itself, or why Ray has lost it. Raises anything else."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        if isinstance(error.cause, KvferryError):
            return NoWorker(f"{share.words}: {error.cause.message}")
        raise error
    if isinstance(error, RayError):
        return NoWorker(f"{share.words} is lost: {' '.join(str(error).split()) or type(error).__name__}")
    raise error


def run_share(url: str, plan: dict[str, Any]) -> dict[str, Any]:
    """A task's body: plain values in and out. Raises NoWorker."""
    report = asyncio.run(load_test(url, LoadPlan(**plan)))
    at_zero = time.time() - time.perf_counter()  # the records' clock begins at another time on each node
    return {
        "records": [asdict(record) for record in report.records],
        "began_at": at_zero + min(record.began_s for record in report.records),
        "duration_s": report.duration_s,
    }


async def load_from_nodes(
    urls: list[str], plan: LoadPlan, nodes: dict[str, str], on_loss: Callable[[str], None]
) -> LoadReport:
    """From a process that is connected to the cluster. Raises NoWorker if nothing answers at any of `urls` from there.

    `on_loss` is told of each share that is lost, while others have run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    parts, task = shares_over(plan, urls, nodes), cast(Any, ray.remote(run_share))
    running = [
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(share.node_id, soft=False),
        ).remote(share.url, asdict(share.plan))
        for share in parts
    ]
    ends = await asyncio.gather(*(asyncio.wrap_future(one.future()) for one in running), return_exceptions=True)
    return outcome(parts, ends, on_loss)

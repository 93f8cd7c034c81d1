"""A load that several nodes share: nothing is lost, and figures are those of all records."""

import time
from collections import Counter
from dataclasses import asdict

import pytest

from kvferry.errors import NoWorker
from loadtest import spread_load
from loadtest.load import LoadPlan
from loadtest.report import LoadReport
from loadtest.spread_load import STREAMS_EACH, merged, num_generators, outcome, run_share, shares, shares_over
from loadtest.stream import StreamRecord


@pytest.mark.parametrize(("concurrency", "requests", "num_nodes"), [(8, 100, 3), (2, 100, 5), (50, 3, 7), (1, 1, 1)])
def test_shares_are_all_of_it(concurrency, requests, num_nodes):
    plan = LoadPlan(concurrency, requests, 10, 20, seed=3)
    parts = shares(plan, num_nodes)
    assert sum(part.concurrency for part in parts) == concurrency
    assert sum(part.requests for part in parts) == requests
    assert min(min(part.concurrency, part.requests) for part in parts) >= 1
    assert len({part.seed for part in parts}) == len(parts) <= num_nodes


@pytest.mark.parametrize(("concurrency", "num_nodes", "count"), [(200, 1, 4), (200, 10, 10), (64, 1, 1), (65, 2, 2)])
def test_no_generator_has_more_streams_than_it_can_carry(concurrency, num_nodes, count):
    plan = LoadPlan(concurrency, 1000, 10, 20)
    assert num_generators(plan, num_nodes, num_urls=1) == count
    assert max(part.concurrency for part in shares(plan, count)) <= STREAMS_EACH


def record(began_s, event_s, failure=""):
    return StreamRecord(began_s, list(event_s), len(event_s), failure)


def part(records, began_at, duration_s):
    return {"records": [asdict(one) for one in records], "began_at": began_at, "duration_s": duration_s}


def test_merged_figures_are_those_of_one_that_ran_it_all():
    near = [record(0, (1, 2, 3)), record(0, (1, 5))]
    far = [record(100, (101, 109)), record(100, (), "cut")]
    found = merged([part(near, 1000.0, 5.0), part(far, 1000.0, 9.0)])
    assert found.figures() == LoadReport([*near, *far], 9.0).figures()


@pytest.mark.parametrize(
    ("began_at", "duration_s", "whole_s"), [(1005.0, 9.0, 14.0), (1005.0, 2.0, 10.0), (1015.0, 5.0, 20.0)]
)
def test_rates_are_of_all_the_time_in_which_any_share_ran(began_at, duration_s, whole_s):
    """One that ran from 1000 to 1010, and one that began later, within it or after it."""
    first, second = ([record(0, (1, 2))] for _ in range(2))
    found = merged([part(first, 1000.0, 10.0), part(second, began_at, duration_s)])
    assert found.duration_s == whole_s


def test_a_share_says_when_it_began_by_the_clock_on_the_wall(monkeypatch):
    async def load_test(url, plan):
        began = time.perf_counter()
        return LoadReport([record(began + 3, (began + 4,)), record(began, (began + 1,))], 7.0)

    monkeypatch.setattr(spread_load, "load_test", load_test)
    now = time.time()
    found = run_share("http://any", asdict(LoadPlan(1, 2, 10, 20)))
    assert found["duration_s"] == 7.0
    assert now - 0.1 < found["began_at"] < time.time() + 0.1


@pytest.mark.parametrize(("num_nodes", "num_urls"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 5)])
def test_every_router_and_every_node_has_its_part(num_nodes, num_urls):
    nodes = {f"id{k}": f"node {k}" for k in range(num_nodes)}
    urls = [f"http://router-{k}" for k in range(num_urls)]
    parts = shares_over(LoadPlan(12, 60, 10, 20), urls, nodes)
    assert {one.node_id for one in parts} == nodes.keys()
    assert {one.url for one in parts} == set(urls)
    counts = Counter(one.url for one in parts)
    assert max(counts.values()) - min(counts.values()) <= 1


def ends_of(*ends):
    """Of a load of six requests from as many nodes: its report, and what was said."""
    said = []
    parts = shares_over(LoadPlan(len(ends), 6, 10, 20), ["http://r"], {f"id{k}": f"n{k}" for k in range(len(ends))})
    return outcome(parts, list(ends), said.append), said


def test_a_share_that_is_lost_is_named_and_has_failed_and_what_others_recorded_counts():
    from ray.exceptions import RayTaskError, WorkerCrashedError

    refused = RayTaskError("run_share", "trace", NoWorker("nothing answers"))
    report, said = ends_of(
        part([record(0, (1, 2)), record(0, (1, 3))], 1000.0, 4.0), WorkerCrashedError(), refused.as_instanceof_cause()
    )
    assert len(report.succeeded) == 2
    assert report.failures == {"share_lost": 4}
    assert [words.partition(":")[0] for words in said] == [
        "share 2 of 3, from node n1 to http",
        "share 3 of 3, from node n2 to http",
    ]
    assert "is lost" in said[0]
    assert "nothing answers" in said[1]


def test_when_every_share_is_lost_the_first_says_why_and_what_is_no_loss_is_raised_as_it_is():
    from ray.exceptions import NodeDiedError, RayTaskError

    with pytest.raises(NoWorker, match="share 1 of 2, from node n0 to http://r is lost"):
        ends_of(NodeDiedError("gone"), NodeDiedError("gone"))
    with pytest.raises(RayTaskError):
        ends_of(part([record(0, (1, 2))], 1000.0, 4.0), RayTaskError("run_share", "trace", KeyError("of ours")))

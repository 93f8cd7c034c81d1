"""A load that several nodes share: nothing is lost, and figures are those of all records."""

from dataclasses import asdict

import pytest

from loadtest.load import LoadPlan
from loadtest.report import LoadReport
from loadtest.spread_load import merged, shares
from loadtest.stream import StreamRecord


@pytest.mark.parametrize(("concurrency", "requests", "num_nodes"), [(8, 100, 3), (2, 100, 5), (50, 3, 7), (1, 1, 1)])
def test_shares_are_all_of_it(concurrency, requests, num_nodes):
    plan = LoadPlan(concurrency, requests, 10, 20, seed=3)
    parts = shares(plan, num_nodes)
    assert sum(part.concurrency for part in parts) == concurrency
    assert sum(part.requests for part in parts) == requests
    assert min(min(part.concurrency, part.requests) for part in parts) >= 1
    assert len({part.seed for part in parts}) == len(parts) <= num_nodes


def record(began_s, event_s, failure=""):
    return StreamRecord(began_s, list(event_s), len(event_s), failure)


def test_merged_figures_are_those_of_one_that_ran_it_all():
    near = [record(0, (1, 2, 3)), record(0, (1, 5))]
    far = [record(100, (101, 109)), record(100, (), "cut")]
    parts = [{"records": [asdict(one) for one in some], "duration_s": took} for some, took in ((near, 5.0), (far, 9.0))]
    assert merged(parts).figures() == LoadReport([*near, *far], 9.0).figures()

"""The router under faults, in a thousand schedules drawn from seeds (tests/router_schedules.py): 300 in `make test`, all in `make soak`.

One schedule alone, by its number: `.venv/bin/python -c "from tests.router_schedules import *; carry_out(draw(7))"`.
"""

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from router.placement import POLICIES
from tests.router_schedules import KINDS, NUM_ASKS, TENANTS, carry_out_all, draw
from tests.traced_schedules import digests_of, trace_of

NUM_SCHEDULES, NUM_IN_MAKE_TEST, SCHEDULES_PER_CASE = 1000, 300, 50
FIRSTS = range(2 * SCHEDULES_PER_CASE, NUM_SCHEDULES, SCHEDULES_PER_CASE)
WANTED = {
    *("finished", "cancelled", "failed", "refused", "left one behind", "joined", "Conflict"),
    *("worker_losses", "continuations", "late_messages", "placed_local", "fetched_blocks"),
}
"""What must happen in each case: a schedule that is never in trouble shows nothing."""
FIRED = {*KINDS, "drained", "tokens lost", "events lost", "snapshots_asked", "set_aside", "unplaced", "preemptions"}
FIRED |= {"bad_frame_digest", "DeadlineExceeded", "EngineFailure", "NoWorker", "Overloaded"}
"""What must happen over all of them."""


@cache
def happened_from(first: int) -> Counter[str]:
    happened = carry_out_all(range(first, first + SCHEDULES_PER_CASE))
    assert not WANTED - happened.keys(), (WANTED - happened.keys(), happened)
    return happened


def test_the_schedules_have_every_policy_pool_and_way_to_ask():
    schedules = [draw(seed) for seed in range(NUM_IN_MAKE_TEST)]
    asks = [ask for schedule in schedules for ask in schedule.asks]
    assert all(len(schedule.asks) == NUM_ASKS for schedule in schedules)
    assert Counter(schedule.policy for schedule in schedules).keys() == set(POLICIES)
    assert {len(schedule.workers) for schedule in schedules} == {2, 3, 4, 5, 6}
    assert sum(not any(name.startswith("p") for name in schedule.workers) for schedule in schedules) >= 20
    assert sum(schedule.num_routers == 2 for schedule in schedules) >= 50
    assert sum(not schedule.faults for schedule in schedules) >= 20
    for kind in KINDS:
        assert sum(schedule.has(kind, role="d") for schedule in schedules) >= 10, kind
    assert {ask.request.salt for ask in asks} == set(TENANTS)
    assert {ask.request.num_choices for ask in asks} == {1, 2, 3}
    for has in ("stops", "timeout_s", "priority"):
        assert sum(bool(getattr(ask.request, has)) for ask in asks) >= 500, has
    assert sum(len(ask.readers) > 1 for ask in asks) >= 500
    assert sum(any(reader.leaves_after_s is not None for reader in ask.readers) for ask in asks) >= 1000


@pytest.mark.parametrize(
    "first", [pytest.param(k, marks=[pytest.mark.soak] if k >= NUM_IN_MAKE_TEST else []) for k in FIRSTS]
)
def test_every_request_ends_once_exactly_or_as_its_schedule_explains_and_the_router_is_as_new(first):
    happened_from(first)


def test_so_does_every_request_of_the_first_hundred_in_which_every_kind_of_fault_has_fired():
    happened = happened_from(0) + happened_from(SCHEDULES_PER_CASE)
    few = {kind: happened[kind] for kind in FIRED if happened[kind] < 3}
    assert not few, (few, happened)


def test_the_same_seed_is_the_same_run_message_by_message_in_another_process_on_a_strange_machine():
    seeds = (1, 56, 60)
    command = (sys.executable, "-m", "tests.traced_schedules", *map(str, seeds))
    elsewhere = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": "7"}
    )
    for seed, digests in zip(seeds, elsewhere.stdout.splitlines(), strict=True):
        here, there = trace_of(seed), digests.split()
        differs = [line for line, one, other in zip(here, digests_of(here), there, strict=False) if one != other]
        assert not differs, (seed, len(differs), differs[0])
        assert len(here) == len(there)

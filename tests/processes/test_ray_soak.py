"""The long forms of what tests/processes/test_ray_cluster.py shows, each on a cluster of its own (T086, T088)."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.ray_cluster import (
    RayNodes,
    actor_use,
    ask_many,
    assert_at_rest,
    assert_exact,
    deployed,
    ids,
    place_of,
    right,
    sim_plan,
    streams_of,
)
from tests.processes.service import wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.soak]

GRACE_S = 2


@pytest.fixture
def nodes():
    with RayNodes(num_nodes=3) as cluster:
        yield cluster


def test_streams_that_outlast_the_grace_go_on_elsewhere_when_decode_shrinks(nodes, model_directory):
    """40 streams of some 60 s; a worker that goes has 2 s."""
    plan = sim_plan(model_directory, grace_s=GRACE_S)
    with deployed(plan, "kvferry") as service, ThreadPoolExecutor(40) as pool:
        service.do(service.client.scale(3, 3))
        streams = streams_of(service, pool, 40, 800, "grace")
        began = time.monotonic()
        service.do(service.client.scale(1, 1))
        assert time.monotonic() - began < GRACE_S + 8
        assert not any(coming.done() for _, coming in streams), "the grace is over, and they are not"
        assert set(service.programs) == {"router-1", "prefill-1", "decode-1"}
        assert_exact(streams, 800)
        service.wait_idle()


def test_a_worker_whose_grace_runs_out_becomes_the_other_kind_and_serves(nodes, model_directory):
    with deployed(sim_plan(model_directory, grace_s=GRACE_S), "kvferry") as service, ThreadPoolExecutor(12) as pool:
        pid = service.programs["decode-2"]["node"]["pid"]
        streams = streams_of(service, pool, 12, 200, "role")
        service.do(service.client.change_role("decode-2", "prefill"))
        assert not any(coming.done() for _, coming in streams), "the grace is over, and they are not"
        assert service.programs["decode-2"]["node"]["pid"] == pid
        prompts = [ids(300, ("as prefill", k)) for k in range(9)]
        for prompt, tokens in zip(prompts, pool.map(lambda one: service.tokens(one, 4), prompts), strict=True):
            assert tokens == right(prompt, 4)
        assert service.total("kvferry_worker_events_total", worker="decode-2", name="served_blocks") > 0
        assert_exact(streams, 200)
        service.do(service.client.change_role("decode-2", "decode"))
        streams = streams_of(service, pool, 12, 30, "back")
        wait_until(lambda: service.total("kvferry_worker_sequences", worker="decode-2") > 0, 2, "it to decode")
        assert_exact(streams, 30)
        assert service.programs["decode-2"]["num_starts"] == 1
        service.wait_idle()


def test_sigterm_to_an_actors_process_is_its_loss_and_costs_no_token(nodes, model_directory):
    """Ray's handler ends the process where it stands; what drains a worker is `kvferry drain`."""
    with deployed(sim_plan(model_directory), "kvferry") as service, ThreadPoolExecutor(12) as pool:
        for name in ("decode-2", "prefill-2"):
            streams = streams_of(service, pool, 12, 60, ("term", name))
            os.kill(service.programs[name]["node"]["pid"], signal.SIGTERM)
            assert_exact(streams, 60)
            wait_until(
                lambda name=name: service.programs[name]["num_starts"] > 1 and service.programs[name]["is_ready"],
                30,
                "its next life",
            )
        service.wait_idle()


def test_thousands_of_requests_leave_nothing_in_the_store_or_the_actors(nodes, model_directory):
    """T088: of 20,000, a tenth are cancelled, and of the first 2,000 some lose their source."""
    plan = sim_plan(model_directory, transport="ray")
    fast = {"settings": {"sim_accelerator": "a100"}}
    places = {"prefill": "in(n0, n1)", "decode": "n2"}
    pools = {role: {**plan.pool(role).model_dump(), **fast, "labels": {"place": at}} for role, at in places.items()}
    pools["decode"]["count"] = 1
    with deployed(sim_plan(model_directory, transport="ray", **pools), "kvferry") as service:
        ask_many(service, 200, "warm")
        for turn in range(8):
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask_many, service, 250, ("lossy", turn))
                wait_until(lambda: service.total("kvferry_worker_sequences", state="fetching") > 0, 10, "a fetch")
                lost = f"prefill-{turn % 2 + 1}"
                starts = service.programs[lost]["num_starts"]
                os.kill(service.programs[lost]["node"]["pid"], signal.SIGKILL)
                asked.result()
            wait_until(lambda: service.programs[lost]["num_starts"] > starts, 40, "it to begin again")  # noqa: B023
            wait_until(lambda: all(one["is_ready"] for one in service.programs.values()), 40, "all to be ready")
        ask_many(service, 250, "settled")
        service.wait_idle()
        before = actor_use(service)
        for turn in range(70):
            ask_many(service, 250, ("steady", turn))
            if turn % 14 == 13:
                assert_at_rest(service, nodes.address, before, more_mib=40)


def test_what_fits_in_one_way_only_is_placed_in_that_way(model_directory):
    """3 + 3 and 2 + 2 processors of 6 and 4; and the only node of a label is left to those that need it."""
    with RayNodes(num_nodes=0) as nodes:
        nodes.add_node(6, rack="a", disk="slow")
        nodes.add_node(4, rack="b")
        rest = {"resources": {}, "labels": {"rack": "in(a, b)"}, "settings": {"threads": 1}}
        pools = {"prefill": {"count": 2, "cpus": 3, **rest}, "decode": {"count": 2, "cpus": 2, **rest}}
        for _ in range(3):
            with deployed(sim_plan(model_directory, **pools), "kvferry") as full:
                places = {name: place_of(full, name) for name in full.programs}
                assert places["prefill-1"] == places["prefill-2"] != places["decode-1"] == places["decode-2"]
        pools["prefill"] |= {"count": 1, "cpus": 4}
        pools["decode"] |= {"count": 1, "cpus": 4, "labels": {"disk": "fast"}}
        for _ in range(3):
            with deployed(sim_plan(model_directory, **pools), "kvferry") as full:
                assert place_of(full, "prefill-1") != place_of(full, "decode-1")

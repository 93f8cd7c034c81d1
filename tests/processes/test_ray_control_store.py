"""The control store of a Ray cluster is killed and stays away, without external storage (T045): what is promised then."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.processes.ray_cluster import (
    ClusterService,
    RayNodes,
    assert_exact,
    ids,
    json_of,
    kvferry,
    right,
    sim_plan,
    streams_of,
)
from tests.processes.service import wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]

LIMIT_S = 4
"""That Ray's processes wait for it; 60 s where nobody sets it."""
AWAY_S = 30


@pytest.fixture
def nodes():
    """This process is no driver of it: Ray ends those, too."""
    with RayNodes(num_nodes=1, is_driver=False, gcs_rpc_server_reconnect_timeout_s=LIMIT_S) as cluster:
        yield cluster


def started(plan, address, folder):
    """The deployment's door, and its processes."""
    file = folder / "deployment.yaml"
    file.write_text(plan.model_dump_json())
    run = kvferry("up", "--on=ray", f"--address={address}", f"--deployment={file}")
    assert run.returncode == 0, run.stderr
    status = json_of(kvferry("status", f"--address={address}", "--json"))
    pids = [status["controller"]["pid"], *(one["node"]["pid"] for one in status["programs"])]
    return ClusterService(None, status), [psutil.Process(pid) for pid in pids]


def test_streams_run_on_commands_say_so_at_once_and_then_all_of_it_ends(nodes, model_directory, tmp_path):
    one = {"count": 1, "cpus": 1, "resources": {"slot": 1}}
    service, processes = started(sim_plan(model_directory, prefill=one, decode=one), nodes.address, tmp_path)
    with ThreadPoolExecutor(6) as pool:
        streams = streams_of(service, pool, 4, 20, "short")
        endless = pool.submit(service.stream_tokens, ids(40, "endless"), 2000)
        nodes.gcs.kill()
        killed = time.monotonic()
        assert service.tokens(ids(100, "new"), 4) == right(ids(100, "new"), 4)
        assert_exact(streams, 20)
        assert time.monotonic() - killed < LIMIT_S
        for address in (nodes.address, "auto"):
            began = time.monotonic()
            run = kvferry("status", f"--address={address}")
            assert run.returncode == 2
            assert f"no Ray at {nodes.address}: " in run.stderr.replace("\n", " ")
            assert time.monotonic() - began < 10
        with pytest.raises(httpx.TransportError):
            endless.result(timeout=30)
    wait_until(lambda: not any(one.is_running() for one in processes), 20, "Ray to end its processes")


@pytest.mark.soak  # `kvferry` waits 30 s for a Ray to answer
def test_one_that_forgot_all_is_a_new_cluster_and_traffic_goes_on_as_it_was(model_directory, tmp_path):
    """And a router that has not served yet begins to while it is away."""
    with RayNodes(num_nodes=1, is_driver=False) as nodes:
        one = {"count": 1, "cpus": 1, "resources": {"slot": 1}}
        service, processes = started(sim_plan(model_directory, prefill=one, decode=one), nodes.address, tmp_path)
        with ThreadPoolExecutor(6) as pool:
            nodes.kill_gcs()
            assert service.tokens(ids(300, "first"), 4) == right(ids(300, "first"), 4)
            streams = streams_of(service, pool, 6, 600, "through")
            time.sleep(AWAY_S)
            nodes.start_gcs()
            assert not any(coming.done() for _, coming in streams)
            assert_exact(streams, 600)
        run = kvferry("status", f"--address={nodes.address}", timeout_s=90)
        assert run.returncode == 2
        assert f"{nodes.address} does not answer within 30 s" in run.stderr.replace("\n", " ")
        assert service.tokens(ids(300, "last"), 4) == right(ids(300, "last"), 4)
        assert all(one.is_running() for one in processes)

"""A deployment on a Ray cluster of several nodes (T045, T085, T086): simulated workers, whose answers show every wrong block."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import httpx
import psutil
import pytest

from deploy.cluster.client import ClusterClient, urls
from deploy.cluster.nodes import cluster_nodes
from deploy.cluster.program import ProgramActor
from deploy.command import notes
from kvferry.errors import ConfigurationError
from loadtest import exact
from loadtest.load import LoadPlan
from loadtest.spread_load import load_from_nodes
from tests.processes.ray_cluster import (
    ROOT,
    RayNodes,
    actor_use,
    ask_many,
    assert_at_rest,
    assert_exact,
    deployed,
    ids,
    json_of,
    kvferry,
    place_of,
    right,
    sim_plan,
    streams_of,
    wait_for_programs,
    with_token,
)
from tests.processes.service import Service, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]

GRACE_S = 20


@pytest.fixture(scope="module")
def nodes():
    with RayNodes(num_nodes=3, has_clients=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service(nodes, model_directory):
    """Two prefill and two decode workers; each test leaves it so."""
    with deployed(sim_plan(model_directory, grace_s=GRACE_S), "kvferry") as running:
        yield running


@pytest.fixture(autouse=True)
def _leaves_nothing_held():
    """The package's own looks at another deployment."""


def test_workers_are_spread_and_answer_exactly_over_grpc(service):
    places = {name: one["node"]["node_id"] for name, one in service.programs.items()}
    assert len({places[name] for name in places if name != "router-1"}) >= 2
    for length in (5, 17, 300):
        prompt = ids(length, length)
        answer = service.complete(prompt, 8)
        assert answer["choices"][0]["token_ids"] == right(prompt, 8)
        if length > 32:
            assert (answer["kvferry"][0]["road"], answer["kvferry"][0]["fetched_blocks"]) == (
                "grpc",
                (length - 1) // 16,
            )
    service.wait_idle()


def test_a_second_deployment_beside_it_answers_exactly_over_the_object_store(service, nodes, model_directory):
    """In another namespace than its job's; and workers that have met do not ask the control store."""
    plan, places = sim_plan(model_directory, transport="ray"), {"prefill": "n0", "decode": "n1"}
    one = {"count": 1, "settings": {"sim_accelerator": "a100"}}
    pools = {role: {**plan.pool(role).model_dump(), **one, "labels": {"place": at}} for role, at in places.items()}
    with deployed(sim_plan(model_directory, transport="ray", **pools), "beside") as store:
        assert store.url != service.url
        assert place_of(store, "prefill-1") != place_of(store, "decode-1")
        for length in (17, 300, 1000):
            assert_fetched_through_the_store(store, length)
        nodes.gcs.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert_fetched_through_the_store(store, 310)
            assert time.monotonic() - began < 3
        finally:
            nodes.gcs.send_signal(signal.SIGCONT)
        ask_many(store, 60, "warm")
        store.wait_idle()
        before = actor_use(store)
        ask_many(store, 240, "many")
        assert_at_rest(store, nodes.address, before, more_mib=25)
    assert service.complete(ids(20, "still"), 4)["choices"][0]["token_ids"] == right(ids(20, "still"), 4)


def assert_fetched_through_the_store(store, length):
    prompt = ids(length, ("store", length))
    answer = store.complete(prompt, 8)
    assert answer["choices"][0]["token_ids"] == right(prompt, 8)
    if length > 32:
        numbers = answer["kvferry"][0]
        assert (numbers["road"], numbers["fetched_blocks"]) == ("ray", (length - 1) // 16)


def test_either_of_two_routers_serves_anything_and_the_loss_of_one_is_nothing_to_the_other(nodes, model_directory):
    plan = sim_plan(model_directory)
    sizes = {"router": 2, "prefill": 1, "decode": 1}
    pools = {role: {**plan.pool(role).model_dump(), "count": count} for role, count in sizes.items()}
    with deployed(sim_plan(model_directory, **pools), "pair") as pair:
        first, second = (Service(SimpleNamespace(url=url, grpc_address="", children={})) for url in urls(pair.status))
        for k, door in enumerate((first, second)):
            door.wait_ready("prefill-1", "decode-1")
            assert door.tokens(ids(300, ("door", k)), 8) == right(ids(300, ("door", k)), 8)
        lost = next(one["node"] for one in pair.status["programs"] if one["details"]["http"] in first.url)
        with ThreadPoolExecutor(4) as pool:
            streams = streams_of(second, pool, 4, 40, "second")
            os.kill(lost["pid"], signal.SIGKILL)
            assert_exact(streams, 40)
        wait_until(lambda: len(urls(pair.status)) == 2 and is_answered(pair), 20, "the lost one to be back")


def is_answered(pair):
    """At each door."""
    doors = [Service(SimpleNamespace(url=url, grpc_address="", children={})) for url in urls(pair.status)]
    with contextlib.suppress(httpx.TransportError):
        return all(door.http.get("/health/ready").status_code == 200 for door in doors)


def test_a_node_killed_under_load_costs_no_token_and_its_actors_come_back(service, nodes):
    before = service.programs
    victim = before["decode-1"]["node"]["node_id"]
    lost = {name for name, one in before.items() if one["node"]["node_id"] == victim}
    assert "router-1" not in lost
    with ThreadPoolExecutor(16) as pool:
        streams = streams_of(service, pool, 16, 60, "node")
        nodes.kill_node(victim)
        assert_exact(streams, 60)
    assert service.total("kvferry_request_events_total", event="worker_losses") > 0
    wait_for_programs(
        service, lambda there: all(there[name]["is_ready"] for name in before), 40, "the lost ones to come back"
    )
    after = service.programs
    assert all(after[name]["node"]["node_id"] != victim for name in lost)
    assert {name: after[name]["num_starts"] for name in before if name not in lost} == {
        name: one["num_starts"] for name, one in before.items() if name not in lost
    }
    assert groups_of("kvferry") == set(before)
    nodes.add_node()
    service.wait_idle()


def test_running_traffic_does_not_notice_that_the_control_store_is_away(service, nodes):
    gcs = nodes.gcs
    with ThreadPoolExecutor(8) as pool:
        streams = streams_of(service, pool, 6, 120, "gcs")
        gcs.send_signal(signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            while time.monotonic() < stopped + 10:
                prompt = ids(100, ("away", time.monotonic()))
                began = time.monotonic()
                assert service.tokens(prompt, 4) == right(prompt, 4)
                assert time.monotonic() - began < 2
        finally:
            gcs.send_signal(signal.SIGCONT)
        assert_exact(streams, 120)
    starts = {name: one["num_starts"] for name, one in service.programs.items()}
    time.sleep(3)
    assert {name: one["num_starts"] for name, one in service.programs.items()} == starts
    assert all(one["is_ready"] for one in service.programs.values())


def num_at_work(service, name):
    """Sequences that a worker computes or has waiting, and fetches that it serves."""
    return service.total("kvferry_worker_sequences", worker=name) + service.total("kvferry_worker_active", worker=name)


def test_scaling_down_under_load_costs_no_client_anything(service):
    service.do(service.client.scale(3, 3))
    assert {"prefill-3", "decode-3"} <= set(service.programs)
    losses = service.total("kvferry_request_events_total", event="worker_losses")
    with ThreadPoolExecutor(52) as pool:
        streams = streams_of(service, pool, 40, 60, "scale")
        long = [ids(900, ("staged", k)) for k in range(12)]
        staged = [(prompt, pool.submit(service.stream_tokens, prompt, 20)) for prompt in long]
        wait_until(
            lambda: all(num_at_work(service, f"prefill-{k}") for k in (1, 2, 3)), 10, "every prefill worker to compute"
        )
        service.do(service.client.scale(1, 1))
        assert_exact(streams, 60)
        assert_exact(staged, 20)
    assert set(service.programs) == {"router-1", "prefill-1", "decode-1"}
    assert service.total("kvferry_request_events_total", event="worker_losses") == losses, "they drained"
    service.do(service.client.scale(2, 2))
    service.wait_idle()


def test_a_worker_changes_its_role_in_the_same_process(service):
    pid = service.programs["prefill-2"]["node"]["pid"]
    with ThreadPoolExecutor(6) as pool:
        streams = streams_of(service, pool, 6, 30, "role")
        service.do(service.client.change_role("prefill-2", "decode"))
        assert_exact(streams, 30)
    assert service.programs["prefill-2"]["node"]["pid"] == pid
    assert service.status["wanted"] == {"prefill": 1, "decode": 3}
    with ThreadPoolExecutor(12) as pool:
        streams = streams_of(service, pool, 12, 30, "as decode")
        wait_until(lambda: service.total("kvferry_worker_sequences", worker="prefill-2") > 0, 1, "it to decode")
        assert_exact(streams, 30)
    service.do(service.client.change_role("prefill-2", "prefill"))
    prompt = ids(200, "back")
    assert service.tokens(prompt, 6) == right(prompt, 6)
    service.wait_idle()


def test_drain_takes_a_worker_out_and_the_last_one_stays(service):
    with ThreadPoolExecutor(6) as pool:
        streams = streams_of(service, pool, 6, 30, "drain")
        service.do(service.client.drain("decode-2"))
        assert_exact(streams, 30)
    assert service.status["wanted"] == {"prefill": 2, "decode": 1}
    with pytest.raises(ConfigurationError, match="only decode worker"):
        service.do(service.client.drain("decode-1"))
    with pytest.raises(ConfigurationError, match="no worker 'decode-9'; there are"):
        service.do(service.client.drain("decode-9"))
    service.do(service.client.scale(None, 2))


@pytest.mark.parametrize("how", ["SIGKILL", "ray.kill"])
def test_a_killed_controller_comes_back_and_adopts_what_runs(service, how):
    import ray

    controller = service.status["controller"]["pid"]
    before = {name: one["node"]["pid"] for name, one in service.programs.items()}
    with ThreadPoolExecutor(4) as pool:
        streams = streams_of(service, pool, 4, 60, "controller")
        if how == "SIGKILL":
            os.kill(controller, signal.SIGKILL)
        else:
            ray.kill(ray.get_actor("controller", "kvferry"), no_restart=False)
        assert_exact(streams, 60)
    wait_until(lambda: is_ready_again(service), 20, "the controller")
    assert {name: one["node"]["pid"] for name, one in service.programs.items()} == before


def is_ready_again(service):
    try:
        programs = service.programs
    except Exception:
        return False
    return len(programs) == 5 and all(one["is_ready"] for one in programs.values())


def test_a_killed_router_is_found_where_it_was_and_workers_join_it_again(service):
    before = service.programs
    os.kill(before["router-1"]["node"]["pid"], signal.SIGKILL)
    wait_until(
        lambda: service.programs["router-1"]["num_starts"] > before["router-1"]["num_starts"], 20, "its next life"
    )
    wait_until(lambda: num_joined(service) == 4, 30, "the workers to join it")
    prompt = ids(200, "router")
    assert service.tokens(prompt, 6) == right(prompt, 6)
    after = service.programs
    for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
        assert (after[name]["node"]["pid"], after[name]["num_starts"]) == (
            before[name]["node"]["pid"],
            before[name]["num_starts"],
        )


def num_joined(service):
    """Workers of a router that can answer by now."""
    try:
        answer = service.http.get("/health/ready")
    except httpx.TransportError:
        return 0
    return len(answer.json()["workers"]) if answer.status_code == 200 else 0


def test_a_second_up_adopts_and_the_commands_say_what_runs(service, nodes, model_directory, tmp_path):
    at = f"--address={nodes.address}"
    before = {name: one["node"]["pid"] for name, one in service.programs.items()}
    file = tmp_path / "deployment.yaml"
    file.write_text(sim_plan(model_directory, grace_s=GRACE_S).model_dump_json())
    run = kvferry("up", "--on=ray", at, f"--deployment={file}")
    assert run.returncode == 0, run.stderr
    assert "kvferry is ready" in run.stdout
    found = json_of(kvferry("status", at, "--json"))
    assert {one["name"]: one["node"]["pid"] for one in found["programs"]} == before
    run = kvferry("up", "--on=ray", at, f"--deployment={file}", "--kv-tokens=20000")
    assert run.returncode == 2
    assert "settings.kv_tokens is 40000 there and 20000 here" in run.stderr.replace("\n", " ")
    assert json_of(kvferry("status", at, "--json"))["wanted"] == {"prefill": 2, "decode": 2}


def test_load_from_all_nodes_counts_every_stream(service, nodes):
    flags = ("--requests=12", "--concurrency=6", "--input-tokens=40", "--output-tokens=4")
    run = kvferry("bench", "load", "--on=ray", f"--address={nodes.address}", *flags, "--json")
    assert run.returncode == 0, run.stderr
    figures = {one["figure"]: one for one in map(json.loads, run.stdout.splitlines())}
    assert figures["succeeded"]["value"] == figures["ttft_p50"]["n"] == 12
    assert "from 4 node(s)" in run.stderr
    run = kvferry("bench", "load", "--on=ray", f"--address={nodes.address}", *flags, "--url=http://127.0.0.1:1")
    assert run.returncode == 2
    assert "nothing answers at http://127.0.0.1:1" in run.stderr.replace("\n", " ")


def shares_at_work():
    """Processes in which Ray runs a part of a load."""
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.cmdline()[:1] == ["ray::run_share"]:
                yield one


def test_a_part_of_the_load_whose_process_is_killed_has_failed_and_is_not_run_again(service):
    nodes, said = {node.node_id: node.name for node in cluster_nodes()}, []
    plan = LoadPlan(concurrency=len(nodes), requests=2 * len(nodes), input_tokens=40, output_tokens=20)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(asyncio.run, load_from_nodes([service.url], plan, nodes, said.append))
        wait_until(lambda: service.total("kvferry_requests", phase="decoding") >= len(nodes), 30, "all to stream")
        next(shares_at_work()).kill()
        report = coming.result(timeout=60)
    assert report.failures == {"share_lost": 2}
    assert len(report.succeeded) == 2 * (len(nodes) - 1)
    assert len(said) == 1
    assert "is lost" in said[0]
    service.wait_idle()


def test_what_the_cluster_cannot_hold_is_said_at_once_and_changes_nothing(service):
    began = time.monotonic()
    with pytest.raises(
        ConfigurationError, match=r"no node has room for decode-\d+: it needs 1 CPU, 1 slot on a node with disk=fast"
    ):
        service.do(service.client.scale(2, 40))
    assert time.monotonic() - began < 5
    assert service.status["wanted"] == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"gpus": 1}, "has 0 GPU left"),
        ({"labels": {"accelerator": "h100"}}, "has no label accelerator"),
        ({"labels": {"disk": "slow"}}, "label disk is 'fast'"),
        ({"cpus": 64}, "CPU left"),
    ],
)
def test_a_plan_that_fits_nowhere_says_what_is_missing_on_which_node(nodes, model_directory, pool, words):
    began = time.monotonic()
    with (
        pytest.raises(ConfigurationError, match=words) as caught,
        deployed(sim_plan(model_directory, prefill=pool), "never"),
    ):
        pass
    assert "192.0.2" in str(caught.value) or socket.gethostname() in str(caught.value)
    assert time.monotonic() - began < 10


def groups_of(namespace):
    """Room that is reserved for it, by name."""
    import ray

    prefix = f"kvferry/{namespace}/"
    found = [one for one in ray.util.placement_group_table().values() if one["name"].startswith(prefix)]
    return {one["name"].removeprefix(prefix) for one in found if one["state"] != "REMOVED"}


def test_two_that_want_the_same_room_in_the_same_moment_do_not_each_get_a_part_of_it(nodes, model_directory):
    """At the front there is room for one router and one worker more."""
    one = {"count": 1, "cpus": 1, "labels": {"door": "front"}}
    plan = sim_plan(model_directory, prefill={"count": 0}, decode=one)
    clients = {name: ClusterClient(name) for name in ("first", "second")}

    async def up(client):
        await client.find_or_start()
        began = time.monotonic()
        try:
            await client.up(plan)
        except ConfigurationError as error:
            assert time.monotonic() - began < 10
            return error.message
        return ""

    async def both():
        return dict(zip(clients, await asyncio.gather(*map(up, clients.values())), strict=True))

    said = asyncio.run(both())
    refused = [name for name, words in said.items() if words]
    assert refused
    assert all("no node has room for" in said[name] or "in the same moment" in said[name] for name in refused), said
    assert not any(groups_of(name) for name in refused)
    for name in clients.keys() - set(refused):
        assert groups_of(name) == {"router-1", "decode-1"}
        asyncio.run(clients[name].down())
        assert not groups_of(name)


def test_after_a_loss_that_leaves_too_little_what_fits_runs_the_rest_is_said_and_fewer_may_be_wanted(
    nodes, model_directory
):
    nodes.add_node(2, shelf="x")
    nodes.add_node(1, shelf="x")
    worker = {"count": 3, "cpus": 1, "labels": {"shelf": "x"}}
    with deployed(sim_plan(model_directory, prefill={"count": 0}, decode=worker), "shelf") as short:
        places = {name: place_of(short, name) for name in short.programs if name != "router-1"}
        victim = next(place for place in places.values() if list(places.values()).count(place) == 2)
        nodes.kill_node(victim)
        wait_for_programs(short, lambda there: num_without_room(there) == 2, 40, "two to have no room")
        (left,) = (name for name, one in short.programs.items() if one["is_ready"] and name != "router-1")
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(short.do, short.client.scale(None, 2))
            wait_until(lambda: scaled.done() or len(short.programs) == 3, 10, "one of them to go")
            assert not scaled.done(), scaled.result()
            assert num_without_room(short.programs) == 1
            assert short.programs[left]["is_ready"], "one that has no place goes, rather than one that serves"
            nodes.add_node(1, shelf="x")
            scaled.result(timeout=40)


def num_without_room(programs):
    return sum("no node has room for decode-" in one["reason"] for one in programs.values())


def test_a_model_that_is_not_on_a_node_is_named_with_the_node(nodes, tmp_path):
    began = time.monotonic()
    missing = tmp_path / "nowhere"
    with (
        pytest.raises(ConfigurationError, match="nowhere is not there") as caught,
        deployed(sim_plan(missing), "never"),
    ):
        pass
    assert socket.gethostname() in caught.value.message
    assert "begins again" not in caught.value.message, "it does not: `up` ends it"
    assert time.monotonic() - began < 20


def test_an_address_where_nothing_or_something_else_listens_is_said_in_bounded_time():
    run = kvferry("status", "--address=127.0.0.1:1")
    assert run.returncode == 2
    assert "no Ray at 127.0.0.1:1" in run.stderr
    assert kvferry("status", "--address=somewhere").returncode == 2
    run = kvferry("status", "--address=ray://127.0.0.1:1")
    assert run.returncode == 2
    assert "its port for Ray Clients (10001" in run.stderr.replace("\n", " ")


AFAR = """
import sys
from deploy.cluster.session import deployed
from deploy.command import notes, run_command

async def scale_role_drain():
    async with deployed(sys.argv[1], "afar", notes) as client:
        await client.scale(None, 2)
        await client.change_role("decode-2", "prefill")
        await client.drain("decode-2")
        await client.drain("decode-9")

run_command(scale_role_drain())
"""


def test_the_commands_work_from_a_machine_that_is_no_node(nodes, model_directory):
    """As Ray Clients: of the cluster they know an address alone. Three of them over one connection, as each takes long to make."""
    plan = sim_plan(model_directory, prefill={"count": 0}, decode={"count": 1})
    client, far = ClusterClient("afar"), nodes.client_address
    asyncio.run(client.find_or_start())
    asyncio.run(client.up(plan))
    run = subprocess.run(
        [sys.executable, "-c", AFAR, far], capture_output=True, text=True, timeout=120, check=False, env=with_token()
    )
    assert run.returncode == 2, run.stderr
    assert "no worker 'decode-9'; there are decode-1" in run.stderr
    assert "decode-2" in run.stderr.replace("decode-9", ""), "progress is shown"
    status = json_of(
        kvferry("status", "--namespace=afar", "--json", RAY_ADDRESS=far, RAY_AUTH_MODE=None, timeout_s=120)
    )
    assert status["wanted"] == {"prefill": 0, "decode": 1}
    assert [one["name"] for one in status["programs"]] == ["router-1", "decode-1"]
    assert kvferry("down", f"--address={far}", "--namespace=afar", timeout_s=120).returncode == 0
    assert not groups_of("afar")


def test_a_ray_client_that_is_turned_away_is_told_why_at_once(nodes):
    began = time.monotonic()
    run = kvferry("status", f"--address={nodes.client_address}", RAY_AUTH_TOKEN="another")
    assert run.returncode == 2
    assert "this user's token may not be the cluster's" in run.stderr.replace("\n", " ")
    run = kvferry("status", f"--address=ray://{nodes.address}")
    assert run.returncode == 2
    assert f"no Ray Client server at {nodes.address}" in run.stderr.replace("\n", " ")
    for command in (("up", "--on=ray"), ("bench", "load", "--on=ray")):
        run = kvferry(*command, f"--address={nodes.client_address}")
        assert run.returncode == 2
        assert "Run it on a node, with --address host:port" in run.stderr.replace("\n", " ")
    assert time.monotonic() - began < 20


@pytest.mark.soak  # Ray itself tries for 20 s
def test_ray_keeps_asking_for_its_token(nodes):
    run = kvferry("status", f"--address={nodes.address}", RAY_AUTH_MODE="disabled")
    assert run.returncode == 2
    assert "If the cluster wants a token, set RAY_AUTH_MODE=token" in run.stderr.replace("\n", " ")


CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
)


def test_what_listens_at_every_address_answers_nobody_without_the_token(service, nodes):
    """Ray's own processes, and the port that it opens in each actor."""
    answers = dict[str, set[str]]()
    programs = {one["node"]["pid"] for one in service.programs.values()}
    for process in psutil.Process().children(recursive=True):
        for listening in process.net_connections("inet") if process.is_running() else ():
            if listening.status == psutil.CONN_LISTEN and listening.laddr.ip in ("::", "0.0.0.0"):
                kind = "program" if process.pid in programs else process.name()
                answers.setdefault(kind, set()).update(answers_without_token(listening.laddr.port))
    assert "UNAUTHENTICATED" in answers["gcs_server"] & answers["raylet"] & answers["program"]
    assert "OK" not in set.union(*answers.values()), answers


def answers_without_token(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=2)
                yield "OK"
            except grpc.RpcError as error:
                yield error.code().name


@pytest.mark.parametrize("versions", [("1.0.0", "3.11.0"), ("", "3.9.1")], ids=["of Ray", "of Python"])
def test_another_version_is_said(nodes, versions):
    code = (
        "import ray, sys; from ray._private import utils; from deploy.cli import main;"
        f"utils.compute_version_info = lambda: ({versions[0]!r} or ray.__version__, {versions[1]!r});"
        f"sys.argv = ['kvferry', 'status', '--address={nodes.address}']; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=with_token()
    )
    assert run.returncode == 2, run.stderr
    assert "other versions than this environment" in run.stderr.replace("\n", " ")


def last_line(service, num_tokens):
    body = {"prompt": "once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with service.http.stream("POST", "/v1/completions", json=body) as response:
        return [line for line in response.iter_lines() if line and not line.endswith("[DONE]")][-1]


def test_down_ends_all_of_it_and_the_next_command_says_that_nothing_runs(nodes, model_directory):
    import ray

    plan = sim_plan(model_directory, prefill={"count": 0}, decode={"count": 1})
    with ThreadPoolExecutor(1) as pool, deployed(plan, "brief") as brief:
        assert brief.http.get("/health/ready").json()["status"] == "degraded"
        coming = pool.submit(last_line, brief, 500)
        wait_until(lambda: brief.total("kvferry_requests", phase="decoding") == 1, 10, "the stream")
    assert "the router is shutting down; try again" in coming.result()
    wait_until(
        lambda: not [one for one in ray.util.list_named_actors(True) if one["namespace"] == "brief"],
        5,
        "its actors to end",
    )
    assert not groups_of("brief")
    run = kvferry("status", f"--address={nodes.address}", "--namespace=brief")
    assert run.returncode == 2
    assert "no deployment in namespace brief" in run.stderr.replace("\n", " ")


class Foreign:
    """Somebody else's actor, in kvferry's namespace."""

    def __init__(self):
        self.num_drained = 0

    def drain(self):
        self.num_drained += 1
        return False

    def drained(self):
        return self.num_drained


def put(kind, name, *arguments):
    import ray

    options = {"name": name, "namespace": "shared", "lifetime": "detached", "num_cpus": 0}
    return ray.remote(kind).options(**options).remote(*arguments)


def names_in_shared():
    import ray

    return {one["name"] for one in ray.util.list_named_actors(True) if one["namespace"] == "shared"}


def test_actors_of_others_in_the_namespace_are_left_alone_and_lost_programs_are_ended(nodes, model_directory):
    import ray

    foreign = [put(Foreign, name) for name in ("mine", "decode-1", "prefill-7")]
    put(ProgramActor, "decode-9", "decode-9", "secret")
    client = ClusterClient("shared")
    try:
        asyncio.run(client.find_or_start())
        wait_until(lambda: "decode-9" not in names_in_shared(), 10, "the program that nobody wants to end")
        plan = sim_plan(model_directory, prefill={"count": 0}, decode={"count": 1})
        with pytest.raises(
            ConfigurationError, match="an actor 'decode-1' that is not kvferry's is in namespace shared"
        ):
            asyncio.run(client.up(plan))
        assert ray.get([one.drained.remote() for one in foreign]) == [0, 0, 0]
    finally:
        for one in foreign:
            ray.kill(one)


def test_a_checkout_that_is_sent_as_working_directory_is_what_runs(nodes, model_directory):
    """What `ray job submit --working-dir` sets for its driver; the rest of it needs Ray's dashboard."""
    job = {"runtime_env": {"working_dir": str(ROOT)}}
    at = (f"--address={nodes.address}", "--namespace=sent")
    flags = ("--engine=sim", "--port=0", "--prefill=0", f"--model={model_directory}")
    run = kvferry("up", "--on=ray", *at, *flags, RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(job))
    assert run.returncode == 0, run.stderr
    try:
        programs = json_of(kvferry("status", *at, "--json"))["programs"]
        assert len(programs) == 2
        assert all("working_dir_files" in one["node"]["code"] for one in programs)
    finally:
        kvferry("down", *at)


@pytest.fixture(scope="module")
def four_nodes(nodes):
    """At least so many have room for a worker."""
    nodes.add_node()


@pytest.mark.soak
@pytest.mark.parametrize("road", ["ray", "grpc"])
def test_bench_exact_passes_through_two_and_two_workers_on_different_nodes(
    four_nodes, model_directory, road, monkeypatch
):
    """With the real model, and its longest prompt is not as long."""
    monkeypatch.setattr(exact, "MAX_PROMPT_TOKENS", 200)
    settings = {"transport": road, "kv_tokens": 1024, "context_tokens": 512}
    with deployed(sim_plan(model_directory, settings=settings), f"exact-{road}") as real:
        places = {place_of(real, name) for name in ("prefill-1", "prefill-2", "decode-1", "decode-2")}
        assert len(places) == 4
        compared = exact.compare_with_reference(real.url, model_directory, 9, 8, True, True, notes, road)
        assert asyncio.run(compared), "token ids differ, or blocks came over another road"
        real.wait_idle()

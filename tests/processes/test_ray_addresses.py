"""A deployment on nodes with addresses of their own: TLS between all programs, routers on a node each, and one that moves."""

import contextlib
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from deploy.cluster.client import urls
from kvferry.errors import ConfigurationError, NoWorker
from tests.processes.ray_cluster import RayNodes, deployed, ids, place_of, right, sim_plan
from tests.processes.service import Service, wait_until

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.beside]

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
PORTS = {"port": 18400, "grpc_port": 18401, "registry_port": 18402}


@pytest.fixture(scope="module")
def nodes():
    """Three for routers, and one for all workers."""
    with RayNodes(num_nodes=0) as cluster:
        for address in ADDRESSES:
            cluster.add_node(4 if address == ADDRESSES[-1] else 1, address)
        yield cluster


@pytest.fixture
def tls(tmp_path):
    """One certificate for all of them: they are one machine's, and find it at one path."""
    key, certificate = tmp_path / "node.key", tmp_path / "node.crt"
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    names = ",".join(f"IP:{address}" for address in ADDRESSES)
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kvferry"
    subprocess.run(
        [*command.split(), f"-addext=subjectAltName={names}", f"-keyout={key}", f"-out={certificate}"],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return {"certificate": str(certificate), "key": str(key), "authority": str(certificate)}


def plan_with(model_directory, of_routers=(("count", 2),), **more):
    worker = {"count": 2, "cpus": 1, "labels": {"place": "n3"}}
    router = {"cpus": 0.5, "labels": {"place": "!n3", "disk": "fast"}, **PORTS, **dict(of_routers)}
    return sim_plan(model_directory, router=router, prefill=worker, decode=worker, **more)


def door_of(status, name):
    details = next(one["details"] for one in status["programs"] if one["name"] == name)
    return Service(SimpleNamespace(url=f"http://{details['http']}", grpc_address=details["grpc"], children={}))


def test_a_router_on_each_node_that_is_labelled_for_it_answers_at_the_same_ports(nodes, model_directory, tls):
    with deployed(plan_with(model_directory, [("each", True)], tls=tls), "each") as service:
        assert set(urls(service.status)) == {f"http://{address}:18400" for address in ADDRESSES[:3]}
        for name in ("router-1", "router-2", "router-3"):
            door = door_of(service.status, name)
            assert door.http.get("/health/ready").status_code == 200
            assert door.tokens(ids(100, name), 4) == right(ids(100, name), 4)


def test_routers_have_a_node_each_and_one_that_moves_to_another_disturbs_nobody_at_the_other(
    nodes, model_directory, tls
):
    with (
        pytest.raises(ConfigurationError, match=r"nodes on 5 addresses: .* needs TLS.*tls: {certificate"),
        deployed(plan_with(model_directory), "plain"),
    ):
        pass
    with deployed(plan_with(model_directory, tls=tls), "kvferry") as service:
        before = urls(service.status)
        assert len(set(before)) == 2
        assert all(url.endswith(":18400") for url in before)
        for name in ("router-1", "router-2"):
            prompt = ids(300, name)
            assert door_of(service.status, name).tokens(prompt, 4) == right(prompt, 4)
        other = door_of(service.status, "router-2")
        pids = {name: one["node"]["pid"] for name, one in service.programs.items() if name != "router-1"}
        with ThreadPoolExecutor(9) as pool:
            long = [(ids(50 + k, "long"), pool.submit(other.stream_tokens, ids(50 + k, "long"), 150)) for k in range(4)]
            wait_until(lambda: other.total("kvferry_requests", phase="decoding") >= 4, 20, "all to decode")
            nodes.kill_node(place_of(service, "router-1"))
            killed = time.monotonic()
            number = 0
            while not is_settled(service, before):
                assert time.monotonic() < killed + 60, service.programs
                number += 1
                prompts = [ids(40 + k, ("meanwhile", number, k)) for k in range(4)]
                for prompt, tokens in zip(prompts, pool.map(lambda one: other.tokens(one, 4), prompts), strict=True):
                    assert tokens == right(prompt, 4)
            for prompt, coming in long:
                assert coming.result() == right(prompt, 150)
        moved = door_of(service.status, "router-1")
        assert moved.url.endswith(":18400")
        assert moved.tokens(ids(300, "moved"), 4) == right(ids(300, "moved"), 4)
        assert {name: one["node"]["pid"] for name, one in service.programs.items() if name != "router-1"} == pids


def is_settled(service, before):
    """The router is elsewhere, and each worker has joined both; their controller may have been lost with the node."""
    with contextlib.suppress(NoWorker):
        status = service.status
        router = next(one for one in status["programs"] if one["name"] == "router-1")
        if not router["is_ready"] or f"http://{router['details']['http']}" in before:
            return False
        doors = [door_of(status, name) for name in ("router-1", "router-2")]
        return all(len(door.http.get("/health/ready").json()["workers"]) == 4 for door in doors)
    return False

"""A Ray cluster of several nodes on this machine, and deployments on it: what tests/processes/test_ray_cluster.py breaks."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from deploy.cluster.client import ClusterClient, urls
from deploy.cluster.plan import ClusterPlan, plan_of
from deploy.cluster.session import until_serving
from kvferry.engine.fake import fake_answer
from kvferry.errors import NoWorker
from kvferry.messages import Sampling
from tests.processes.service import Service, wait_until

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 49152
STORE_BYTES = 80 * 1024 * 1024
SIM = {"engine": "sim", "sim_shape": "llama-3.1-8b", "sim_accelerator": "l4", "kv_tokens": 40000}
"""Some 70 ms a step."""
QUICK_TO_SEE_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}


def ensure_token() -> None:
    """`Cluster` leaves authentication off unless it is asked for, as no other way to start a Ray does."""
    from ray._private.authentication import authentication_token_setup as setup

    setup.enable_token_auth_by_default()
    setup.ensure_token_if_auth_enabled(None, create_token_if_missing=True)


CLIENT_PORTS = range(21000, 22000)
"""None of those that Ray, or the kernel, gives to whatever else begins meanwhile."""


def free_port() -> int:
    for port in CLIENT_PORTS:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("all ports are taken")


class RayNodes:
    """Node processes of a cluster: `head` has the router's processor, each other has room for four workers.

    `is_driver`: this process is connected to it, and so ends with it. `has_clients`: Ray Clients are answered at `client_address`.
    `more`: of Ray's own configuration.
    """

    def __init__(self, num_nodes: int, is_driver: bool = True, has_clients: bool = False, **more: Any):
        import ray
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ensure_token()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        head: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        head["labels"] = {"door": "front"}
        if has_clients:
            head["ray_client_server_port"] = port = free_port()
            self.client_address = f"ray://127.0.0.1:{port}"
        self._cluster: Any = Cluster(True, head_node_args={**head, "_system_config": {**QUICK_TO_SEE_DEATH, **more}})
        self._num_added = 0
        for _ in range(num_nodes):
            self.add_node()
        self.address: str = self._cluster.address
        if is_driver:
            ray.init(address=self.address, namespace="kvferry", log_to_driver=False, logging_level="ERROR")

    def add_node(self, num_cpus: int = 4, address: str = "", **more_labels: str) -> None:
        """`address`: another one of this machine's than the head has."""
        labels = {"disk": "fast", "place": f"n{self._num_added}", **more_labels}
        self._num_added += 1
        more = {"node_ip_address": address} if address else {}
        self._cluster.add_node(
            num_cpus=num_cpus, object_store_memory=STORE_BYTES, labels=labels, resources={"slot": 4}, **more
        )

    def kill_node(self, node_id: str) -> None:
        """Its processes, with SIGKILL. Another one must be added for it."""
        import ray

        store = next(one["ObjectStoreSocketName"] for one in ray.nodes() if one["NodeID"] == node_id)
        node = next(one for one in self._cluster.worker_nodes if one.plasma_store_socket_name == store)
        self._cluster.remove_node(node, allow_graceful=False)

    @property
    def gcs(self) -> psutil.Process:
        return next(one for one in psutil.Process().children(recursive=True) if "gcs_server" in one.name())

    def kill_gcs(self) -> None:
        self._cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        """Where it was, without what it knew. It ends with the thread that calls this."""
        self._cluster.head_node.start_gcs_server()
        self._cluster.head_node.get_gcs_client()

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class ClusterService(Service):
    """A deployment's HTTP door, and its controller."""

    def __init__(self, client: ClusterClient, status: dict[str, Any]):
        router = next(one["details"] for one in status["programs"] if one["role"] == "router")
        super().__init__(SimpleNamespace(url=urls(status)[0], grpc_address=router["grpc"], children={}))  # type: ignore[arg-type]
        self.client = client

    def do(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    @property
    def status(self) -> dict[str, Any]:
        return self.do(self.client.status())

    @property
    def programs(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.status["programs"]}


def sim_plan(model: Path, transport: str = "grpc", **more: Any) -> ClusterPlan:
    fast = {"cpus": 1, "resources": {"slot": 1}, "labels": {"disk": "fast"}}
    content = {
        "model": str(model),
        "settings": {**SIM, "transport": transport},
        "router": {"cpus": 0.5, "labels": {"door": "front"}, "port": 0, "grpc_port": 0, "registry_port": 0},
        "prefill": {"count": 2, **fast},
        "decode": {"count": 2, **fast},
    }
    return plan_of({**content, **more})


@contextlib.contextmanager
def deployed(plan: ClusterPlan, namespace: str) -> Iterator[ClusterService]:
    """For as long as the body runs; this process is connected to the cluster already."""
    client = ClusterClient(namespace)

    async def up() -> dict[str, Any]:
        await client.find_or_start()
        status = await client.up(plan)
        await until_serving(status)
        return status

    service = ClusterService(client, asyncio.run(up()))
    try:
        yield service
    finally:
        asyncio.run(client.down())


@dataclass(frozen=True, slots=True)
class StoreUse:
    """Of the object stores of all nodes, as they say themselves."""

    num_objects: int
    used_mib: int
    spilled_mib: int


def store_use(address: str) -> StoreUse:
    from ray._private.internal_api import memory_summary

    said = memory_summary(address, stats_only=True)
    used = re.search(r"Plasma memory usage (\d+) MiB, (\d+) objects", said)
    assert used, said
    spilled = re.search(r"Spilled (\d+) MiB", said)
    return StoreUse(int(used[2]), int(used[1]), int(spilled[1]) if spilled else 0)


@dataclass(frozen=True, slots=True)
class ActorUse:
    num_files: int
    rss_mib: float


def actor_use(service: ClusterService) -> dict[str, ActorUse]:
    """Open files and memory of each program's actor."""
    found = {name: psutil.Process(one["node"]["pid"]) for name, one in service.programs.items()}
    return {name: ActorUse(one.num_fds(), one.memory_info().rss / 2**20) for name, one in found.items()}


def ask_many(service: Service, count: int, seed: object) -> None:
    """Sixteen at a time, of 60 to 360 tokens, each answered exactly; a tenth leave after the first token."""

    def ask(number: int) -> None:
        prompt = ids(60 + 50 * (number % 7), (seed, number))
        if number % 10 == 9:
            with service.streaming(prompt, 50) as events:
                next(iter(events))
        else:
            assert service.tokens(prompt, 4) == right(prompt, 4)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(count)))


def assert_at_rest(service: ClusterService, address: str, before: dict[str, ActorUse], more_mib: float) -> None:
    """Nothing is in the store, nothing was spilled, and actors have what they had, but for so much memory."""
    service.wait_idle()
    wait_until(lambda: store_use(address) == StoreUse(0, 0, 0), 5, "the stores to be empty")
    wait_until(
        lambda: all(one.num_files <= before[name].num_files + 2 for name, one in actor_use(service).items()),
        10,
        f"open files to be back at {before}, not {actor_use(service)}",
    )
    after = actor_use(service)
    assert all(after[name].rss_mib <= one.rss_mib + more_mib for name, one in before.items()), (before, after)


def wait_for_programs(
    service: ClusterService, is_so: Callable[[dict[str, dict[str, Any]]], bool], timeout_s: float, what: str
) -> None:
    """Their controller may be lost with a node, and come back."""

    def ask() -> bool:
        with contextlib.suppress(NoWorker):
            return is_so(service.programs)
        return False

    wait_until(ask, timeout_s, what)


def place_of(service: ClusterService, name: str) -> str:
    return service.programs[name]["node"]["node_id"]


def ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


def right(prompt: list[int], num_tokens: int) -> list[int]:
    """What simulated workers answer if no block was wrong."""
    return fake_answer(prompt, Sampling(0, num_tokens, 0.0), VOCABULARY)


def streams_of(service: Service, pool: Executor, count: int, num_tokens: int, seed: object) -> list[Any]:
    """That are running when this returns: prompts, and their tokens to come."""
    prompts = [ids(40 + 3 * k, (seed, k)) for k in range(count)]
    coming = [pool.submit(service.stream_tokens, prompt, num_tokens) for prompt in prompts]
    wait_until(lambda: service.total("kvferry_requests", phase="decoding") >= count * 0.9, 20, "all to decode")
    return list(zip(prompts, coming, strict=True))


def assert_exact(streams: list[Any], num_tokens: int) -> None:
    for prompt, coming in streams:
        assert coming.result() == right(prompt, num_tokens)


def kvferry(*arguments: str, timeout_s: float = 60, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The command, as a person calls it."""
    command = [sys.executable, "-m", "deploy", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT, env=with_token(**environment)
    )


def with_token(**more: str | None) -> dict[str, str]:
    """An environment in which Ray shows the user's token to a cluster that is named by its address. None: not set there."""
    values = {**os.environ, "RAY_AUTH_MODE": "token", **more}
    return {name: value for name, value in values.items() if value is not None}


def json_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)

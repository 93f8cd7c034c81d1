"""What the cluster's subcommands do: connect, call the controller, show how it goes."""

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator

import httpx
import psutil
from rich.console import Console

from deploy.cluster.client import LOST_PAUSE_S, ClusterClient, Status, urls
from deploy.cluster.connection import connect, import_ray, start_here
from deploy.cluster.console import Phases, SeatLines, cluster_banner, print_status
from deploy.cluster.nodes import cluster_nodes
from deploy.cluster.plan import KINDS, ClusterPlan
from kvferry.errors import ConfigurationError, LaterError
from loadtest.load import LoadPlan
from loadtest.report import LoadReport
from loadtest.spread_load import load_from_nodes

SERVING_TIMEOUT_S = 60.0
NAMESPACE = "kvferry"


async def cluster_up(plan: ClusterPlan, address: str, namespace: str, notes: Console) -> None:
    """On a cluster: until it is ready, and it stays. Without an address: on a Ray of this machine, until cancelled."""
    plan.check()
    phases = Phases()
    if address:
        await asyncio.to_thread(connect, address, namespace)
    else:
        await asyncio.to_thread(start_here, num_cpus_of(plan), namespace)
    phases.done("Ray")
    _hear_signals()
    ray = import_ray()
    try:
        at = address or "auto"
        client = ClusterClient(namespace, SeatLines(notes))
        await client.find_or_start()
        phases.done("controller")
        status = await client.up(plan)
        phases.done("programs")
        await until_serving(status)
        print(cluster_banner(status, phases, _ray_bytes(status) if not address else 0, at), flush=True)
        if not address:
            await _stay(client, notes)
    finally:
        await asyncio.to_thread(ray.shutdown)


def _hear_signals() -> None:
    """Ray puts a handler of its own in the place of SIGTERM's, which would end this process in disorder."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _stay(client: ClusterClient, notes: Console) -> None:
    """Until cancelled, or until somebody else has ended the deployment."""
    version, is_wanted = 0, True
    try:
        while True:
            try:
                status = await client.status(version)
                version, is_wanted = status["version"], status["is_wanted"]
            except LaterError:
                if not is_wanted:
                    break
                await asyncio.sleep(LOST_PAUSE_S)
    except asyncio.CancelledError:
        await asyncio.shield(client.down())
        raise
    notes.print("  ended by `kvferry down`")


@contextlib.asynccontextmanager
async def deployed(address: str, namespace: str, notes: Console) -> AsyncIterator[ClusterClient]:
    """The deployment that runs there. Raises ConfigurationError."""
    await asyncio.to_thread(connect, address or "auto", namespace)
    try:
        client = ClusterClient(namespace, SeatLines(notes))
        await client.find()
        yield client
    finally:
        await asyncio.to_thread(import_ray().shutdown)


async def show_status(address: str, namespace: str, notes: Console, as_json: bool) -> None:
    async with deployed(address, namespace, notes) as client:
        print_status(await client.status(), as_json)


async def load_on_cluster(load: LoadPlan, url: str | None, address: str, namespace: str, notes: Console) -> LoadReport:
    """From every node that is alive, to the deployment that runs there or to `url`. Raises ConfigurationError or NoWorker."""
    await asyncio.to_thread(connect, address or "auto", namespace)
    try:
        if url is None:
            client = ClusterClient(namespace)
            await client.find()
            url = urls(await client.status())[0]
        nodes = await asyncio.to_thread(cluster_nodes)
        notes.print(f"  load on {url} from {len(nodes)} node(s)")
        return await load_from_nodes(url.rstrip("/"), load, [node.node_id for node in nodes])
    finally:
        await asyncio.to_thread(import_ray().shutdown)


async def until_serving(status: Status) -> None:
    """Its routers can answer. Raises ConfigurationError."""
    for url in urls(status):
        try:
            async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(SERVING_TIMEOUT_S):
                while (await client.get(f"{url}/health/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
        except (TimeoutError, httpx.TransportError) as error:
            raise ConfigurationError(f"the router at {url} does not become ready, seen from here: {error!r}") from error


def num_cpus_of(plan: ClusterPlan) -> int:
    """That a Ray must have for all of it."""
    pools = [plan.pool(role) for role in KINDS]
    return max(math.ceil(sum(pool.count * pool.cpus for pool in pools)), 1)


def _ray_bytes(status: Status) -> float:
    """Private bytes of the processes that a Ray on this machine has for itself."""
    ours = {one["node"]["pid"] for one in status["programs"]} | {status["controller"]["pid"]}
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        if child.pid not in ours:
            with contextlib.suppress(psutil.Error):
                total += child.memory_full_info().uss
    return total

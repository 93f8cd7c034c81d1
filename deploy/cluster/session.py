"""What the cluster's subcommands do: connect, call the controller, show how it goes."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import httpx
import psutil
from rich.console import Console

from deploy.cluster.client import LOST_PAUSE_S, ClusterClient, Status, urls
from deploy.cluster.connection import connect, import_ray, ray_here, restore_signals
from deploy.cluster.console import Phases, SeatLines, cluster_banner, print_status
from deploy.cluster.nodes import cluster_nodes
from deploy.cluster.plan import KINDS, ClusterPlan
from deploy.cluster.tokens import check_wants_token
from deploy.local import num_cores
from kvferry.errors import ConfigurationError, LaterError, NoWorker
from loadtest.load import LoadPlan
from loadtest.report import LoadReport
from loadtest.spread_load import load_from_nodes

SERVING_TIMEOUT_S = 60.0
NAMESPACE = "kvferry"


async def cluster_up(plan: ClusterPlan, address: str, namespace: str, notes: Console, may_be_open: bool) -> None:
    """On a cluster: until it is ready, and it stays. Without an address: on a Ray of this machine, until cancelled.

    `may_be_open`: also if that Ray wants no token.
    """
    plan.check()
    phases = Phases()
    ray_for_it = (
        _connected(address, namespace, needs_node=True) if address else ray_here(num_cpus_here(plan), namespace)
    )
    async with ray_for_it:
        if not may_be_open:
            await asyncio.to_thread(check_wants_token, import_ray().get_runtime_context().gcs_address)
        phases.done("Ray")
        client = ClusterClient(namespace, SeatLines(notes))
        await client.find_or_start()
        phases.done("controller")
        status = await client.up(plan)
        phases.done("programs")
        await until_serving(status)
        ray_bytes = 0 if address else _ray_bytes(status)
        print(cluster_banner(status, phases, ray_bytes, address or "auto"), flush=True)
        if not address:
            await _stay(client, notes)


@contextlib.asynccontextmanager
async def _connected(address: str, namespace: str, needs_node: bool) -> AsyncIterator[None]:
    """To a cluster that is there. Raises ConfigurationError."""
    await asyncio.to_thread(connect, address or "auto", namespace, needs_node)
    restore_signals()
    try:
        yield
    finally:
        await asyncio.to_thread(import_ray().shutdown)


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
    """The deployment that runs there, also seen from a machine that is no node of that cluster. Raises ConfigurationError."""
    async with _connected(address, namespace, needs_node=False):
        client = ClusterClient(namespace, SeatLines(notes))
        await client.find()
        yield client


async def show_status(address: str, namespace: str, notes: Console, as_json: bool) -> None:
    async with deployed(address, namespace, notes) as client:
        print_status(await client.status(), as_json)


async def load_on_cluster(load: LoadPlan, url: str | None, address: str, namespace: str, notes: Console) -> LoadReport:
    """From every node that is alive, to all routers that listen there or to `url`. Raises ConfigurationError or NoWorker."""
    async with _connected(address, namespace, needs_node=True):
        loaded = [url.rstrip("/")] if url else await _urls_there(namespace)
        nodes = {node.node_id: node.name for node in await asyncio.to_thread(cluster_nodes)}
        notes.print(f"  load on {', '.join(loaded)} from {len(nodes)} node(s)")
        return await load_from_nodes(loaded, load, nodes, lambda words: notes.print(f"  {words}", soft_wrap=True))


async def _urls_there(namespace: str) -> list[str]:
    """Of all routers that listen. Raises NoWorker."""
    client = ClusterClient(namespace)
    await client.find()
    found = urls(await client.status())
    if not found:
        raise NoWorker(
            "no router listens: it begins, or begins again; try again once `kvferry status` says that it does"
        )
    return found


async def until_serving(status: Status) -> None:
    """Its routers can answer. Raises ConfigurationError."""
    for url in urls(status):
        try:
            async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(SERVING_TIMEOUT_S):
                while (await client.get(f"{url}/health/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
        except (TimeoutError, httpx.TransportError) as error:
            raise ConfigurationError(
                f"the router at {url} does not become ready, seen from here: {error!r}. On a cluster the deployment stays: "
                "`kvferry status` shows it, `kvferry down` ends it"
            ) from error


def num_cpus_here(plan: ClusterPlan) -> int:
    """Of a Ray of this machine: its cores, so that `scale` finds room, and enough for the plan where it has fewer."""
    pools = [plan.pool(role) for role in KINDS]
    return max(math.ceil(sum(pool.count * pool.cpus for pool in pools)), num_cores())


def _ray_bytes(status: Status) -> float:
    """Private bytes of the processes that a Ray on this machine has for itself."""
    ours = {one["node"]["pid"] for one in status["programs"]} | {status["controller"]["pid"]}
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        if child.pid not in ours:
            with contextlib.suppress(psutil.Error):
                total += child.memory_full_info().uss
    return total

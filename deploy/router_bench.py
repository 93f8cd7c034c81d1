"""The parts of `kvferry bench router`: what each starts, and which measurement of loadtest/ it is handed to.

Workers are simulated ones: their steps take an accelerator's time and hardly any of this machine's, so that the router is what is
measured. Still, workers, clients and peers share the machine with it.
"""

import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deploy.local import LocalDeployment, LocalPlan
from kvferry.engine.sim import accelerator_called, costs_of
from kvferry.errors import ConfigurationError
from kvferry.shape import read_shape
from loadtest import overload, router_contest
from loadtest.overload import Slo
from loadtest.own_process import said_by
from loadtest.router_contest import DIRECT, OURS, Contestant, Reading
from loadtest.router_figures import RouterFigure
from loadtest.router_peers import peer_routers, running, stub_workers


@dataclass(frozen=True, slots=True)
class RouterBench:
    """What to measure; `peers` is a directory as loadtest/router_peers.py wants it."""

    model: Path
    peers: Path | None = None
    num_decode: int = 1
    num_rounds: int = 3
    overload_s: float = 60.0
    index_blocks: int = 10_000_000
    announce_every: int = 8


@dataclass(frozen=True, slots=True)
class Simulated:
    """Workers whose steps are of about the length that a part wants."""

    shape: str
    accelerator: str
    max_sequences: int
    kv_tokens: int

    @property
    def step_s(self) -> float:
        """Of one sequence with little context."""
        accelerator, costs = accelerator_called(self.accelerator), costs_of(read_shape(self.shape))
        weights = (costs.num_projection_weights + costs.num_output_weights) * costs.bytes_per_weight
        return weights / accelerator.reached.bytes_per_s + accelerator.step_s

    def plan(self, model: Path, num_decode: int, router_flags: Sequence[str] = ()) -> LocalPlan:
        extra = {"decode": [f"--max-sequences={self.max_sequences}"], "router": [*router_flags]}
        return LocalPlan(
            model,
            0,
            num_decode,
            kv_tokens=self.kv_tokens,
            engine="sim",
            sim_shape=self.shape,
            sim_accelerator=self.accelerator,
            extra=extra,
        )


SHORT_STEPS = Simulated("smollm2-135m", "h200", 128, 200_000)
"""Under a millisecond, and more sequences than streams: the worker is never what is waited for."""
LONG_STEPS = Simulated("llama-3.1-8b", "a100", 16, 50_000)
"""About eleven milliseconds: five times what two of them can do is what this machine can ask for."""
NUM_OVERLOADED = 2


async def measure_streams(bench: RouterBench, notes: Console) -> list[RouterFigure]:
    """Ours, and the peers in turn with it."""
    peers = [] if bench.peers is None else peer_routers(bench.peers)
    readings: list[Reading] = []
    async with contextlib.AsyncExitStack() as stack:
        plan = SHORT_STEPS.plan(bench.model, bench.num_decode)
        deployment = await stack.enter_async_context(LocalDeployment(plan).running())
        contestants = [Contestant(OURS, deployment.url, deployment.children["router"].details["model"])]
        if peers:
            urls = await stack.enter_async_context(stub_workers(bench.num_decode, SHORT_STEPS.step_s))
            contestants.append(Contestant(DIRECT, urls[0], "stub"))
            for peer in peers:
                url = await stack.enter_async_context(running(peer, urls))
                contestants.append(Contestant(peer.name, url, "stub"))
        address, secret_file = deployment.children["decode-1"].details["address"], str(deployment.folder / "secret")
        async for reading in router_contest.read_in_turn(contestants, bench.num_rounds, address, secret_file):
            notes.print(f"  {reading.contestant}: {reading.told}")
            readings.append(reading)
    return router_contest.figures_of(router_contest.standings_of(readings))


async def measure_placement(bench: RouterBench, notes: Console) -> list[RouterFigure]:
    """In a fresh process. Raises KvferryError with its last words if it fails."""
    notes.print(f"  an index of {bench.index_blocks:,} blocks, one in {bench.announce_every} announced")
    said = await said_by("deploy.placement_adapter", str(bench.index_blocks), str(bench.announce_every))
    return [RouterFigure(**figure) for figure in json.loads(said)]


async def measure_overload(bench: RouterBench, notes: Console) -> list[RouterFigure]:
    notes.print(f"  best goodput, then {overload.TIMES_CAPACITY:g} times as many requests for {bench.overload_s:g} s")
    slo = Slo()
    flags = (f"--slo-ttft-ms={slo.ttft_s * 1e3:g}", f"--slo-tpot-ms={slo.tpot_s * 1e3:g}")
    plan = LONG_STEPS.plan(bench.model, NUM_OVERLOADED, flags)
    async with LocalDeployment(plan).running() as deployment:
        router = deployment.children["router"]
        num_slots = NUM_OVERLOADED * LONG_STEPS.max_sequences
        ordeal = await overload.undergo(
            deployment.url, router.details["model"], router.pid, num_slots, bench.overload_s, slo
        )
    return overload.figures_of(ordeal)


Part = Callable[[RouterBench, Console], Awaitable[list[RouterFigure]]]

PARTS: dict[str, Part] = {"streams": measure_streams, "placement": measure_placement, "overload": measure_overload}


def parts_called(names: Sequence[str]) -> dict[str, Part]:
    """All, if none is named. Raises ConfigurationError."""
    for name in names:
        if name not in PARTS:
            raise ConfigurationError(f"part {name!r} is not known; known: {', '.join(PARTS)}")
    return {name: part for name, part in PARTS.items() if not names or name in names}

"""`kvferry bench pd`, real part: one prefill and one decode worker against one pool, on the cores of this machine, over HTTP.

All layouts stand ready at once and are asked in turn, rate by rate, so that they meet the machine in the same state: whoever is not
asked only beats. Nobody is bound to a core; router and client share the cores with the workers. What a transfer took is read from the
prefill worker's debug log.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from deploy.deployments import deployment_of
from deploy.local import LocalDeployment, LocalPlan
from kvferry.worker.step_line import step_in
from loadtest.capacity import PER_WORKER, capacity_of
from loadtest.goodput import GoodputReport
from loadtest.open_loop import Sent, drive_http
from loadtest.transfer import transfer_s
from loadtest.trial import Layout, Measured, Trial

LAYOUTS = (
    Layout("1 prefill + 1 decode", 1, 1),
    Layout("one pool of 2", 0, 2),
    Layout("one pool of 1, all threads", 0, 1),
)
KV_TOKENS = 30_000
NUM_WARM = 8
"""Requests that are not measured: connections, first steps, budgets that are learnt from steps."""


@dataclass(frozen=True, slots=True)
class RealPlan:
    model: Path
    trial: Trial
    weights: str = "float16"
    itl_target_ms: float | None = None
    """Of the decode workers, in every layout; None: the service's own."""
    layouts: tuple[Layout, ...] = LAYOUTS


async def measure_real(plan: RealPlan, notes: Console) -> AsyncIterator[Measured]:
    """Rate by rate, layout by layout. Raises ConfigurationError."""
    trial = plan.trial
    async with contextlib.AsyncExitStack() as stack:
        deployments: dict[Layout, LocalDeployment] = {}
        for layout in plan.layouts:
            notes.print(f"  starting {layout.name}")
            deployments[layout] = await stack.enter_async_context(deployment_of(_local_plan(plan, layout)).running())
        for deployment in deployments.values():
            await drive_http(deployment.url, trial.burst(NUM_WARM), "warm")
        if trial.loads:
            found = [await _capacity(trial, layout, one, notes) for layout, one in deployments.items()]
            trial = trial.at_capacity(min(found))
        arrivals = {rate: trial.arrivals(rate) for rate in trial.rates}
        for rate in trial.rates:
            for layout, deployment in deployments.items():
                notes.print(f"  {layout.name}: {rate:g} requests/s for {trial.seconds:g} s")
                began = time.perf_counter()
                sent = await drive_http(deployment.url, arrivals[rate], f"rate {rate}", trial.max_outstanding)
                report = GoodputReport(_with_transfers(sent, deployment), trial.seconds, trial.slo)
                yield Measured("real", layout, rate, report, time.perf_counter() - began, trial.load_at(rate))


async def _capacity(trial: Trial, layout: Layout, deployment: LocalDeployment, notes: Console) -> float:
    burst = trial.burst(PER_WORKER * layout.num_workers)
    capacity = capacity_of(await drive_http(deployment.url, burst, "capacity", len(burst)))
    notes.print(f"  {layout.name}: {capacity:.3g} requests/s at most")
    return capacity


def _local_plan(plan: RealPlan, layout: Layout) -> LocalPlan:
    decode = [] if plan.itl_target_ms is None else [f"--itl-target-ms={plan.itl_target_ms:g}"]
    extra = {"decode": decode, "prefill": ["--log-level=debug"]}
    return LocalPlan(
        plan.model, layout.num_prefill, layout.num_decode, kv_tokens=KV_TOKENS, weights=plan.weights, extra=extra
    )


def _with_transfers(sent: tuple[Sent, ...], deployment: LocalDeployment) -> tuple[Sent, ...]:
    ends_s = {child.name: _step_ends(deployment.folder / f"{child.name}.log") for child in deployment.of("prefill")}
    return tuple(replace(one, transfer_s=transfer_s(one.record, ends_s)) for one in sent)


def _step_ends(log: Path) -> list[float]:
    """Both the steps' clock and the client's are the host's monotonic one."""
    steps = (step_in(line) for line in log.read_text(errors="replace").splitlines())
    return sorted(step.planned_s + step.duration_s for step in steps if step is not None)

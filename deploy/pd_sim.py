"""`kvferry bench pd`, simulated part: a rack of accelerators as two pools against as many of one, in virtual time (deploy/fleet.py).

What it tells of is policy: placement, budgets, queues, transfers over links of the rack's speed. Not of kernels, nor of Python's own
time, which does not pass in it. It costs this machine some 30 ms a request, whatever the rate.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from deploy.fleet import FleetPlan, fleet
from kvferry.engine.sim import accelerator_called, sim_worker
from kvferry.errors import ConfigurationError
from kvferry.shape import read_shape
from loadtest.arrivals import Arrival, prompt_of
from loadtest.capacity import PER_WORKER, capacity_of
from loadtest.goodput import GoodputReport
from loadtest.open_loop import Sent, drive
from loadtest.stream import StreamRecord
from loadtest.transfer import transfer_s
from loadtest.trial import Layout, Measured, Trial
from loadtest.virtual_time import run_virtual

LIMIT_S = 600.0
"""Of virtual time at one rate: more is a hang."""


@dataclass(frozen=True, slots=True)
class SimPlan:
    trial: Trial
    shape: str = "qwen2.5-7b"
    accelerator: str = "h200"
    num_workers: int = 32
    itl_target_s: float | None = None
    """Of the decode workers, in both layouts; None: the objective for TPOT."""

    def check(self) -> None:
        """Before minutes of measuring. Raises ConfigurationError."""
        self.trial.check()
        self._half()
        sim_worker(read_shape(self.shape), accelerator_called(self.accelerator), kv_tokens=1)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        half = self._half()
        two, one = Layout(f"{half} prefill + {half} decode", half, half), Layout(f"one pool of {2 * half}", 0, 2 * half)
        return two, one

    def _half(self) -> int:
        half, odd = divmod(self.num_workers, 2)
        if odd or half < 1:
            raise ConfigurationError(f"--sim-workers {self.num_workers}: two equal pools need an even number")
        return half

    def fleet_plan(self, layout: Layout) -> FleetPlan:
        itl_target_s = self.trial.slo.tpot_s if self.itl_target_s is None else self.itl_target_s
        return FleetPlan(layout.num_prefill, layout.num_decode, self.shape, self.accelerator, itl_target_s=itl_target_s)


def measure_sim(plan: SimPlan, notes: Console) -> Iterator[Measured]:
    """Rate by rate, layout by layout. Raises ConfigurationError. Not to be called from a running event loop."""
    trial = plan.trial
    if trial.loads:
        trial = trial.at_capacity(min(_capacity(plan, layout, notes) for layout in plan.layouts))
    for rate in trial.rates:
        arrivals = trial.arrivals(rate)
        for layout in plan.layouts:
            notes.print(f"  {layout.name}: {rate:g} requests/s for {trial.seconds:g} s of virtual time")
            began = time.perf_counter()
            sent = simulate(plan.fleet_plan(layout), arrivals, f"rate {rate}")
            took_s = time.perf_counter() - began
            yield Measured(
                "sim", layout, rate, GoodputReport(sent, trial.seconds, trial.slo), took_s, trial.load_at(rate)
            )


def _capacity(plan: SimPlan, layout: Layout, notes: Console) -> float:
    sent = simulate(plan.fleet_plan(layout), plan.trial.burst(PER_WORKER * layout.num_workers), "capacity")
    capacity = capacity_of(sent)
    notes.print(f"  {layout.name}: {capacity:.3g} requests/s at most")
    return capacity


def simulate(plan: FleetPlan, arrivals: tuple[Arrival, ...], run: object) -> tuple[Sent, ...]:
    """All of them are in flight if need be: the client of a simulation costs nothing."""

    async def main() -> tuple[Sent, ...]:
        async with fleet(plan) as made:

            async def ask(arrival: Arrival) -> StreamRecord:
                return await made.ask(prompt_of(arrival, run), arrival.num_output)

            sent = await drive(arrivals, ask, max_outstanding=len(arrivals))
            return tuple(replace(one, transfer_s=transfer_s(one.record, made.step_ends_s)) for one in sent)

    return run_virtual(main, LIMIT_S)

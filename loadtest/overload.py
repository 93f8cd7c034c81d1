"""Overload: the most that a service finishes within its SLO, then five times as many requests, then whether it is well again.

An open loop: arrivals do not wait for answers. *Goodput* is requests a second that finish within the SLO, counted between the first
second and the last arrival. Needs a service's URL and its router's process id; what kind of service it is, it does not know.
"""

import asyncio
import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from kvferry.errors import KvferryError
from loadtest.raw_load import LoadOrder, run_load
from loadtest.raw_stream import LOST, RawAnswer, completion_request, open_connection
from loadtest.report import percentile
from loadtest.router_figures import (
    MAX_BROKEN,
    MAX_RECOVERY_S,
    MAX_REFUSAL_MS,
    MAX_RSS_RATIO,
    MIN_GOODPUT_SHARE,
    NORMAL_TTFT,
    RouterFigure,
)

TIMES_CAPACITY = 5.0
REFUSED = (429, 503)
LEVEL_SHARES, LEVEL_S = (0.75, 1.0, 1.5), 5.0
"""Closed loops with so many streams for each that the service runs at once, each for about so long."""
RAMP_S = 1.0
NUM_IDLE, PROBE_PAUSE_S, PROBE_WINDOW, PROBING_S = 30, 0.05, 5, 15.0
RSS_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def is_met(self, answer: RawAnswer) -> bool:
        is_finished = answer.status == 200 and answer.is_whole
        return is_finished and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Ordeal:
    """`answers` of the overload; `rss_bytes` of the router meanwhile, in order; probes go on after the last arrival."""

    best_goodput: float
    slo: Slo
    idle_ttft_s: float
    answers: list[RawAnswer]
    rss_bytes: list[int]
    probes: list[RawAnswer]


async def undergo(url: str, model: str, router_pid: int, num_slots: int, seconds: float, slo: Slo) -> Ordeal:
    """`num_slots`: requests that the service runs at once. Raises KvferryError if it does not work even without overload."""
    idle = await run_load(LoadOrder(url, model, 1, NUM_IDLE))
    if not all(slo.is_met(answer) for answer in idle):
        raise KvferryError(f"a lone request misses the SLO: {idle[0]}")
    request_s = statistics.median(answer.ended_s - answer.sent_s for answer in idle)
    best = 0.0
    for share in LEVEL_SHARES:
        num_rounds = math.ceil((LEVEL_S + 2 * RAMP_S) / (request_s * max(share, 1.0)))
        order = LoadOrder(url, model, max(round(num_slots * share), 1), num_rounds, seed=round(share * 100))
        best = max(best, goodput(await run_load(order), slo))
    rss_bytes: list[int] = []
    async with asyncio.TaskGroup() as group:
        order = LoadOrder(url, model, rate_per_s=TIMES_CAPACITY * best, duration_s=seconds, seed=1)
        loading = group.create_task(run_load(order))
        watching = group.create_task(_watch(router_pid, rss_bytes))
        await asyncio.sleep(seconds)
        probes = await _probe(url, model)
        answers = await loading
        watching.cancel()
    idle_ttft_s = statistics.median(answer.ttft_s for answer in idle)
    return Ordeal(best, slo, idle_ttft_s, answers, rss_bytes, probes)


async def _watch(pid: int, rss_bytes: list[int]) -> None:
    process = psutil.Process(pid)
    while True:
        rss_bytes.append(process.memory_info().rss)
        await asyncio.sleep(RSS_INTERVAL_S)


async def _probe(url: str, model: str) -> list[RawAnswer]:
    """One short request after the other: what a newcomer meets."""
    probes: list[RawAnswer] = []
    connection = await open_connection(url)
    with contextlib.suppress(TimeoutError):  # the last may be one that waits longer than it is waited for
        async with asyncio.timeout(PROBING_S):
            while True:
                if not connection.is_open:
                    connection = await open_connection(url)
                probes.append(await connection.ask(completion_request(model, f"probe {len(probes)}", 1)))
                await asyncio.sleep(PROBE_PAUSE_S)
    connection.close()
    return probes


# ------------------------------------------------------------------------------------------------------------- figures


def goodput(answers: Sequence[RawAnswer], slo: Slo) -> float:
    """Requests a second, of those that end while others still arrive."""
    begins_s = min(answer.sent_s for answer in answers) + RAMP_S
    ends_s = max(answer.sent_s for answer in answers)
    if ends_s <= begins_s:
        raise KvferryError(
            f"a load of {ends_s - begins_s + RAMP_S:.1f} s is too short: it must last longer than {RAMP_S:g} s"
        )
    good = sum(begins_s <= answer.ended_s <= ends_s for answer in answers if slo.is_met(answer))
    return good / (ends_s - begins_s)


def recovery_s(probes: Sequence[RawAnswer], last_arrival_s: float, at_most_ttft_s: float) -> float:
    """From the last arrival to the first of some probes in a row whose median is normal; infinite if there are none."""
    after = [probe for probe in probes if probe.sent_s >= last_arrival_s]
    for first in range(len(after) - PROBE_WINDOW + 1):
        window = after[first : first + PROBE_WINDOW]
        is_normal = statistics.median(probe.ttft_s for probe in window) <= at_most_ttft_s
        if is_normal and all(probe.status == 200 and probe.is_whole for probe in window):
            return window[0].sent_s - last_arrival_s
    return math.inf


def figures_of(ordeal: Ordeal) -> list[RouterFigure]:
    answers, slo = ordeal.answers, ordeal.slo
    refusals_ms = [(answer.ended_s - answer.sent_s) * 1e3 for answer in answers if answer.status in REFUSED]
    num_late = sum(answer.is_whole and not slo.is_met(answer) for answer in answers)
    broken = Counter(answer.status for answer in answers if answer.status not in REFUSED and not answer.is_whole)
    good, half = goodput(answers, slo), len(ordeal.rss_bytes) // 2
    early, late = max(ordeal.rss_bytes[:half]), max(ordeal.rss_bytes[half:])
    offered = f"{len(answers)} requests offered at {TIMES_CAPACITY:g} times {ordeal.best_goodput:.1f}/s"
    limits = f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms"
    last_arrival_s = max(answer.sent_s for answer in answers)
    back_s = recovery_s(ordeal.probes, last_arrival_s, NORMAL_TTFT * ordeal.idle_ttft_s)
    normal = f"to {NORMAL_TTFT:g} times the idle TTFT of {ordeal.idle_ttft_s * 1e3:.1f} ms"
    memory = f"second half of the time to the first; {late / 2**20:.0f} MiB at most"
    refused = f"of {len(refusals_ms)} refusals"
    ends = f"neither finished nor refused; by status ({LOST} is a lost connection): {dict(broken)}"
    return [
        RouterFigure("best_goodput", ordeal.best_goodput, "requests/s", note=f"closed loop; {limits}"),
        RouterFigure("overload_goodput", good, "requests/s", note=f"{offered}; {num_late} finished too late"),
        RouterFigure("goodput_share", good / max(ordeal.best_goodput, 1e-9), "times", at_least=MIN_GOODPUT_SHARE),
        RouterFigure("refusal_p99", percentile(refusals_ms, 99), "ms", at_most=MAX_REFUSAL_MS, note=refused)
        if refusals_ms
        else RouterFigure("refusal_p99", math.inf, "ms", at_most=MAX_REFUSAL_MS, note="nothing was refused"),
        RouterFigure("broken", broken.total(), "requests", at_most=MAX_BROKEN, note=ends),
        RouterFigure("rss_ratio", late / early, "times", at_most=MAX_RSS_RATIO, note=memory),
        RouterFigure("recovery", back_s, "s", at_most=MAX_RECOVERY_S, note=normal),
    ]

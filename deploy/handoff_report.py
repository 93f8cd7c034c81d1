"""`kvferry bench hand-off`: what of the hand-off a request still waits for, and what receiving costs those that stream meanwhile.

A real deployment of one prefill and one decode worker, asked over HTTP; the instants of steps come from the workers' debug logs, whose
clock is the host's. The decode worker has a core to itself where there are two. Let nothing else run.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from deploy.local import LocalDeployment, LocalPlan
from kvferry.errors import ConfigurationError
from kvferry.messages import FetchEnd, FetchOpen
from kvferry.rpc.links import GrpcDialer
from kvferry.worker.step_line import StepLine, step_in
from loadtest.report import percentile

LENGTHS = (1024, 4096)
NUM_ROUNDS = 3
NUM_STREAMS = 8
STREAM_TOKENS, QUIET_S, PHASE_S, TAIL_PROMPT = 1200, 2.0, 6.0, 16 * 10
MAX_EXPOSED = {"shm": 0.03, "grpc": 0.08}
MAX_TAIL, MAX_ITL = 1.5, 1.10
KV_TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class HandOffFigure:
    name: str
    value: float
    limit: float | None
    note: str

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit


async def print_handoff_figures(model: Path, transports: list[str], as_json: bool, notes: Console) -> None:
    """Raises ConfigurationError."""
    table = Table("road", "figure", "value", "at most", "of what")
    unknown = [name for name in transports if name not in MAX_EXPOSED]
    if unknown:
        raise ConfigurationError(f"transport: {unknown[0]!r} is not measured here; {' and '.join(MAX_EXPOSED)} are")
    for transport in transports or list(MAX_EXPOSED):
        notes.print(f"measuring {transport}")
        async for figure in _measure(model, transport):
            if as_json:
                common = {"figure": figure.name, "value": round(figure.value, 4), "unit": "ratio", "road": transport}
                print(
                    json.dumps({**common, "target": figure.limit, "holds": figure.holds, "note": figure.note}),
                    flush=True,
                )
            else:
                limit = "" if figure.limit is None else f"{figure.limit:.2f}"
                table.add_row(transport, figure.name, f"{figure.value:.3f}", limit, figure.note)
    if not as_json:
        Console(highlight=False, width=max(Console().width, 120)).print(table)


async def _measure(model: Path, transport: str) -> AsyncIterator[HandOffFigure]:
    extra = {role: ["--log-level=debug"] for role in ("prefill", "decode")}
    plan = LocalPlan(model, kv_tokens=KV_TOKENS, weights="float16", transport=transport, extra=extra)
    cores = os.sched_getaffinity(0)
    async with (
        LocalDeployment(plan).running() as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=600, trust_env=False) as client,
    ):
        _give_decode_a_core(deployment)
        await _complete(client, _ids(64, "first"), 2)
        for length in LENGTHS:
            exposed = [await _exposed(deployment, client, length, k, transport) for k in range(NUM_ROUNDS)]
            share = statistics.median(gap / ttft for gap, ttft in exposed)
            gap_ms = statistics.median(gap for gap, _ in exposed) * 1e3
            ttft_ms = statistics.median(ttft for _, ttft in exposed) * 1e3
            note = f"{gap_ms:.1f} ms from the last prefill step to the tail's plan, of {ttft_ms:.0f} ms TTFT"
            yield HandOffFigure(f"exposed_{length}", share, MAX_EXPOSED.get(transport), note)
        async for figure in _beside_streams(deployment, client):
            yield figure
    os.sched_setaffinity(0, cores)


async def _exposed(
    deployment: LocalDeployment, client: httpx.AsyncClient, length: int, number: int, transport: str
) -> tuple[float, float]:
    """Seconds from the end of the last prefill step to the plan of the tail's step, and to the first token."""
    prompt = _ids(length, (transport, length, number))
    began = time.monotonic()
    answer, ttft_s = await _stream(client, prompt, 2)
    assert answer["source_worker"] == "prefill-1", answer
    await asyncio.sleep(0.3)
    last = max(s.planned_s + s.duration_s for s in _steps(deployment, "prefill-1") if s.planned_s >= began)
    tail = min(s.planned_s for s in _steps(deployment, "decode-1") if s.planned_s >= last)
    return tail - last, ttft_s


async def _beside_streams(deployment: LocalDeployment, client: httpx.AsyncClient) -> AsyncIterator[HandOffFigure]:
    """Eight streams decode: beside a prefill worker that ships nothing, while its blocks arrive, while tails do; alone in between.

    Their contexts grow, so each is compared with the quiet before and after it.
    """
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(_complete(client, _ids(64, ("stream", k)), STREAM_TOKENS)) for k in range(NUM_STREAMS)
        ]
        await asyncio.sleep(2.0)
        quiet = [await _phase(QUIET_S, lambda _: asyncio.sleep(QUIET_S))]
        beside = await _phase(PHASE_S, lambda number: _compute_for_nobody(deployment, client, number))
        quiet.append(await _phase(QUIET_S, lambda _: asyncio.sleep(QUIET_S)))
        receiving = await _phase(PHASE_S, lambda k: _complete(client, _ids(1024, ("busy", k)), 1))
        quiet.append(await _phase(QUIET_S, lambda _: asyncio.sleep(QUIET_S)))
        tails = await _phase(PHASE_S, lambda k: _complete(client, _ids(TAIL_PROMPT, ("tail", k)), 1))
        quiet.append(await _phase(QUIET_S, lambda _: asyncio.sleep(QUIET_S)))
        is_valid = not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
    assert is_valid, "the streams ended before the measurement"
    await asyncio.sleep(0.5)

    steps = _steps(deployment, "decode-1")
    gaps = {phase: _gaps(steps, phase) for phase in (*quiet, beside, receiving)}
    tail_s = statistics.median(step.duration_s for step in _of_all_streams(steps, tails, has_tail=True))
    quiet_step_s = statistics.median(
        step.duration_s for phase in quiet[2:] for step in _of_all_streams(steps, phase, has_tail=False)
    )
    for name, phase, around, limit, what in (
        ("itl_beside_prefill", beside, quiet[:2], None, "while the prefill worker computes and ships nothing"),
        ("itl_receiving", receiving, quiet[1:3], MAX_ITL, "while its blocks arrive"),
    ):
        mean_s = statistics.mean(gaps[phase])
        own_quiet_s = statistics.mean(statistics.mean(gaps[one]) for one in around)
        slowest_ms = percentile(gaps[phase], 99) * 1e3
        note = (
            f"from token to token {what}: {mean_s * 1e3:.1f} ms at the mean, {slowest_ms:.1f} at the 99th percentile, "
        )
        yield HandOffFigure(
            name, mean_s / own_quiet_s, limit, f"{note}{own_quiet_s * 1e3:.1f} ms quiet, batch {NUM_STREAMS}"
        )
    note = (
        f"a step with (a part of) a tail: {tail_s * 1e3:.1f} ms, {quiet_step_s * 1e3:.1f} ms quiet, batch {NUM_STREAMS}"
    )
    yield HandOffFigure("tail_step", tail_s / quiet_step_s, MAX_TAIL, note)


def _of_all_streams(steps: list[StepLine], phase: tuple[float, float], has_tail: bool) -> list[StepLine]:
    """The phase's steps in which all streams yielded a token."""
    return [step for step in steps if phase[0] <= step.planned_s < phase[1] and _is_of_all_streams(step, has_tail)]


def _is_of_all_streams(step: StepLine, has_tail: bool) -> bool:
    return step.num_chunks >= NUM_STREAMS and (step.num_tokens > NUM_STREAMS) == has_tail


def _gaps(steps: list[StepLine], phase: tuple[float, float]) -> list[float]:
    """Seconds from one plan of all streams' tokens to the next, what lies between the steps included; those with tails are left out."""
    return [
        later.planned_s - earlier.planned_s
        for earlier, later in itertools.pairwise(steps)
        if phase[0] <= earlier.planned_s < phase[1] and _is_of_all_streams(earlier, has_tail=False)
    ]


async def _phase(seconds: float, work: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Repeats `work` for so long; returns when it began and ended."""
    began, number = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        await work(number)
        number += 1
    return began, time.monotonic()


async def _compute_for_nobody(deployment: LocalDeployment, client: httpx.AsyncClient, number: int) -> None:
    """The prefill worker computes 1,024 tokens, and no block leaves it."""
    workers = (await client.get("/health/ready")).json()["workers"]
    worker = next(one for one in workers if one["name"] == "prefill-1")
    dialer = GrpcDialer((deployment.folder / "secret").read_text().strip())
    stream = dialer.fetch(deployment.children["prefill-1"].details["address"])
    tokens = tuple(_ids(1024, ("nobody", number)))
    await stream.send(FetchOpen(worker["model_id"], worker["fidelity"], tokens, warm=True))
    while not isinstance(await stream.receive(), FetchEnd):
        pass
    stream.close()
    await dialer.close()


def _steps(deployment: LocalDeployment, name: str) -> list[StepLine]:
    lines = (deployment.folder / f"{name}.log").read_text(errors="replace").splitlines()
    return [step for line in lines if (step := step_in(line)) is not None]


def _give_decode_a_core(deployment: LocalDeployment) -> None:
    """All threads of the decode worker on one core, everything else on the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for child in deployment.children.values():
        mine = {cores[0]} if child.role == "decode" else set(cores[1:])
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), mine)
    os.sched_setaffinity(0, set(cores[1:]))


def _ids(length: int, seed: object) -> list[int]:
    return [random.Random(f"{seed} {k}").randrange(100, 40_000) for k in range(length)]


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def _complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=_body(prompt, max_tokens))
    response.raise_for_status()
    return response.json()["kvferry"][0]


async def _stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> tuple[dict[str, Any], float]:
    """kvferry's numbers, and the seconds to the first event."""
    body = {**_body(prompt, max_tokens), "stream": True, "stream_options": {"include_usage": True}}
    began, first_s, numbers = time.monotonic(), 0.0, dict[str, Any]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            first_s = first_s or (time.monotonic() - began if line.startswith("data: ") else 0.0)
            if line.startswith("data: {") and (chunk := json.loads(line.removeprefix("data: "))).get("kvferry"):
                numbers = chunk["kvferry"][0]
    return numbers, first_s

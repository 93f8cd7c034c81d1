"""`kvferry explain --trace FILE`: what each policy would do with a trace, over described pools. Nothing is started.

Pools are described by how many workers of a shape on an accelerator there are (kvferry/engine/sim.py says how fast), or by a file. The
replay itself is the router's (router/replay.py): the placement is the real one.
"""

import importlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.engine.sim import accelerator_called, costs_of, kv_tokens_of
from kvferry.errors import ConfigurationError
from kvferry.shape import read_shape
from loadtest.report import percentile
from loadtest.request_trace import TOKENS_PER_HASH, TraceRow, read_trace

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
"""At this length a prefill worker's rate is worked out."""
CAPTION = (
    "ms. reused: prompt tokens that nobody had to compute; local: computed where they are decoded; late: predicted beyond an SLO; "
    "skew: the busiest decode worker's requests to the idlest one's"
)
WORKER_FIELDS = {"count", "tokens_per_s", "pool_tokens", "step_base_ms", "step_slope_ms", "max_sequences"}


@dataclass(frozen=True, slots=True)
class PoolsPlan:
    num_prefill: int
    num_decode: int
    shape: str
    accelerator: str
    file: Path | None
    slo_ttft_ms: float
    slo_tpot_ms: float


@dataclass(frozen=True, slots=True)
class Pools:
    """Described workers of router/replay.py, and how long a block takes between two of them."""

    workers: tuple[Any, ...]
    block_s: float


def print_explained_trace(
    trace: Path, plan: PoolsPlan, policies: Sequence[str], num_requests: int, speed: float, as_json: bool
) -> None:
    """Raises ConfigurationError."""
    replay: Any = importlib.import_module("router.replay")
    known: Any = importlib.import_module("router.placement").POLICIES
    for policy in policies:
        if policy not in known:
            raise ConfigurationError(f"policy {policy!r} is not known; known: {', '.join(known)}")
    rows = read_trace(trace)[:num_requests]
    requests = list(_requests(rows, speed, replay.ReplayRequest))
    pools = _pools(plan, replay.ReplayWorker)
    slos = (plan.slo_ttft_ms / 1e3 or float("inf"), plan.slo_tpot_ms / 1e3 or float("inf"))
    figures = [
        _figures(replay.Replay(pools.workers, policy, pools.block_s, *slos).run(requests))
        for policy in policies or known
    ]
    if as_json:
        for one in figures:
            print(json.dumps(one))
        return
    _print_table(figures, trace, len(requests))


def _requests(rows: Sequence[TraceRow], speed: float, make: Any) -> Iterator[Any]:
    """Equal hash ids are equal beginnings; what they do not cover is a request's own."""
    for number, row in enumerate(rows):
        num_blocks = row.num_prompt // BLOCK_SIZE
        keys: list[int] = []
        for hash_id in row.hash_ids:
            keys += _keys(f"shared {hash_id}", TOKENS_PER_HASH // BLOCK_SIZE)
        keys = keys[:num_blocks]
        keys += _keys(f"own {number}", num_blocks - len(keys))
        yield make(row.at_s / speed, max(row.num_prompt, 1), max(row.num_output, 1), tuple(keys))


def _keys(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(63) for _ in range(count)]


def _pools(plan: PoolsPlan, make: Any) -> Pools:
    """Raises ConfigurationError."""
    shape, accelerator = read_shape(plan.shape), accelerator_called(plan.accelerator)
    costs, reached = costs_of(shape), accelerator.reached
    flops = 2 * costs.num_projection_weights + costs.flops_per_key * PROMPT_TOKENS / 2
    weights_s = (costs.num_projection_weights + costs.num_output_weights) * costs.bytes_per_weight / reached.bytes_per_s
    fields = {
        "tokens_per_s": reached.flops_per_s / flops,
        "pool_tokens": kv_tokens_of(shape, accelerator),
        "step_base_s": weights_s + accelerator.step_s,
        "step_slope_s": PROMPT_TOKENS * costs.kv_bytes_per_token / reached.bytes_per_s,
    }
    block_s = BLOCK_SIZE * costs.kv_bytes_per_token / accelerator.link_bytes_per_s
    if plan.file is not None:
        return _pools_in(plan.file, fields, block_s, make)
    prefill = [make(f"prefill-{k + 1}", False, **fields) for k in range(plan.num_prefill)]
    decode = [make(f"decode-{k + 1}", True, **fields) for k in range(plan.num_decode)]
    return Pools((*prefill, *decode), block_s)


def _pools_in(path: Path, fields: dict[str, Any], block_s: float, make: Any) -> Pools:
    """Groups of equal workers under `prefill` and `decode`; what a group does not say is as of the shape. Raises ConfigurationError."""
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict) or set(content) - {"prefill", "decode", "block_us"}:
        raise ConfigurationError(f"{path}: expected the sections prefill and decode, and block_us")
    workers: list[Any] = []
    for role in ("prefill", "decode"):
        for group in content.get(role) or ():
            unknown = set(group) - WORKER_FIELDS
            if unknown:
                known = ", ".join(sorted(WORKER_FIELDS))
                raise ConfigurationError(f"{path}: {role}: unknown field {sorted(unknown)[0]!r}; known: {known}")
            given = {name: value for name, value in group.items() if name != "count" and not name.endswith("_ms")}
            given |= {f"{name[:-3]}_s": value / 1e3 for name, value in group.items() if name.endswith("_ms")}
            for _ in range(int(group.get("count", 1))):
                workers.append(make(f"{role}-{len(workers) + 1}", role == "decode", **{**fields, **given}))
    if not any(worker.is_decode for worker in workers):
        raise ConfigurationError(f"{path}: there is no decode worker")
    return Pools(tuple(workers), content.get("block_us", block_s * 1e6) / 1e6)


def _figures(outcome: Any) -> dict[str, Any]:
    placed = len(outcome.ttft_s)

    def at(samples: list[float], share: float) -> float | None:
        return round(percentile(samples, share) * 1e3, 3) if samples else None

    of_decode = [count for name, count in outcome.num_by_worker.items() if name.startswith("decode")]
    return {
        "policy": outcome.policy,
        "placed": placed,
        "unplaced": outcome.num_unplaced,
        "ttft_p50_ms": at(outcome.ttft_s, 50),
        "ttft_p99_ms": at(outcome.ttft_s, 99),
        "tpot_p50_ms": at(outcome.tpot_s, 50),
        "tpot_p99_ms": at(outcome.tpot_s, 99),
        "cached_share": round(outcome.num_cached_tokens / max(outcome.num_prompt_tokens, 1), 4),
        "local_share": round(outcome.num_local / max(placed, 1), 4),
        "beyond_slo_share": round(outcome.num_beyond_slo / max(placed, 1), 4),
        "most_to_least": round(max(of_decode) / max(min(of_decode), 1), 3) if of_decode else None,
    }


def _print_table(figures: list[dict[str, Any]], trace: Path, count: int) -> None:
    table = Table(
        title=f"{trace.name}: {count} requests", caption=CAPTION, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for title in ("policy", "TTFT p50", "p99", "TPOT p50", "p99", "reused", "local", "late", "skew", "unplaced"):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for one in figures:
        times = [one[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")]
        shares = [one[name] for name in ("cached_share", "local_share", "beyond_slo_share")]
        table.add_row(
            one["policy"],
            *("-" if time is None else f"{time:,.1f}" for time in times),
            *(f"{share:.0%}" for share in shares),
            "-" if one["most_to_least"] is None else f"{one['most_to_least']:.2f}",
            str(one["unplaced"]),
        )
    Console(highlight=False).print(table)

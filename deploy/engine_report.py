"""`kvferry bench engine`: prints the figures of kvferry/engine/bench.py, as the peers' scripts print theirs."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 120


def print_engine_figures(
    directory: Path, weights: str, kv: str, num_threads: int, as_json: bool, device: str = "cpu"
) -> None:
    from kvferry.engine.bench import measure

    table = Table(
        "workload", "ms a step", "tokens/s", "floor ms", "share of the floor", "GFLOP/s", "GB/s", "bound by", "outside"
    )
    for figure in measure(directory, weights, kv, num_threads, device):
        ceilings = figure.ceilings
        step_ms, floor_ms = figure.step_s * 1e3, figure.floor_s * 1e3
        if as_json:
            peer = {"peer": "kvferry", "threads": num_threads, "weights": weights}
            place = {"device": device, "workload": figure.workload}
            speed = {"tok_s": round(figure.tokens_per_s, 1), "step_ms": round(step_ms, 2)}
            floor = {
                "floor_ms": round(floor_ms, 2),
                "share": round(figure.share, 3),
                "gflop_s": round(figure.flops_per_s / 1e9, 1),
                "gb_s": round(figure.bytes_per_s / 1e9, 2),
                "ceiling_gflop_s": round(ceilings.flops_per_s / 1e9, 1),
                "ceiling_gb_s": round(ceilings.bytes_per_s / 1e9, 2),
                "bound_by": figure.bound_by,
                "kv": kv,
                "outside_share": None if figure.outside_share is None else round(figure.outside_share, 3),
                "parts_ms": {name: round(seconds * 1e3, 2) for name, seconds in figure.part_s.items()},
            }
            common = {"figure": figure.workload, "value": speed["tok_s"], "unit": "tokens/s"}
            print(json.dumps({**common, **peer, **place, **speed, **floor}), flush=True)
        else:
            row = (f"{step_ms:.1f}", f"{figure.tokens_per_s:.1f}", f"{floor_ms:.1f}", f"{figure.share:.0%}")
            rates = (_of(figure.flops_per_s, ceilings.flops_per_s), _of(figure.bytes_per_s, ceilings.bytes_per_s))
            outside = "" if figure.outside_share is None else f"{figure.outside_share:.0%}"
            table.add_row(figure.workload, *row, *rates, figure.bound_by, outside)
    if not as_json:
        Console(highlight=False, width=max(Console().width, TABLE_WIDTH)).print(table)
        print("outside: the share of a step that is neither a matrix product nor attention (--json has all parts)")


def _of(achieved: float, ceiling: float) -> str:
    return f"{achieved / 1e9:.1f} of {ceiling / 1e9:.1f}"

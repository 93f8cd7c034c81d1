"""`kvferry bench engine`: prints the figures of kvferry/engine/bench.py, as the peers' scripts print theirs."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table


def print_engine_figures(directory: Path, weights: str, num_threads: int, as_json: bool) -> None:
    from kvferry.engine.bench import measure

    table = Table("workload", "ms a step", "tokens/s", "floor ms", "share of the floor")
    for figure in measure(directory, weights, num_threads):
        step_ms, floor_ms = figure.step_s * 1e3, figure.floor_s * 1e3
        if as_json:
            peer = {"peer": "kvferry", "threads": num_threads, "weights": weights, "workload": figure.workload}
            speed = {"tok_s": round(figure.tokens_per_s, 1), "step_ms": round(step_ms, 2)}
            floor = {"floor_ms": round(floor_ms, 2), "share": round(figure.share, 3)}
            common = {"figure": figure.workload, "value": speed["tok_s"], "unit": "tokens/s"}
            print(json.dumps({**common, **peer, **speed, **floor}), flush=True)
        else:
            row = (f"{step_ms:.1f}", f"{figure.tokens_per_s:.1f}", f"{floor_ms:.1f}", f"{figure.share:.0%}")
            table.add_row(figure.workload, *row)
    if not as_json:
        Console(highlight=False).print(table)

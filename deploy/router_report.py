"""`kvferry bench router`: prints the figures of deploy/router_bench.py beside their targets."""

import json
import math

from rich.console import Console
from rich.table import Table

from deploy.router_bench import RouterBench, parts_called
from loadtest.router_figures import RouterFigure

TABLE_WIDTH = 132
HOLDS = {True: "[green]holds[/]", False: "[red]misses[/]", None: ""}


async def print_router_figures(bench: RouterBench, parts: list[str], as_json: bool, notes: Console) -> None:
    """Raises ConfigurationError for an unknown part or peers that are not there, KvferryError for what does not work."""
    for name, measure in parts_called(parts).items():
        notes.print(f"measuring {name}")
        figures = await measure(bench, notes)
        if as_json:
            for figure in figures:
                print(json.dumps(as_line(name, figure)), flush=True)
        else:
            Console(highlight=False, width=max(Console().width, TABLE_WIDTH)).print(_table(name, figures))


def as_line(part: str, figure: RouterFigure) -> dict[str, object]:
    """An infinite value is null: JSON has none."""
    value = round(figure.value, 4) if math.isfinite(figure.value) else None
    limits = {"at_most": figure.at_most, "at_least": figure.at_least}
    target = {name: limit for name, limit in limits.items() if limit is not None}
    verdict = {} if figure.holds is None else {"holds": figure.holds}
    common = {"figure": figure.name, "value": value, "unit": figure.unit, "part": part}
    return {**common, **target, **verdict, "note": figure.note}


def _table(part: str, figures: list[RouterFigure]) -> Table:
    table = Table("figure", "value", "", "target", "", "of what", title=part, title_justify="left")
    for figure in figures:
        table.add_row(
            figure.name, _number(figure.value), figure.unit, _target(figure), HOLDS[figure.holds], figure.note
        )
    return table


def _target(figure: RouterFigure) -> str:
    at_most = "" if figure.at_most is None else f"≤ {_number(figure.at_most)}"
    return at_most if figure.at_least is None else f"≥ {_number(figure.at_least)}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

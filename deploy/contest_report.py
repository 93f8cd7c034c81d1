"""`kvferry bench peers`: holds the contest of loadtest/contest.py and prints its outcome.

As tables for a person, then the same as markdown to paste; or as one JSON object a line.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.errors import ConfigurationError
from loadtest.contenders import Contender, contenders_in, take_turn
from loadtest.contest import WORKLOADS, Outcome, Turn, Verdict, hold

REMARKS = (
    "All computed on one thread, but for vllm-2-threads: vLLM with the two threads that it takes by itself on two cores.",
    "llama.cpp keeps all sequences in one buffer; `-split`, its default, has one for each.",
    "Of each workload the median step of a run, and of these the median over the rounds.",
)


FILE_WIDTH = 132
"""Characters a line where there is no terminal to fit."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it has a form."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def report_contest(
    directory: Path, model: Path, num_rounds: int, only: Sequence[str], as_json: bool, notes: Console
) -> None:
    """Takes minutes a round. Raises ConfigurationError for a directory or a contender that is not there."""
    contenders = _choose(contenders_in(directory, model), directory, only)
    for contender in contenders.values():
        for path in contender.missing[:1]:
            notes.print(f"  {contender.name} is skipped: {path} is not there")
    present = [name for name, contender in contenders.items() if not contender.missing]
    if not present:
        raise ConfigurationError(f"--peers {directory}: none of the contenders can run")

    def take(name: str, number: int) -> Turn:
        notes.print(f"  round {number} of {num_rounds}: {name}")
        began = time.perf_counter()
        turn = take_turn(contenders[name])
        how = f"[red]failed:[/red] {escape(turn.failure)}" if turn.failure else "done"
        notes.print(f"    {how} ({time.perf_counter() - began:.0f} s)", soft_wrap=True)
        return turn

    outcome = hold(present, num_rounds, take)
    if as_json:
        for line in _lines(outcome):
            print(json.dumps(line), flush=True)
    else:
        _print_tables(outcome)


def _choose(known: dict[str, Contender], directory: Path, only: Sequence[str]) -> dict[str, Contender]:
    if not directory.is_dir():
        raise ConfigurationError(f"--peers {directory}: there is no such directory")
    for name in only:
        if name not in known:
            raise ConfigurationError(f"contender {name!r} is not known; known: {', '.join(known)}")
    return {name: contender for name, contender in known.items() if not only or name in only}


def _lines(outcome: Outcome) -> Iterator[dict[str, object]]:
    for contender in outcome.contenders:
        for workload in WORKLOADS:
            if samples := outcome.samples_s(contender, workload):
                median, low, high = outcome.step_s(contender, workload) or 0.0, min(samples), max(samples)
                spread = {"min": round(low * 1e3, 3), "max": round(high * 1e3, 3), "n": len(samples)}
                figure = {"figure": "step", "value": round(median * 1e3, 3), "unit": "ms", **spread}
                yield {**figure, "contender": contender, "workload": workload}
    for verdict in outcome.verdicts():
        who = {"ours": verdict.duel.ours, "theirs": verdict.duel.theirs, "workload": verdict.workload}
        figure = {"figure": "ratio", "value": round(verdict.ratio, 3), "unit": "times"}
        target = {} if verdict.target is None else {"target": verdict.target, "holds": verdict.holds}
        yield {**figure, **who, **target}
    for contender, failure in outcome.failures.items():
        yield {"figure": "failure", "value": failure, "contender": contender}


def _print_tables(outcome: Outcome) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    grids = (_steps(outcome), _ratios(outcome))
    for grid in grids:
        console.print(_as_table(grid))
    remarks = (*REMARKS, *(f"{name} failed: {failure}" for name, failure in outcome.failures.items()))
    for grid in grids:
        print(f"\n{_as_markdown(grid)}")
    print("\n" + "\n".join(f"- {remark}" for remark in remarks))


def _steps(outcome: Outcome) -> Grid:
    rows: list[tuple[Cell, ...]] = []
    for contender in outcome.contenders:
        steps = (outcome.step_s(contender, workload) for workload in WORKLOADS)
        rows.append((Cell(contender), *(Cell("" if step is None else f"{step * 1e3:.1f}") for step in steps)))
    return Grid("ms a step", ("", *map(_short, WORKLOADS)), tuple(rows))


def _ratios(outcome: Outcome) -> Grid:
    by_duel: dict[tuple[str, str], dict[str, Cell]] = {}
    for verdict in outcome.verdicts():
        by_duel.setdefault((verdict.duel.ours, verdict.duel.theirs), {})[verdict.workload] = _cell(verdict)
    rows = (
        (Cell(f"{ours} / {theirs}"), *(cells.get(workload, Cell("")) for workload in WORKLOADS))
        for (ours, theirs), cells in by_duel.items()
    )
    return Grid("tokens/s, ours / theirs (and the target)", ("", *map(_short, WORKLOADS)), tuple(rows))


def _cell(verdict: Verdict) -> Cell:
    """The sign says how the ratio stands to its target."""
    if verdict.target is None:
        return Cell(f"{verdict.ratio:.2f}")
    sign, style = ("≥", "green") if verdict.holds else ("<", "red")
    return Cell(f"{verdict.ratio:.2f} ({sign}{verdict.target:g})", style)


def _short(workload: str) -> str:
    return workload.removeprefix("decode_").replace("_", " ")


def _as_table(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, head in enumerate(grid.head):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(f"[{cell.style}]{cell.text}[/]" if cell.style else cell.text for cell in row))
    return table


def _as_markdown(grid: Grid) -> str:
    """What misses its target is bold."""
    head = [f"| {' | '.join((grid.title, *grid.head[1:]))} |", "|---" + "|---:" * (len(grid.head) - 1) + "|"]
    body = [f"| {' | '.join(f'**{c.text}**' if c.style == 'red' else c.text for c in row)} |" for row in grid.rows]
    return "\n".join([*head, *body])

"""`kvferry bench pd`: shows what was measured of two pools and one, and where splitting loses.

As tables for a person, or as one JSON object a line. Knows nothing of how it was measured.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.goodput import GoodputReport
from loadtest.lengths import CHAT
from loadtest.pool_duel import Verdict, verdicts
from loadtest.trial import Measured

MIN_WIDTH = 160
TITLES = {"real": "this machine, the real model", "sim": "simulated, in virtual time"}


@dataclass(slots=True)
class PdReport:
    """Takes what has been measured as it comes; `finish` says what it means."""

    as_json: bool
    measured: list[Measured] = field(default_factory=list[Measured])

    def add(self, one: Measured) -> None:
        self.measured.append(one)
        if self.as_json:
            load = {} if one.load is None else {"load": one.load}
            where = {"part": one.part, "layout": one.layout.name, "rate": one.rate, **load}
            took: dict[str, object] = {"figure": "took", "value": round(one.took_s, 2), "unit": "s"}
            for figure in (*one.report.figures(), took):
                print(json.dumps({**figure, **where}), flush=True)

    @property
    def share_failed(self) -> float:
        """The worst of all."""
        return max((one.report.share_failed for one in self.measured), default=1.0)

    def finish(self) -> None:
        found = list(verdicts(self.measured))
        if self.as_json:
            for verdict in found:
                print(json.dumps(_line(verdict)), flush=True)
            return
        console = Console(highlight=False, width=max(Console().width, MIN_WIDTH))
        for part in dict.fromkeys(one.part for one in self.measured):
            console.print(_table(part, [one for one in self.measured if one.part == part]))
        for text in (*_moving(self.measured), *_losses(found), *_targets(found), *_failures(self.measured)):
            console.print(text, soft_wrap=True)


def _line(verdict: Verdict) -> dict[str, object]:
    target = {} if verdict.target is None else {"target": verdict.target, "holds": verdict.holds}
    kind = {"kind": verdict.kind} if verdict.kind else {}
    where = {"part": verdict.part, "rate": verdict.rate, "against": verdict.against}
    figure = {"figure": "two_pools_better", "of": verdict.figure, "value": round(verdict.ratio, 3), "unit": "times"}
    return {**figure, **kind, **where, "loses": verdict.loses, **target}


def _table(part: str, measured: Sequence[Measured]) -> Table:
    head = (
        "req/s",
        "layout",
        "n",
        "TTFT p50",
        "p99",
        "queue",
        "fetch",
        "tail",
        "moved",
        "ITL p50",
        "p99",
        "chats p99",
        "E2E p50",
    )
    table = Table(
        title=f"{TITLES[part]}; ms, ITL per event", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in (*head, "goodput", "failed", "no text", "took s"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    last = None
    for one in measured:
        if last not in (None, one.rate):
            table.add_section()
        last = one.rate
        load = "" if one.load is None else f" ({one.load:.0%})"
        table.add_row(f"{one.rate:g}{load}", one.layout.name, *_cells(one.report), f"{one.took_s:.0f}")
    return table


def _cells(report: GoodputReport) -> list[str]:
    def ms(name: str, share: float, kind: str = "") -> str:
        value = report.percentile_s(name, share, kind)
        return "" if value is None else f"{value * 1e3:,.1f}"

    split = report.split
    parts = ["", "", ""] if split is None else [f"{s * 1e3:,.0f}" for s in (split.queue_s, split.fetch_s, split.tail_s)]
    moved = "" if report.transfer_share is None else f"{report.transfer_share:.1%}"
    chats = ms("itl", 99, CHAT) if CHAT in report.kinds else ""
    latencies = [ms("ttft", 50), ms("ttft", 99), *parts, moved, ms("itl", 50), ms("itl", 99), chats, ms("e2e", 50)]
    counts = [str(report.failures.total()), str(report.num_no_text)]
    return [str(len(report.sent)), *latencies, f"{report.goodput:.3g}", *counts]


def _moving(measured: Sequence[Measured]) -> list[str]:
    """The largest share in each part."""
    known = [one for one in measured if one.report.transfer_share is not None]
    worst = {one.part: one for one in sorted(known, key=lambda one: one.report.transfer_share or 0.0)}
    return [
        f"moving blocks took {one.report.transfer_share:.1%} of the time to the first token at most "
        f"({one.part}, {one.rate:g}/s, {one.layout.name})"
        for one in worst.values()
    ]


def _losses(found: Sequence[Verdict]) -> list[str]:
    """One line for each rate and layout in which splitting loses anything."""
    lines: dict[tuple[str, float, str], list[str]] = {}
    for verdict in found:
        if verdict.loses:
            of = f"{verdict.figure} of {verdict.kind}s" if verdict.kind else verdict.figure
            lines.setdefault((verdict.part, verdict.rate, verdict.against), []).append(f"{of} x{verdict.ratio:.2f}")
    texts = [f"  {part}, {rate:g}/s, {against}: {', '.join(what)}" for (part, rate, against), what in lines.items()]
    return ["where splitting loses against (two pools are so many times as good):", *texts] if texts else []


def _targets(found: Sequence[Verdict]) -> list[str]:
    return [
        f"p99 gap of chats at {verdict.rate:g}/s: {verdict.ratio:.1f} times better than {verdict.against} "
        f"(target {verdict.target:g}: {'holds' if verdict.holds else 'missed'})"
        for verdict in found
        if verdict.target is not None
    ]


def _failures(measured: Sequence[Measured]) -> list[str]:
    return [
        f"failed at {one.rate:g}/s, {one.layout.name}: {dict(one.report.failures)}"
        for one in measured
        if one.report.failures
    ]

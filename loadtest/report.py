"""A load test's figures: percentiles over real samples (with their number), throughput, failures by kind.

An answer that ended before any text is neither a success nor a failure: it has no first token, and is counted apart.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from loadtest.fate import Fate, count_failures, count_no_text, fate_of
from loadtest.stream import StreamRecord

PERCENTILES = (50, 90, 99)


def percentile(samples: list[float], share: float) -> float:
    """Nearest rank: the smallest sample that at least `share` percent of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(len(ordered) * share / 100), 1) - 1]


@dataclass(frozen=True, slots=True)
class LoadReport:
    records: list[StreamRecord]
    duration_s: float

    @property
    def succeeded(self) -> list[StreamRecord]:
        return [record for record in self.records if fate_of(record) is Fate.SUCCEEDED]

    @property
    def failures(self) -> Counter[str]:
        return count_failures(self.records)

    @property
    def num_no_text(self) -> int:
        return count_no_text(self.records)

    @property
    def share_failed(self) -> float:
        """1 if nothing was asked: that is no success."""
        return self.failures.total() / len(self.records) if self.records else 1.0

    def samples(self) -> dict[str, list[float]]:
        """By name, in milliseconds; of those that succeeded."""
        done = self.succeeded

        def known(values: Iterable[float | None]) -> list[float]:
            return [value * 1e3 for value in values if value is not None]

        return {
            "ttft": known(record.ttft_s for record in done),
            "itl": known(gap for record in done for gap in record.gaps_s),
            "tpot": known(record.tpot_s for record in done),
            "e2e": known(record.e2e_s for record in done),
        }

    def figures(self) -> list[dict[str, object]]:
        figures: list[dict[str, object]] = []
        for name, samples in self.samples().items():
            for share in PERCENTILES:
                if samples:
                    value = round(percentile(samples, share), 3)
                    figures.append({"figure": f"{name}_p{share}", "value": value, "unit": "ms", "n": len(samples)})
        tokens = sum(record.num_tokens for record in self.succeeded)
        figures += [
            {"figure": "output_throughput", "value": round(tokens / self.duration_s, 2), "unit": "tokens/s"},
            {
                "figure": "request_throughput",
                "value": round(len(self.succeeded) / self.duration_s, 3),
                "unit": "requests/s",
            },
            {"figure": "succeeded", "value": len(self.succeeded), "unit": "requests"},
            {"figure": "no_text", "value": self.num_no_text, "unit": "requests"},
            {"figure": "failed", "value": self.failures.total(), "unit": "requests"},
        ]
        figures += [{"figure": f"failed_{kind}", "value": n, "unit": "requests"} for kind, n in self.failures.items()]
        return figures


def print_report(report: LoadReport, as_json: bool) -> None:
    if as_json:
        for figure in report.figures():
            print(json.dumps(figure))
        return
    console = Console(highlight=False)
    table = Table("", *(f"p{share}" for share in PERCENTILES), "n")
    titles = {"ttft": "TTFT ms", "itl": "ITL ms (per event)", "tpot": "TPOT ms (per token)", "e2e": "E2E ms"}
    for name, samples in report.samples().items():
        shown = [f"{percentile(samples, share):,.1f}" if samples else "-" for share in PERCENTILES]
        table.add_row(titles[name], *shown, str(len(samples)))
    console.print(table)
    for figure in report.figures():
        if "throughput" in str(figure["figure"]):
            console.print(f"{figure['figure']}: {figure['value']} {figure['unit']}")
    console.print(
        f"{len(report.succeeded)} succeeded, {report.num_no_text} ended before any text, "
        f"{report.failures.total()} failed {dict(report.failures) or ''}"
    )
    for detail in {record.detail for record in report.records if record.detail}:
        console.print(f"  failed: {detail}")

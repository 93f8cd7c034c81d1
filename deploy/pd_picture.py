"""The picture of `kvferry bench pd`: a row for each part, a panel for each figure, a line for each layout, over the rate. PNG and SVG.

matplotlib is an optional extra (`plot`) and imported when a picture is wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigurationError
from loadtest.goodput import GoodputReport
from loadtest.trial import Measured

FORMATS = (".png", ".svg")
MARKERS = "os^Dv"
ROW_TITLES = {"real": "this machine", "sim": "simulated"}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    value: Callable[[GoodputReport], float | None]
    is_logarithmic: bool = False


def _p99_ms(name: str) -> Callable[[GoodputReport], float | None]:
    def value(report: GoodputReport) -> float | None:
        seconds = report.percentile_s(name, 99)
        return None if seconds is None else seconds * 1e3

    return value


PANELS = (
    Panel("time to first token, p99", "ms", _p99_ms("ttft"), True),
    Panel("gap between events (ITL), p99", "ms", _p99_ms("itl"), True),
    Panel("goodput", "requests/s within both objectives", lambda report: report.goodput),
)


def check_can_draw() -> None:
    """Before minutes of measuring. Raises ConfigurationError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("--picture needs matplotlib: pip install 'kvferry[plot]'") from error


def draw(path: Path, measured: Sequence[Measured]) -> list[Path]:
    """Returns what was written."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    mpl.rcParams["svg.hashsalt"] = "kvferry"  # the same file for the same figures
    parts = list(dict.fromkeys(one.part for one in measured))
    figure = Figure(figsize=(15, 4.6 * len(parts)), layout="constrained")
    axes: Any = figure.subplots(len(parts), len(PANELS), squeeze=False)
    for row, part in zip(axes, parts, strict=True):
        for place, panel in zip(row, PANELS, strict=True):
            _draw_panel(place, panel, part, [one for one in measured if one.part == part])
    path.parent.mkdir(parents=True, exist_ok=True)
    written = paths_of(path)
    for one in written:
        figure.savefig(one, dpi=130, metadata={"Date": None} if one.suffix == ".svg" else None)
    return written


def paths_of(path: Path) -> list[Path]:
    """PATH with each of FORMATS as its suffix."""
    stem = path.with_suffix("") if path.suffix in FORMATS else path
    return [stem.with_name(stem.name + suffix) for suffix in FORMATS]


def _draw_panel(axes: Any, panel: Panel, part: str, measured: Sequence[Measured]) -> None:
    from matplotlib.ticker import LogLocator

    for number, layout in enumerate(dict.fromkeys(one.layout for one in measured)):
        points = [(one.rate, panel.value(one.report)) for one in measured if one.layout == layout]
        known = [(rate, value) for rate, value in points if value is not None]
        xs, ys = [rate for rate, _ in known], [value for _, value in known]
        style = "-" if layout.has_two_pools else "--"
        axes.plot(xs, ys, style, marker=MARKERS[number % len(MARKERS)], linewidth=2, label=layout.name)
    if panel.is_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        rates = sorted({one.rate for one in measured})
        axes.plot(rates, rates, ":", color="grey", label="offered")
        axes.set_ylim(bottom=0)
    axes.set_title(f"{ROW_TITLES[part]}: {panel.title}", fontsize=13)
    axes.set_xlabel("requests/s", fontsize=12)
    axes.set_ylabel(panel.unit, fontsize=12)
    axes.tick_params(which="both", labelsize=10)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=10)

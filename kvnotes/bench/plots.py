"""Plots of results, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

from kvnotes.bench.result import BenchResult, Panel, threads_of
from kvnotes.bench.timing import Number

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

WIDTH, HEIGHT = 5.4, 3.8
"""Inches of one panel."""

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvnotes",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Text stays text, and the same result is the same file."""

MAX_DECADES = 1e3
"""Over more than this, ticks stand at powers of ten alone."""

MARKERS = "os^vDPX*<>"
"""Series differ by form as well as by colour."""


def draw(result: BenchResult, stem: Path) -> list[Path]:
    """Write a result's panels side by side, as PNG and SVG.

    Args:
        result: What was measured.
        stem: The files' path without their ending.
    """
    panels = [panel for panel in result.panels if panel.series]
    if not panels:
        return []
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(WIDTH * len(panels), HEIGHT), squeeze=False
        )
        for panel, ax in zip(panels, axes[0], strict=True):
            _draw(panel, ax)
        m = result.machine
        cpu = m["cpu"].replace("(R)", "").replace("(TM)", "")
        figure.suptitle(f"{m['model']}, {m['dtype']}, {threads_of(m)}, {cpu}", fontsize=9)
        figure.tight_layout()
        files = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for file in files:
            figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else {})
        pyplot.close(figure)
    return files


def _draw(panel: Panel, ax: Axes) -> None:
    for number, (name, points) in enumerate(panel.series.items()):
        x, y = [p.x for p in points], [p.y for p in points]
        below, above = [p.y - p.low for p in points], [p.high - p.y for p in points]
        marker = MARKERS[number % len(MARKERS)]
        ax.errorbar(x, y, yerr=[below, above], label=name, marker=marker, markersize=4, capsize=2)
    if panel.log_x:
        _as_logarithms(ax, "x", [p.x for points in panel.series.values() for p in points])
    if panel.log_y:
        _as_logarithms(ax, "y", [p.y for points in panel.series.values() for p in points])
    else:
        ax.set_ylim(bottom=0)
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.grid(alpha=0.3)
    if len(panel.series) > 1:
        ax.legend(fontsize=7)


def _as_logarithms(ax: Axes, axis: Literal["x", "y"], values: Sequence[Number]) -> None:
    """Make an axis logarithmic, with ticks that people read: 1, 2 and 5 in each decade."""
    getattr(ax, f"set_{axis}scale")("log")
    whole = getattr(ax, f"{axis}axis")
    few = max(values) < MAX_DECADES * min(values) if min(values) > 0 else False
    whole.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    whole.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    whole.set_minor_formatter(NullFormatter())

"""What a benchmark returns, and how it is kept: JSON, and a plot in two formats.

A result has rows for a table, and panels for the plot; every timed value has its median, minimum
and maximum, and the machine and the command stand beside them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kvnotes
from kvnotes.bench.timing import Number, growth_exponent
from kvnotes.engine.base import engine_versions
from kvnotes.session import Model


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a series, with what it ranged over."""

    x: Number
    y: Number
    low: Number
    high: Number


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Args:
        title: What it shows.
        x: Name and unit of the horizontal axis.
        y: The same of the vertical one.
        series: Points by name.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: The same of the vertical one.
    """

    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind.

    Args:
        title: What they are.
        rows: Each a value by column.
        note: How to read them.
    """

    title: str
    rows: list[dict[str, Any]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A benchmark's result.

    Args:
        name: The benchmark.
        machine: What the numbers depend on.
        tables: What was measured.
        panels: What is plotted of it.
        exponents: How each cost grows: b of the power law y = a x^b, by cost and what grows.
    """

    name: str
    machine: dict[str, Any]
    tables: list[Table]
    panels: list[Panel]
    exponents: dict[str, float | None] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return everything but the plot."""
        return json.dumps(
            {
                "bench": self.name,
                "machine": self.machine,
                "tables": [{"title": t.title, "note": t.note, "rows": t.rows} for t in self.tables],
                "exponents": self.exponents,
            },
            indent=1,
        )

    def write(self, folder: Path) -> list[Path]:
        """Write JSON, PNG and SVG; without matplotlib the JSON alone.

        Returns:
            The files that were written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        m = self.machine
        stem = folder / f"{self.name}-{m['dtype']}-{m['threads']}t"
        written = [stem.with_suffix(".json")]
        written[0].write_text(self.to_json() + "\n", encoding="utf-8")
        try:
            from kvnotes.bench.plots import draw
        except ImportError:
            return written
        return [*written, *draw(self, stem)]


def machine(model: Model) -> dict[str, Any]:
    """Return what the numbers depend on, with the command that made them."""
    dtype = model.engine.spec.dtype
    return {**machine_facts(), "dtype": dtype, "model": model.name, "command": command()}


def command() -> str:
    """Return the command line of this process."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def machine_facts() -> dict[str, Any]:
    """Return the machine and the versions."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line for line in lines if "model name" in line]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **dict(engine_versions()),
        "kvnotes": kvnotes.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def growths(
    rows: Sequence[Mapping[str, Any]], x: str, names: Sequence[str], what: str
) -> dict[str, float | None]:
    """Return the growth exponents of timed columns over another one, by name.

    Args:
        rows: A table's rows.
        x: The column that grows.
        names: The timed columns.
        what: What the first one is called.
    """
    return {
        f"{name}, by {what}": growth_exponent(
            [(row[x], row[name]["median"]) for row in rows if name in row]
        )
        for name in names
    }


def shown(value: object) -> str:
    """Return a value of a row as people read it: times with what they ranged over."""
    if isinstance(value, Mapping):
        digits = 0 if value["median"] >= 100 else 1 if value["median"] >= 1 else 3
        median, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "min", "max"))
        return f"{median} [{low}-{high}]"
    return "" if value is None else str(value)


def threads_of(machine: Mapping[str, Any]) -> str:
    """Return how many threads a result was measured with, in words."""
    number = machine["threads"] or "unknown"
    return f"{number} thread{'' if number == 1 else 's'}"


def series(
    rows: Sequence[Mapping[str, Any]], x: str, names: Sequence[str]
) -> dict[str, list[Point]]:
    """Return the timed columns of rows as series over another column."""
    found = {
        name: [
            Point(row[x], row[name]["median"], row[name]["min"], row[name]["max"])
            for row in rows
            if isinstance(row.get(name), Mapping)
        ]
        for name in names
    }
    return {name: points for name, points in found.items() if points}

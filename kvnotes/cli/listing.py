"""Plain tables on stdout: a header, columns that stand under each other, no frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvnotes.cli.table import clean, stdout_console


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, and whether it holds numbers."""

    name: str
    number: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; long texts are folded, numbers never."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    shown = console()
    with shown.capture() as captured:
        shown.print(table)
    for line in captured.get().splitlines():  # rich fills lines up with blanks
        print(line if shown.is_terminal else line.rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one a line; paths and keys stay whole, to be copied."""
    width = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        line = Text.assemble((f"{name:{width}}", "bold"), clean(value))
        console().print(line, soft_wrap=True)


def say(text: str) -> None:
    """Print a line on stdout."""
    console().print(Text(clean(text)), soft_wrap=True)


def console() -> Console:
    """Return the console of the text output."""
    return stdout_console()


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:,.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:,.1f} {unit}"


def duration(ms: float) -> str:
    """Return a time as people read it."""
    if ms < 1000:
        return f"{ms:,.0f} ms"
    return f"{ms / 1e3:,.1f} s" if ms < 600_000 else f"{ms / 60_000:,.0f} min"

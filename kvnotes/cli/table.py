"""The text output of `kvnotes run`: a row of numbers for each turn, printed as it finishes.

A turn takes a title line, one row under a header that is printed once, and lines for what
does not fit into columns. So numbers stand under each other and texts keep their length; a
table with all of both in its columns would need 200 characters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from kvnotes.cli.records import Fidelity, TurnRecord
from kvnotes.cli.run import Compiled, Done

INDENT = 4
MAX_WIDTH = 120
DEFAULT_WIDTH = 100
"""Width where output is no terminal and COLUMNS is not set."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LEFT, _WIDE, _REFERENCE, _ALONE = "left", "wide", "reference", "alone"


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    width: int
    kind: str = ""


_COLUMNS = (
    _Column("strategy", 16, _LEFT),
    _Column("plan", 12, _LEFT),
    _Column("tokens", 7),
    _Column("reused", 7),
    _Column("moved", 7),
    _Column("computed", 9),
    _Column("exact", 7, _ALONE),
    _Column("TTFT ms", 9),
    _Column("hit ms", 9, _WIDE),
    _Column("full ms", 9, _WIDE),
    _Column("speedup", 9, _REFERENCE),
)
_WIDTH = INDENT + sum(column.width for column in _COLUMNS if column.kind != _ALONE)


class _Console(Console):
    """Leaves a closed pipe to whoever maps errors."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout_console() -> Console:
    """Return the console of the text output, with a width that reads well."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = DEFAULT_WIDTH
    console.width = min(console.width, MAX_WIDTH)
    return console


_LEGEND = (
    "waits: done together with the next turn that computes, and timed with it",
    "hit: the same new tokens over an exact cache of all before; full: a cold prefill of all",
)


class Table:
    """Prints the turns of one run.

    Args:
        console: Where to.
        compare: Whether references were computed; without them their columns vanish.
    """

    def __init__(self, console: Console, *, compare: bool) -> None:
        self._console = console
        self._wide = console.width >= _WIDTH
        kinds = {"", _LEFT, _REFERENCE if compare else _ALONE}
        kinds |= {_WIDE} if compare and self._wide else set()
        self._columns = [column for column in _COLUMNS if column.kind in kinds]
        self._compare = compare
        self._done: list[Done] = []
        self._noted: set[str] = set()

    def start(
        self,
        *,
        model: str,
        fingerprint: str,
        dtype: str,
        threads: int,
        versions: dict[str, str],
    ) -> None:
        """Print what is run."""
        plural = "" if threads == 1 else "s"
        head = Text.assemble(
            (model, "bold"), f"  {fingerprint[:12]}  {dtype}  {threads} thread{plural}"
        )
        self._print(head)
        self._print(Text("  ".join(f"{name} {v}" for name, v in versions.items()), "dim"))

    def segments(self, compiled: Sequence[Compiled], compile_ms: float) -> None:
        """Print what was compiled, and the header of the rows."""
        if compiled:
            names = ", ".join(f"{clean(s.name)} {s.num_tokens:,} tokens" for s in compiled)
            self._print(Text(f"compiled once: {names}, in {compile_ms / 1e3:.1f} s"))
        for line in _LEGEND[: None if self._compare else 1]:
            self._print(Text(line, "dim"))
        self._print(Text(""))
        cells = {column.name: column.name for column in self._columns}
        self._print(Text(" " * INDENT + self._row(cells), "bold underline"))

    def add(self, done: Done) -> None:
        """Print one turn."""
        self._done.append(done)
        record = done.record
        title = Text(f"{record.turn:>{INDENT - 1}} {clean(done.title, ' ')}", "bold")
        title.truncate(self._console.width, overflow="ellipsis")
        self._print(title)
        self._print(Text(" " * INDENT + self._row(self._cells(record))))
        if self._compare and not self._wide and record.full_ttft_ms is not None:
            self._detail(
                f"hit {ms(record.prefix_hit_ttft_ms)} ms, full {ms(record.full_ttft_ms)} ms"
            )
        if done.spread_ms is not None:
            low, high = done.spread_ms
            self._detail(f"TTFT from {ms(low)} to {ms(high)} ms")
        if record.fidelity is not None:
            self._detail(_fidelity(record))
        if record.decision is not None:
            self._decision(record)
        if record.text is not None:
            self._detail(f"reply: {clean(record.text) or '(empty)'}", "green")
        for note in self._notes(done):
            self._detail(f"note: {clean(note)}", "yellow")

    def finish(self) -> None:
        """Print the totals of all turns that computed."""
        ran = [d.record for d in self._done if d.record.ttft_ms is not None]
        self._print(Text(""))
        if not ran:
            self._print(Text("nothing was computed: no turn generates or decides", "bold"))
            return
        computed = sum(record.tokens.computed for record in ran)
        total = sum(record.tokens.total for record in ran)
        ttft = sum(record.ttft_ms or 0.0 for record in ran)
        answers = f"{len(ran)} answer{'' if len(ran) == 1 else 's'}"
        self._print(
            Text(
                f"{answers}: computed {computed:,} tokens, full prefills compute {total:,}: "
                f"{total / max(1, computed):.1f}x",
                "bold",
            )
        )
        if self._compare:
            full = sum(record.full_ttft_ms or 0.0 for record in ran)
            line = f"TTFT {ms(ttft)} ms in all, full prefills {ms(full)} ms: {full / ttft:.1f}x"
        else:
            line = f"TTFT {ms(ttft)} ms in all"
        self._print(Text(line, "bold"))

    def _cells(self, record: TurnRecord) -> dict[str, str]:
        tokens = record.tokens
        return {
            "strategy": record.strategy,
            "plan": short_plan(record.plan, 11),
            "tokens": f"{tokens.total:,}",
            "reused": f"{tokens.reused:,}",
            "moved": f"{tokens.moved:,}",
            "computed": f"{tokens.computed:,}",
            "TTFT ms": ms(record.ttft_ms) if record.ttft_ms is not None else "waits",
            "exact": "yes" if record.exact else "no",
            "hit ms": ms(record.prefix_hit_ttft_ms),
            "full ms": ms(record.full_ttft_ms),
            "speedup": "-" if record.speedup is None else f"{record.speedup:.1f}x",
        }

    def _row(self, cells: dict[str, str]) -> str:
        parts = [
            cells[column.name].ljust(column.width)
            if column.kind == _LEFT
            else cells[column.name].rjust(column.width)
            for column in self._columns
        ]
        return "".join(parts).rstrip()

    def _decision(self, record: TurnRecord) -> None:
        decision = record.decision
        assert decision is not None
        scores = ", ".join(
            f"{clean(name)} {'-' if score is None else f'{score:.2f}'}"
            for name, score in decision.choices.items()
        )
        line = Text.assemble("decision: ", (clean(decision.chosen), "bold green"), f"  ({scores})")
        if decision.clean_chosen is not None:
            line.append(f"; clean: {clean(decision.clean_chosen)}")
        if decision.stale_chosen is not None:
            line.append(f"; stale: {clean(decision.stale_chosen)}")
        if decision.recovery is not None:
            line.append(f"; recovery {decision.recovery:.2f}")
        self._detail(line)

    def _notes(self, done: Done) -> list[str]:
        """Return why another strategy was taken, and what was not said at an earlier turn."""
        rewrote = (f"the template rewrote {text}" for text in done.record.template_rewrote)
        new = [note for note in (*done.notices, *rewrote) if note not in self._noted]
        self._noted.update(new)
        reason = done.record.fallback_reason
        return [reason, *new] if reason else new

    def _detail(self, line: str | Text, style: str = "") -> None:
        text = line if isinstance(line, Text) else Text(line, style)
        self._print(text, INDENT)

    def _print(self, line: Text, indent: int = 0) -> None:
        print_wrapped(self._console, line, indent)


def print_wrapped(console: Console, line: Text, indent: int = 0) -> None:
    """Print a line, or more where it is longer than the console is wide."""
    if not line:
        console.print()
        return
    for part in line.wrap(console, console.width - indent):
        part.rstrip()
        console.print(Text(" " * indent).append_text(part))


def clean(text: str, newline: str = "\n") -> str:
    """Return text that a terminal shows and does not obey."""
    shown = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text.replace("\t", " "))
    return shown.replace("\n", newline)


def ms(value: float | None) -> str:
    """Return milliseconds with three digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def short_plan(shape: str, width: int) -> str:
    """Return a plan's shape, its middle left out where it is too long."""
    if len(shape) <= width:
        return shape
    steps = shape.split()
    return f"{steps[0]} {steps[1]} .. {steps[-1]}"


def _fidelity(record: TurnRecord) -> str:
    assert record.fidelity is not None
    same, live = record.fidelity.same_tokens, record.fidelity.clean

    def part(name: str, report: Fidelity) -> str:
        equal = "equal" if report.top1_agree else "differs"
        return f"{kl(report.kl_nats)} to {name} (top-1 {equal})"

    parts = [part("same tokens", same), part("clean", live)]
    if same.floor_kl_nats is not None:
        parts.append(f"floor {kl(same.floor_kl_nats)}")
    return f"KL nats: {', '.join(parts)}; {'exact' if record.exact else 'approximate'}"


def kl(value: float | None) -> str:
    """Return a divergence, plain where that is short."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"

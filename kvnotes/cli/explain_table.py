"""The text output of `kvnotes explain`: a row of numbers for each turn, then its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from kvnotes.cli.explain import Explained
from kvnotes.cli.explain_records import (
    CostRecord,
    Covered,
    SegmentPlan,
    StepPlan,
    Totals,
    TurnPlan,
    VerifyPlan,
)
from kvnotes.cli.table import INDENT, clean, ms, print_wrapped, short_plan

MAX_STEPS = 12
"""Longest list of steps that is shown whole; `--json` has all of them."""

_NUM_LAST_STEPS = 4

_LEGEND = (
    "R reused where it stands, R' reused at another position, C computed; [start, stop) in tokens",
    "predicted: to the first token; full: a prefill of the whole prompt",
    "waits: done together with the next turn that computes; shown is what it would take alone",
)

_NOTES = {
    "field_before_segment": (
        "a field stands before it, so its tokens hold no notes about the field",
        "a field stands before it: computed, so that it holds notes about the field",
    ),
    "below_break_even": ("", "too short for a splice to pay"),
    "not_compiled": ("", "no segment of this text and preamble is compiled"),
    "chunks_of": ("", "the model attends in chunks, and this part would stand otherwise in them"),
    "earlier_text_rewritten": ("", "the chat template shows earlier turns otherwise now"),
}
"""What notes of a plan mean: as they are, and with `:computed` at their end."""


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    width: int
    left: bool = False
    wide: bool = False


_COLUMNS = (
    _Column("strategy", 16, left=True),
    _Column("plan", 12, left=True),
    _Column("tokens", 7),
    _Column("reused", 8),
    _Column("moved", 7),
    _Column("computed", 9),
    _Column("exact", 7, wide=True),
    _Column("predicted ms", 14),
    _Column("full ms", 9, wide=True),
    _Column("speedup", 9, wide=True),
)
_WIDTH = INDENT + sum(column.width for column in _COLUMNS)


class ExplainTable:
    """Prints the plans of one scenario.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        wide = console.width >= _WIDTH
        self._wide = wide
        self._columns = [column for column in _COLUMNS if wide or not column.wide]

    def start(
        self,
        *,
        model: str,
        fingerprint: str,
        dtype: str,
        threads: int,
        versions: Mapping[str, str],
        cost: CostRecord,
        segments: Sequence[SegmentPlan],
    ) -> None:
        """Print what is explained, and the header of the rows."""
        plural = "" if threads == 1 else "s"
        self._print(
            Text.assemble(
                (model, "bold"), f"  {fingerprint[:12]}  {dtype}  {threads} thread{plural}"
            )
        )
        self._print(Text("  ".join(f"{name} {v}" for name, v in versions.items()), "dim"))
        self._print(Text("dry run: the model is loaded, and nothing of the scenario is computed"))
        self._print(Text(f"measured at load: {_cost(cost)}", "dim"))
        for line in _LEGEND:
            self._print(Text(line, "dim"))
        for segment in segments:
            self._print(Text(f"before the first turn: {_compile(segment)}"))
        self._print(Text(""))
        self._print(Text(" " * INDENT + self._row({c.name: c.name for c in _COLUMNS}), "bold"))

    def add(self, explained: Explained) -> None:
        """Print one turn."""
        record = explained.record
        title = Text(f"{record.turn:>{INDENT - 1}} {clean(explained.title, ' ')}", "bold")
        if record.waits:
            title.append(" (waits)", "dim")
        title.truncate(self._console.width, overflow="ellipsis")
        self._print(title)
        self._print(Text(" " * INDENT + self._row(_cells(record))))
        if not self._wide:
            exact = "exact" if record.exact else "approximate"
            self._detail(f"full {ms(record.full_predicted_ms)} ms: {record.speedup:.1f}x; {exact}")
        self._steps(record.steps)
        for line in _details(record):
            self._detail(line)
        for note in _notes(record):
            self._detail(f"note: {clean(note)}", "yellow")

    def finish(self, totals: Totals) -> None:
        """Print the sums over all turns that compute."""
        self._print(Text(""))
        if not totals.answers:
            line = "nothing would be computed: no turn generates or decides"
            self._print(Text(line, "bold"))
            return
        plural = "" if totals.answers == 1 else "s"
        ratio = totals.prompt_tokens / totals.computed_tokens
        self._print(
            Text(
                f"{totals.answers} answer{plural}: computes {totals.computed_tokens:,} tokens, "
                f"full prefills {totals.prompt_tokens:,}: {ratio:.1f}x",
                "bold",
            )
        )
        speedup = totals.full_predicted_ms / totals.predicted_ms
        self._print(
            Text(
                f"predicted {ms(totals.predicted_ms)} ms to the first tokens, full prefills "
                f"{ms(totals.full_predicted_ms)} ms: {speedup:.1f}x",
                "bold",
            )
        )
        self._print(
            Text(f"beside that: compiling {ms(totals.compile_predicted_ms)} ms, once", "bold")
        )

    def _steps(self, steps: Sequence[StepPlan]) -> None:
        shown = list(steps)
        num_left_out = 0
        if len(shown) > MAX_STEPS:
            num_left_out = len(shown) - MAX_STEPS + 1
            shown = [*shown[: MAX_STEPS - 1 - _NUM_LAST_STEPS], *shown[-_NUM_LAST_STEPS:]]
        width = max(len(_range(step)) for step in shown)
        for index, step in enumerate(shown):
            if num_left_out and index == len(shown) - _NUM_LAST_STEPS:
                self._detail(f"   ... {num_left_out} more steps, all in --json", "dim")
            size = f"{step.stop - step.start:,}"
            cost = f"{ms(step.predicted_ms)} ms" if step.predicted_ms else ""
            head = f"{step.step:<3}{_range(step):<{width}}{size:>8}{cost:>11}  "
            self._hanging(head, _covers(step))

    def _hanging(self, head: str, text: str) -> None:
        """Print a line whose continuation stands under its text."""
        room = max(20, self._console.width - INDENT - len(head))
        parts = Text(text).wrap(self._console, room) or [Text("")]
        for index, part in enumerate(parts):
            part.rstrip()
            lead = head if index == 0 else " " * len(head)
            self._console.print(Text(" " * INDENT + lead).append_text(part))

    def _row(self, cells: Mapping[str, str]) -> str:
        parts = [
            cells[column.name].ljust(column.width)
            if column.left
            else cells[column.name].rjust(column.width)
            for column in self._columns
        ]
        return "".join(parts).rstrip()

    def _detail(self, line: str, style: str = "") -> None:
        self._print(Text(line, style), INDENT)

    def _print(self, line: Text, indent: int = 0) -> None:
        print_wrapped(self._console, line, indent)


def _cells(record: TurnPlan) -> dict[str, str]:
    tokens = record.tokens
    return {
        "strategy": record.strategy,
        "plan": short_plan(record.plan, 11),
        "tokens": f"{tokens.total:,}",
        "reused": f"{tokens.reused:,}",
        "moved": f"{tokens.moved:,}",
        "computed": f"{tokens.computed:,}",
        "exact": "yes" if record.exact else "no",
        "predicted ms": ms(record.predicted_ms),
        "full ms": ms(record.full_predicted_ms),
        "speedup": f"{record.speedup:.1f}x",
    }


def _details(record: TurnPlan) -> list[str]:
    lines = []
    for seam in record.seams:
        size = seam.stop - seam.start
        plural = "" if size == 1 else "s"
        lines.append(
            f"seam: {size} token{plural} at {seam.start:,}, the first of segment "
            f"{clean(seam.segment)}, computed behind the real prefix"
        )
    lines.append(f"evidence ({record.evidence_kind}): {clean(record.evidence)}")
    if record.fallback_reason is not None:
        lines.append(f"fallback: {clean(record.fallback_reason)}")
    if record.verify is not None:
        lines.append(_verify(record.strategy, record.verify))
    if record.scored_tokens:
        lines.append(
            f"selective: the model first scores {record.scored_tokens:,} notes (about "
            f"{ms(record.scoring_predicted_ms)} ms more); which of them it recomputes is not "
            "known before, they are spread evenly here"
        )
    lines += [f"compiles: {_compile(segment)}" for segment in record.compiles]
    if record.assumed_reply_tokens is not None:
        lines.append(f"reply assumed {record.assumed_reply_tokens:,} tokens")
    return lines


def _notes(record: TurnPlan) -> list[str]:
    notes = [f"{note}{meaning(note)}" for note in record.notes]
    return [*notes, *(f"the template rewrote {text}" for text in record.template_rewrote)]


def meaning(note: str) -> str:
    """Return what a note of a plan means, in brackets."""
    name, *rest = note.split(":")
    name = "chunks_of" if name.startswith("chunks_of_") else name
    if name not in _NOTES or not rest:
        return ""
    spliced, computed = _NOTES[name]
    text = computed if rest[-1] == "computed" else spliced
    return f" ({text})" if text else ""


def _verify(strategy: str, plan: VerifyPlan) -> str:
    refused = f"refuses {', '.join(plan.refused)} for certain; " if plan.refused else ""
    if not plan.needed:
        return f"verify {plan.level}: {refused}{strategy} needs no check"
    if plan.check_predicted_ms is None:
        check = f"checked by computing at most {plan.check_tokens:,} tokens"
    else:
        check = (
            f"compared with a clean prefill ({plan.check_tokens:,} tokens, about "
            f"{ms(plan.check_predicted_ms)} ms more)"
        )
    then = f"; if refused, then {', '.join(plan.may_follow)}" if plan.may_follow else ""
    return f"verify {plan.level}: {refused}{strategy} is {check}{then}"


def _covers(step: StepPlan) -> str:
    covered = ", ".join(_covered(item, values=step.step != "R") for item in step.covers)
    spliced = step.source is not None and step.source.startswith("segment:")
    return clean(f"{covered}, spliced" if spliced else covered, " ")


def _covered(covered: Covered, *, values: bool) -> str:
    name = covered.name or "generation prompt"
    fields = [f"{field}={value}" if values else field for field, value in covered.fields.items()]
    inner = ", ".join([*(f"segment {segment}" for segment in covered.segments), *fields])
    part = "" if covered.whole else "part of "
    return f"{part}{name} ({inner})" if inner else f"{part}{name}"


def _range(step: StepPlan) -> str:
    return f"[{step.start:,}, {step.stop:,})"


def _compile(segment: SegmentPlan) -> str:
    values = ", ".join(f"{name}={value}" for name, value in segment.variant.items())
    name = f"{segment.name} ({values})" if values else segment.name
    behind = f" behind {segment.preamble_tokens:,}" if segment.preamble_tokens else ""
    size = f"{clean(name)}, {segment.tokens:,} tokens{behind}"
    if segment.compiled:
        return f"segment {size}, is compiled already"
    return f"compile segment {size}, predicted {ms(segment.predicted_ms)} ms, once"


def _cost(cost: CostRecord) -> str:
    size = "" if cost.tokens_per_pass is None else f" of up to {cost.tokens_per_pass:,} tokens"
    return (
        f"{ms(cost.ms_per_pass)} ms a pass{size}, {cost.ms_per_token:.2f} ms a token and "
        f"{cost.ms_per_pair * 1000:.2f} ms for each 1,000 tokens it sees, "
        f"{ms(cost.ms_per_moved_token * 1000)} ms for 1,000 moved tokens"
    )

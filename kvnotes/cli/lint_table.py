"""The text output of `kvnotes lint`: a row for each finding or cause, its advice under it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvnotes.cli.lint_records import BestRecord, LintRecord, LogRecord, MissRecord
from kvnotes.cli.table import clean

INDENT = 6
MAX_MISSES = 10
"""First differences that are listed; --json has all."""

MAX_VALUE = 120
"""Characters of a value or of changed text that are shown."""

_KINDS = {"datetime": "date and time", "epoch": "epoch time", "process": "process, port"}
_NAMES = {"text": "a text", "scenario": "a scenario", "request": "a request", "log": "a log"}


class LintTable:
    """Prints one record.

    Args:
        console: Where to.
        record: What was found.
    """

    def __init__(self, console: Console, record: LintRecord) -> None:
        self._console, self._record = console, record
        self._mark = "~" if record.tokenizer is None else ""

    def show(self) -> None:
        """Print everything."""
        record = self._record
        head = f"{clean(record.name, ' ')}: taken as {_NAMES[record.taken_as]}"
        self._print(Text.assemble((head, "bold"), f", {self._tokens(record.num_tokens)} tokens"))
        if record.log is None:
            self._prompt()
        else:
            self._log(record.log)

    def _prompt(self) -> None:
        record = self._record
        if not record.findings:
            self._print(Text("nothing in it changes from request to request", "green"))
            return
        self._print(Text(""))
        head = f"{'place':>9}{'offset':>9}  {'kind':<15}{'tokens':>10}{'share':>7}  value"
        self._print(Text(head, "bold underline"))
        part = ""
        for finding in record.findings:
            if finding.part != part:
                part = finding.part
                self._print(Text(clean(part, " "), "bold"))
            place = f"{finding.line}:{finding.column}"
            row = (
                f"{place:>9}{finding.start:>9,}  {_KINDS.get(finding.kind, finding.kind):<15}"
                f"{self._tokens(finding.num_invalidated_tokens):>10}{finding.share:>7.0%}  "
            )
            self._row(row, _short(finding.text))
            self._print(Text(finding.advice, "dim"), INDENT)
        self._print(Text(""))
        num, first = len(record.findings), record.findings[0]
        what = "1 value changes" if num == 1 else f"{num} values change"
        self._print(
            Text(
                f"{what} from request to request; a new one at {first.line}:{first.column} "
                f"invalidates {self._tokens(record.num_invalidated_tokens)} of "
                f"{self._tokens(record.num_tokens)} tokens ({first.share:.0%})",
                "bold",
            )
        )
        self._best(record.best)

    def _log(self, log: LogRecord) -> None:
        record = self._record
        self._print(
            Text(
                f"{_counted(log.num_requests, 'request')}, {log.num_compared} compared with the "
                "one that it continues"
            )
        )
        lost = record.num_invalidated_tokens
        share = lost / log.num_reusable_tokens if log.num_reusable_tokens else 0.0
        self._print(
            Text(
                f"{self._tokens(log.num_reusable_tokens)} tokens were computed before; "
                f"{self._tokens(lost)} of them ({share:.0%}) stand behind a difference"
            )
        )
        if not log.causes:
            self._print(Text("requests only append to the ones before them", "green"))
            return
        self._print(Text(""))
        head = f"{'what differs':<20}{'requests':>10}{'tokens':>12}{'share':>7}{'saves':>12}  where"
        self._print(Text(head, "bold underline"))
        for cause in log.causes:
            row = (
                f"{_KINDS.get(cause.kind, cause.kind):<20}{cause.num_requests:>10,}"
                f"{self._tokens(cause.num_invalidated_tokens):>12}{cause.share:>7.0%}"
                f"{self._tokens(cause.num_saved_tokens):>12}  "
            )
            self._row(row, clean(cause.part, " "))
            shown = f"request {cause.request}: {_short(cause.old)} -> {_short(cause.new)}"
            self._print(Text(shown), INDENT)
            self._print(Text(cause.advice, "dim"), INDENT)
        self._misses(log.misses)
        self._best(record.best)

    def _misses(self, misses: list[MissRecord]) -> None:
        self._print(Text(""))
        self._print(Text("first differences", "bold"))
        for miss in misses[:MAX_MISSES]:
            self._print(
                Text(
                    f"request {miss.request} after {miss.previous}: {clean(miss.part, ' ')} "
                    f"{miss.line}:{miss.column}, {_KINDS.get(miss.kind, miss.kind)}, "
                    f"{self._tokens(miss.num_invalidated_tokens)} of "
                    f"{self._tokens(miss.num_shared_tokens)} shared tokens"
                ),
                2,
            )
        if len(misses) > MAX_MISSES:
            self._print(Text(f"and {len(misses) - MAX_MISSES:,} more; --json has all"), 2)
        self._print(Text(""))

    def _best(self, best: BestRecord | None) -> None:
        if best is None:
            return
        kind = _KINDS.get(best.kind, best.kind)
        where = f" in {clean(best.part, ' ')}" if best.part else ""
        saves = self._tokens(best.num_saved_tokens)
        self._print(
            Text(f"best single change, saves {saves} tokens: {kind}{where}: {best.advice}", "bold")
        )

    def _tokens(self, number: int) -> str:
        return f"{self._mark}{number:,}"

    def _row(self, row: str, last: str) -> None:
        """Print a row on one line, its last cell cut to the width."""
        text = Text(row + last)
        text.truncate(self._console.width, overflow="ellipsis")
        self._console.print(text)

    def _print(self, line: Text, indent: int = 0) -> None:
        if not line:
            self._console.print()
            return
        for part in line.wrap(self._console, self._console.width - indent):
            part.rstrip()
            self._console.print(Text(" " * indent).append_text(part))


def _short(text: str) -> str:
    """Return text on one line, cut where it is long; nothing has a name."""
    shown = clean(text, " ").strip()
    if not shown:
        return "(nothing)"
    return shown if len(shown) <= MAX_VALUE else f"{shown[: MAX_VALUE - 3]}..."


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

"""What a rule of the lint is: a pattern, and a judge who looks at what stands round a match."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvnotes.lint.context import Context
from kvnotes.lint.findings import Kind

Judge = Callable[["re.Match[str]", Context], "Kind | None"]
"""Says what kind of volatile value a match is, or None."""

LONGEST_PREFIX = 32


@dataclass(frozen=True, slots=True)
class Rule:
    """One family of values.

    Attributes:
        pattern: Where such a value may stand. Its group `value`, if it has one, is the value.
            Every repetition in it is bounded, so that a search takes time linear in the text.
        judge: Decides by context.
        prefix: What belongs to the value if it stands before it; ends with `$`.
    """

    pattern: re.Pattern[str]
    judge: Judge
    prefix: re.Pattern[str] | None = None

    def range_of(self, match: re.Match[str]) -> tuple[int, int]:
        """Return where the value of a match starts and stops."""
        start, stop = match.span("value" if "value" in self.pattern.groupindex else 0)
        if self.prefix is not None:
            found = self.prefix.search(match.string, max(0, start - LONGEST_PREFIX), start)
            start = found.start() if found else start
        return start, stop

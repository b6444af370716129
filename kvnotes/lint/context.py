"""What stands round a value: the words that say whether it is filled in at run time.

Owns the words, in several languages, and the parts of a text that are examples or code. The
cue nearest before a value decides: "today is" makes a date volatile, "placed before" makes it
a rule's own. Does not know what values look like.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvnotes.lint import words

BEFORE = 96
"""Most characters before a value that are looked at, on its line."""

AFTER = 40
"""Most characters after it."""

Cue = Literal["live", "stable"]


def _words(latin: str, other: str = "(?!)") -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_])(?:{latin})(?![^\W_])|{other}", re.VERBOSE)


_LIVE = _words(words.LIVE, words.LIVE_CJK)
_STAMP = _words(f"{words.LIVE} | {words.STAMP}", words.LIVE_CJK)
_STABLE = _words(words.STABLE, words.STABLE_CJK)
_EXAMPLES = re.compile(words.EXAMPLE, re.VERBOSE)
_EXAMPLES_AFTER = re.compile(words.EXAMPLE_BEHIND)
_IT_IS = re.compile(
    r"(?:^|[\s,.(])(?:it['\u2019]s|it is|es ist|il est|son las|es la una|são|sono le|het is"
    r"|klockan är)(?: already| now| currently)?\s*$"
)
_CONDITION = re.compile(
    r"(?<![^\W_])(?:if|unless|whether|when|once|wenn|falls|si|se|quando|als|jeśli)(?![^\W_])[^,:]*$"
)
_SENTENCE_END = re.compile(r"(?<=[^\W_\d][^\W_])[.!?;]\s|(?<=[\d)\]\"'%])[.!?;]\s|[|\u3002\uff1b]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINERS = re.compile(r"[_\-]")

_DECORATION = " \t\"'`\u201c\u201d\u2018\u2019\u00ab([{<*~#\\"
_SEPARATOR = re.compile(
    r"(?:=>|->|\u2192|[:=>\uff1a])$|(?<![^\W_])(?:is|was|are)(?: now| at| currently)?$"
)
_CLAUSE = re.compile(r"[,;{}()\[\]<>|&?\"'`:=\uff1a\uff0c\uff08]|\.\s")
_INTRODUCING = (":", "=", ">", "[", "(", "|", "\uff1a", "\uff08")
_ASIDE = re.compile(r"\s?\([^()]{0,24}\)$")
_PARENT = re.compile(r"(\w{1,40})[\"']?\s?[:=]\s?\{\s?[\"']?(?:id|ID)$")
_CALL = re.compile(r"[\w\])]\([^()]{0,60}$")

_KEYWORD = re.compile(
    r"\s*(?:>>> |\.\.\. |\$ |% )?(?:assert|def|class|return|raise|import|from|const|let|var|async"
    r"|function|public|private|static|if|elif|for|while|with|print|expect|it|test|describe|SELECT"
    r"|INSERT|UPDATE|DELETE|CREATE|ALTER|git|pip|npm|docker|kubectl|curl|export|FROM|RUN|ENV)\b"
)
_CODE_MARK = re.compile(r"[\w\])]\(|[;{]\s*$|==|!=|<=|>=| = |=>|:=|\(\)|(?<!\w)--?[a-z]")
_ASSIGNED = re.compile(r"\s*(?:export )?[A-Za-z_][\w.]{0,60} = [\"'\d]")
_LOG_LINE = re.compile(
    r"\W{0,4}(?:[A-Z]{4,8} |[A-Z]\d{4} )?(?:\d{4}[-/]\d\d[-/]\d\d[T ]|\d\d:\d\d:\d\d"
    r"|[A-Z][a-z]{2},? +\d{1,2} (?:[A-Z][a-z]{2} \d{4} )?\d\d:\d\d)"
)
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|TRACE)\b|\blevel[\"']?[=:]")
_FENCE = re.compile(r"[ \t]{0,3}(?:```|~~~)[ \t]{0,3}([\w+#.-]{0,24})")
_DATA_FENCES = frozenset(
    ("", "text", "txt", "log", "logs", "json", "yaml", "xml", "env", "console")
)
_HEADING = re.compile(r"[ \t]{0,3}(#{1,6})[ \t]+(.{0,120})")
_EXAMPLE_HEADING = re.compile(r"\b(?:examples?|samples?|few-shot|formats?|beispiele?|exemples?)\b")
_TAG = re.compile(r"[ \t]{0,16}<(/?)(?:examples?|sample|few[-_]shot)\b")


@dataclass(frozen=True)
class Context:
    """What stands round one value.

    Attributes:
        before: Up to `BEFORE` characters of its line before it.
        after: Up to `AFTER` characters of its line after it.
        line_head: The beginning of its line.
        lead: If it begins its line, the heading or the line with a colon right above it.
        at_line_start: Nothing but marks stands before it on its line.
    """

    before: str
    after: str
    line_head: str
    lead: str
    at_line_start: bool

    @cached_property
    def sentence(self) -> str:
        """Words before the value in its own sentence, lower case, joined names taken apart."""
        end = max((match.end() for match in _SENTENCE_END.finditer(self.before)), default=0)
        return plain(f"{self.lead} {self.before[end:]}" if self.lead else self.before[end:])

    @cached_property
    def is_example(self) -> bool:
        """The text calls it an example or a format."""
        if _EXAMPLES.search(self.sentence):
            return True
        return bool(_EXAMPLES_AFTER.search(plain(self.after)))

    @cached_property
    def is_call(self) -> bool:
        """It is written between the parentheses of a call."""
        return bool(_CALL.search(self.before))

    @cached_property
    def is_code(self) -> bool:
        """Its line is a statement of a program."""
        head = self.line_head
        if self.is_call or _ASSIGNED.match(head):
            return True
        return bool(_KEYWORD.match(head) and _CODE_MARK.search(head))

    @cached_property
    def is_labelled(self) -> bool:
        """It begins its line, or stands behind a colon, an equals sign or a bracket."""
        if self.at_line_start:
            return True
        head = self.before.rstrip(" \t\"'`*")
        return head.endswith(_INTRODUCING)

    @cached_property
    def is_log(self) -> bool:
        """Its line begins like one of a log, or has a level."""
        return bool(_LOG_LINE.match(self.line_head) or _LEVEL.search(self.line_head))

    def cue(self, *, stamp: bool = False, behind: bool = True) -> Cue | None:
        """Return what the nearest cue says, first before the value, then behind it.

        Args:
            stamp: Words like "generated" and "updated" count as well; they do for a time of
                day, which a document's own date has not.
            behind: Whether to look behind the value.
        """
        live = _STAMP if stamp else _LIVE
        if _CONDITION.search(self.sentence):
            return "stable"
        if _IT_IS.search(self.sentence):
            return "live"
        last_live = max((m.end() for m in live.finditer(self.sentence)), default=-1)
        last_stable = max((m.end() for m in _STABLE.finditer(self.sentence)), default=-1)
        if last_live >= 0 or last_stable >= 0:
            return "live" if last_live >= last_stable else "stable"
        if not behind:
            return None
        tail = plain(_SENTENCE_END.split(self.after, maxsplit=1)[0])
        first_live, first_stable = live.search(tail), _STABLE.search(tail)
        if first_live and (not first_stable or first_live.start() < first_stable.start()):
            return "live"
        return "stable" if first_stable else None

    @cached_property
    def label(self) -> Label:
        """The words that name the value."""
        text = self.before.rstrip(_DECORATION)
        separator = _SEPARATOR.search(text)
        if separator:
            text = text[: separator.start()].rstrip(_DECORATION + "]}")
        text = _ASIDE.sub("", text)
        clause = _CLAUSE.split(text[-72:])[-1]
        if clause.strip() in ("id", "ID") and (parent := _PARENT.search(text)):
            clause = f"{parent[1]} {clause}"
        return Label(tuple(plain(clause).split()[-6:]), separator[0] if separator else "")


@dataclass(frozen=True, slots=True)
class Label:
    """The words right before a value.

    Attributes:
        words: Up to six, lower case: `"serverTime_ms": ` gives server, time, ms.
        separator: The colon, equals sign or "is" between them and the value; "" if none is.
    """

    words: tuple[str, ...]
    separator: str

    @property
    def separated(self) -> bool:
        """Whether something stands between the words and the value."""
        return bool(self.separator)

    @property
    def punctuated(self) -> bool:
        """Whether that is a sign, and not a word."""
        return self.separated and not self.separator[0].isalpha()

    def has(self, words: frozenset[str]) -> bool:
        """Whether one of the words is in it."""
        return not words.isdisjoint(self.words)

    @property
    def last(self) -> str:
        """The word nearest to the value."""
        return self.words[-1] if self.words else ""


def plain(text: str) -> str:
    """Return text in lower case, with camelCase, snake_case and dashes taken apart."""
    return _JOINERS.sub(" ", _CAMEL.sub(" ", text)).lower()


class Surroundings:
    """The lines of a text, and which of them are examples or code."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", text))]
        quiet = list(_quiet_lines(self._lines()))
        self._quiet = [start for start, _ in quiet], [stop for _, stop in quiet]

    def line_of(self, position: int) -> int:
        """Return the line of a character, from 0."""
        return bisect_right(self.line_starts, position) - 1

    def is_quiet(self, position: int) -> bool:
        """Whether a character stands in a block of examples or of code."""
        starts, stops = self._quiet
        index = bisect_right(starts, position) - 1
        return index >= 0 and position < stops[index]

    def context(self, start: int, stop: int) -> Context:
        """Return what stands round the characters from `start` to `stop`."""
        line = self.line_of(start)
        head = self.line_starts[line]
        following = self.line_starts[line + 1 : line + 2]
        end = following[0] - 1 if following else len(self._text)
        before = self._text[max(head, start - BEFORE) : start]
        at_start = head >= start - BEFORE and not before.strip(" \t>[(")
        return Context(
            before=before,
            after=self._text[stop : min(end, stop + AFTER)],
            line_head=self._text[head : min(end, head + 2 * BEFORE)],
            lead=self._lead(line) if at_start else "",
            at_line_start=at_start,
        )

    def _lead(self, line: int) -> str:
        """Return the nearest line above that is not empty, if it introduces what follows."""
        for above in range(line - 1, max(-1, line - 3), -1):
            start, stop = self.line_starts[above], self.line_starts[above + 1]
            text = self._text[max(start, stop - BEFORE) : stop].strip()
            if text:
                return text if text.endswith((":", "\uff1a")) or _HEADING.match(text) else ""
        return ""

    def _lines(self) -> Iterator[tuple[int, int, str]]:
        ends = [*self.line_starts[1:], len(self._text)]
        for start, end in zip(self.line_starts, ends, strict=True):
            yield start, end, self._text[start : min(end, start + 160)]


def _quiet_lines(lines: Iterator[tuple[int, int, str]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of lines in fences of code, example sections and example tags."""
    in_fence, code_fence, tag_depth, level = False, False, 0, 0
    for start, end, line in lines:
        if fence := _FENCE.match(line):
            code_fence = not in_fence and fence[1].lower() not in _DATA_FENCES
            in_fence = not in_fence
        elif not in_fence and (heading := _HEADING.match(line)):
            depth = len(heading[1])
            if not level or depth <= level:
                level = depth if _EXAMPLE_HEADING.search(heading[2].lower()) else 0
        elif tag := _TAG.match(line):
            tag_depth = max(0, tag_depth + (-1 if tag[1] else 1))
        if (in_fence and code_fence) or tag_depth or level:
            yield start, end

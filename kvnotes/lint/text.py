"""The lint of one prompt: which of its values change from request to request.

Owns the search, which of several overlapping values counts, and what each invalidates: a prefix
cache is of no use from a changed token on, to the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvnotes.lint import durations, ids, numbers, times
from kvnotes.lint.context import Surroundings
from kvnotes.lint.findings import Finding, Kind, advice_for
from kvnotes.lint.tokens import CountTokens, suffix_counter

RULES = (*times.RULES, *ids.RULES, *durations.RULES, *numbers.RULES)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt that is one text, such as a message.

    Attributes:
        text: The text.
        name: What to call it, such as `messages[0] system`; "" if it is the whole prompt.
        is_history: It stays as it was sent, so what it holds does not change; not searched.
    """

    text: str
    name: str = ""
    is_history: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A volatile value: where it stands in a text, and what it is."""

    start: int
    stop: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Saving:
    """What the best single change of a prompt is worth.

    Attributes:
        finding: The first place of the value to change.
        num_tokens: Tokens that it invalidates and no other value does.
    """

    finding: Finding
    num_tokens: int


def lint_text(
    text: str, *, count_tokens: CountTokens | None = None, ignore: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Find the values of a prompt that change from request to request.

    Args:
        text: The prompt.
        count_tokens: `count_tokens(text, start)` returns the tokens of `text` from the one that
            holds character `start` on. None estimates them from the number of bytes.
        ignore: Kinds that are not reported.

    Returns:
        The findings in order; none overlap.

    Example:
        >>> [f.text for f in lint_text("Today is 2024-05-14. Orders placed before 2024-01-31 ...")]
        ['2024-05-14']
    """
    return lint_parts((Part(text),), count_tokens=count_tokens, ignore=ignore)


def lint_parts(
    parts: Sequence[Part],
    *,
    count_tokens: CountTokens | None = None,
    ignore: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Find the volatile values of a prompt that is given in parts, in the order of the prompt.

    Args:
        parts: The parts; each is searched alone.
        count_tokens: As in `lint_text`; called on each part.
        ignore: Kinds that are not reported.

    Returns:
        The findings in the order of the prompt.
    """
    counters = [suffix_counter(part.text, count_tokens) for part in parts]
    totals = [counter(0) for counter in counters]
    total, behind = sum(totals), sum(totals)
    findings: list[Finding] = []
    for part, counter, own in zip(parts, counters, totals, strict=True):
        behind -= own
        if part.is_history:
            continue
        surroundings = Surroundings(part.text)
        for value in find_values(part.text, surroundings):
            if value.kind in ignore:
                continue
            num_tokens = counter(value.start) + behind
            line = surroundings.line_of(value.start)
            findings.append(
                Finding(
                    kind=value.kind,
                    part=part.name,
                    start=value.start,
                    stop=value.stop,
                    text=part.text[value.start : value.stop],
                    line=line + 1,
                    column=value.start - surroundings.line_starts[line] + 1,
                    num_invalidated_tokens=num_tokens,
                    share=num_tokens / total if total else 0.0,
                    advice=advice_for(value.kind),
                )
            )
    return tuple(findings)


def best_saving(findings: Sequence[Finding]) -> Saving | None:
    """Return the change that saves most: without the first value, the second one is the first.

    Args:
        findings: Of one prompt, in order. Those of one kind and text are one change.
    """
    if not findings:
        return None
    first = findings[0]
    others = (f for f in findings if (f.kind, f.text) != (first.kind, first.text))
    left = next((other.num_invalidated_tokens for other in others), 0)
    return Saving(first, first.num_invalidated_tokens - left)


def find_values(text: str, surroundings: Surroundings | None = None) -> list[Value]:
    """Return the volatile values of a text in order, none overlapping.

    Args:
        text: The text.
        surroundings: Of this text, if they are known.
    """
    around = surroundings or Surroundings(text)
    found = sorted(_matches(text, around), key=lambda v: (v.start, -v.stop))
    result: list[Value] = []
    for value in found:
        if result and value.start < result[-1].stop:
            # of two that overlap the longer one says what both are
            if value.stop - value.start > result[-1].stop - result[-1].start:
                result[-1] = value
            continue
        result.append(value)
    return result


def _matches(text: str, around: Surroundings) -> Iterator[Value]:
    for rule in RULES:
        for match in rule.pattern.finditer(text):
            start, stop = rule.range_of(match)
            if around.is_quiet(start):
                continue
            kind = rule.judge(match, around.context(start, stop))
            if kind is not None:
                yield Value(start, stop, kind)

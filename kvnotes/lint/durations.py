"""Numbers with a unit of time that were measured: elapsed, taken, left, ago.

Owns which words make a duration a measured one. One that a rule sets ("within 30 days", "a
timeout of 30 s") is not.
"""

from __future__ import annotations

import re

from kvnotes.lint.context import Context
from kvnotes.lint.findings import Kind
from kvnotes.lint.rules import Rule
from kvnotes.lint.words import LIMITS, word_set

_UNIT = (
    r"(?:ms|milliseconds?|µs|us|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|weeks?"
    r"|months?)"
)
_SPAN = re.compile(
    rf"(?<![\w.,/#$-])(?<!\d:)\d{{1,9}}(?:\.\d{{1,6}})?\s?(?P<unit>{_UNIT})"
    rf"(?:\s\d{{1,4}}\s?{_UNIT}){{0,3}}(?:\s(?P<ago>ago))?(?!\w)"
)
_SHORT_UNITS = word_set("ms us µs s sec secs second seconds milliseconds")
ELAPSED = word_set("uptime elapsed took latency age runtime duration cached")
WORKING = word_set("execution processing query wall cpu inference generation response request")
_LEFT_WORDS = word_set("used remaining left consumed spent")
CONDITIONAL = re.compile(r"\b(?:if|when|unless|once|who|than|least|most|within|every|wenn|si)\b")
_LEFT = re.compile(r"\s(?:left(?!\s(?:of|and|to|turn))|remaining|so far)\b")
_RESULT = re.compile(
    r"\b(?:[a-z]{2,20}ed|done|exit code|ran|built|took|read|wrote)(?:\s\S{1,20}){0,3}?"
    r"(?:\sin|\sfor|\safter|\s?\()\s?$|\b(?:has|have) (?:lasted|been \w{2,20}ing for)\s$"
    r"|\bis running for\s$"
)
_PERFECT = re.compile(r"\b(?:has|have|is)\b")
_RULE = re.compile(r"\b(?:is|are|be|will|must|should|may|can|get|gets|shall)\b")


def _span(match: re.Match[str], context: Context) -> Kind | None:
    label = context.label
    limited = label.has(LIMITS) and label.last != "up"
    measured = match["ago"] or (
        not limited
        and (
            _is_labelled(match["unit"], context)
            or _LEFT.match(context.after)
            or _is_result(match["unit"], context)
        )
    )
    if not measured or CONDITIONAL.search(context.sentence):
        return None
    return None if context.is_example or context.is_code else "duration"


def _is_labelled(unit: str, context: Context) -> bool:
    """Whether the words right before it say that it was measured."""
    label = context.label
    if unit in _SHORT_UNITS and (context.is_log or (label.last == "time" and label.has(WORKING))):
        return True
    if label.last in ELAPSED or (label.separated and label.has(ELAPSED)):
        return True
    return label.last == "up" or (label.punctuated and label.has(_LEFT_WORDS))


def _is_result(unit: str, context: Context) -> bool:
    """Whether something was done in that time: "finished in 1.2 s", "has lasted 5 minutes"."""
    if unit not in _SHORT_UNITS and not _PERFECT.search(context.sentence):
        return False
    done = _RESULT.search(context.sentence)
    return done is not None and not _RULE.search(context.sentence[: done.start()])


RULES = (Rule(_SPAN, _span),)

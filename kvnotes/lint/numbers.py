"""Plain numbers that name something of one run, by the words before them.

Owns epoch times, process and port numbers, random seeds and long numeric ids, and hands what
counts to `counts`. A number alone is never volatile.
"""

from __future__ import annotations

import re

from kvnotes.lint.context import Context
from kvnotes.lint.counts import is_counter
from kvnotes.lint.durations import ELAPSED, WORKING
from kvnotes.lint.findings import Kind
from kvnotes.lint.ids import EPHEMERAL_PORT
from kvnotes.lint.rules import Rule
from kvnotes.lint.words import LIMITS, word_set

_NUMBER = re.compile(
    r"(?<![\w.,/$€£+-])(?<!\d:)[$€£]?\d{1,3}(?:(?:,\d{3}){1,6}|\d{0,17})(?:\.\d{1,9})?[kKM]?%?"
    r"(?![\w%]|[.,:]\d)"
)
_BRACKETED = re.compile(
    r"(?:(?<![\w.-])[A-Za-z][\w.-]{0,31}\[(?=\d{2,7}\]:)|\s#)(?P<value>\d{2,7})\]"
)
_TIMES = word_set(
    "ts timestamp time now epoch clock date expires exp iat nbf unix created updated generated "
    "fetched issued started reset seen"
)
_RUNNING = word_set("elapsed uptime")
_UNITS = word_set("ms us sec secs seconds s millis")
_PROCESSES = word_set("pid tid")
_TASKS = word_set("process thread")
_RECORDS = word_set("order product item user customer")
_NAMES = _TIMES | _RUNNING | _UNITS | _PROCESSES | _TASKS | word_set("port seed id")
"""A label without any of them names no such number."""

MIN_SEED_DIGITS = 5
"""Shorter seeds, such as 42, are chosen by people, who keep them."""

MIN_ID_DIGITS = 17
"""A numeric id this long has a time in it; shorter ones number records."""


def _number(match: re.Match[str], context: Context) -> Kind | None:
    text = match[0]
    kind: Kind | None = None
    if context.label.has(_NAMES) or context.before.endswith("["):
        kind = _named(text, context)
    if kind is None and is_counter(text, context):
        kind = "counter"
    return None if kind is None or context.is_example or context.is_code else kind


def _named(text: str, context: Context) -> Kind | None:
    """Return what the label of a plain number says it is."""
    if not text.replace(".", "", 1).isdigit():
        return None
    label, value = context.label, float(text)
    near = label.words[-2:]
    if _is_epoch(text) and not _TIMES.isdisjoint(label.words[-3:]):
        return "epoch"
    if _is_process(text, context):
        return "process"
    if "port" in near and EPHEMERAL_PORT <= value < 65536:
        return "process"
    if "seed" in label.words and len(text) >= MIN_SEED_DIGITS:
        return "seed"
    if "id" in label.words and len(text) >= MIN_ID_DIGITS and not label.has(_RECORDS):
        return "id"
    if label.separated and not label.has(LIMITS):
        timed = label.last in _UNITS and label.has(ELAPSED | WORKING)
        return "duration" if timed or label.has(_RUNNING) else None
    return None


def _is_epoch(text: str) -> bool:
    """Whether it has as many digits as seconds, milli-, micro- or nanoseconds since 1970."""
    whole, _, fraction = text.partition(".")
    long = len(whole) in (13, 16, 19) and not fraction
    return whole[0] in "12" and (len(whole) == 10 or long)


def _is_process(text: str, context: Context) -> bool:
    near = context.label.words[-2:]
    in_bracket = context.before.endswith("[")
    if context.is_log and in_bracket and context.after.startswith("]"):
        return len(text) >= 3
    if not _TASKS.isdisjoint(near) and (in_bracket or context.label.last == "id"):
        return True
    return text != "1" and not _PROCESSES.isdisjoint(near)


def _bracketed(match: re.Match[str], context: Context) -> Kind | None:
    named = not context.before.endswith("#") or context.is_log
    return "process" if named and not context.is_example else None


RULES = (Rule(_NUMBER, _number), Rule(_BRACKETED, _bracketed))

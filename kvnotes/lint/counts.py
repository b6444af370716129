"""Numbers that count up or down while a session runs: turns, attempts, tokens used, steps left.

Owns which words before and behind a number make it such a count. Limits ("at most 3 attempts")
and numbered parts of a text ("step 3: ask for the order") are none.
"""

from __future__ import annotations

import re

from kvnotes.lint.context import Context
from kvnotes.lint.durations import CONDITIONAL
from kvnotes.lint.words import LIMITS, word_set

_RUNS = word_set("iteration poll attempt retry")
_LOOPS = word_set("turn attempt retry iteration round step")
_SERIES = word_set(
    "run interaction exchange poll call session request message day game level question task epoch "
    "batch hand generation chunk sample"
)
_COUNTED = _LOOPS | word_set(
    "try message call request token query turns attempts retries tries iterations rounds steps "
    "messages calls requests tokens queries questions items tasks files pages tickets budget "
    "context cost quota credits"
)
_USED = word_set("used remaining left consumed spent far")
_QUALIFIERS = _USED | word_set(
    "user assistant total current sent received conversation prompt completion input output "
    "cached unread failed count session asked answered completed done processed handled pending "
    "open in out"
)
_COSTS = word_set("cost spend spent")
_LIVE = word_set("used remaining left unread pending")
_GAUGES = word_set("battery progress load usage")
_LEVELS = word_set("temperature balance level count score position queue users speed health")
NAMES = _LIVE | _SERIES | _GAUGES | _LEVELS | _COUNTED | _USED | _COSTS
"""A label without any of them names no count."""

_THIS_TURN = re.compile(
    r"\b(?:on|this is|current|now|conversation|now in|we are in|in your|your)\s(?:\w+\s)?\w+\s*"
    r"[#(\[]?$"
)
_THIS_ONE = re.compile(
    r"\b(?:this is|(?:we|you) are (?:now )?(?:in|at|on))(?: the)? \w+ (?:number )?#?$"
)
_MARKED = re.compile(r"\s{0,8}[-=*>]{1,8}\s{0,4}\w{4,9}\s#?$")
_OF = re.compile(r"\s?(?:of|/|von|de)\s?\d{1,6}\b(?P<heading>\s?:)?")
_LEFT_AFTER = re.compile(
    r"\s(?:more\s)?[a-z]{2,20}\s(?:left(?!\s(?:of|and|to|turn))|remaining|used so far|so far)\b"
    r"|\sso far\b|\s(?:previous|earlier|stored)\s(?:messages|turns|lines|entries|sessions)\b"
    r"|\smore\s(?:lines|messages|entries|results|turns)\b|\s(?:files?\schanged|insertions|deletions)\b"
    r"|\s(?:tokens|messages|requests|calls|steps|turns|queries)\s(?:used|today)\b",
    re.IGNORECASE,
)
_OF_THIS = re.compile(
    r"(?:\s[a-z]{2,20})?\s(?:of|in|with)\s(?:(?:this|your|our|the\scurrent)\s(?:chat|conversation"
    r"|session|run|game|thread|dialogue|customer|user)|(?:the\s)?queue)\b"
)
_HAS_USED = re.compile(
    r"\b(?:have|has|['\u2019]ve) (?:already |now )?(?:used|sent|made|spent|called|consumed)\s*$"
)
_NOUN_AFTER = re.compile(r"\s?(?:(?:of|/)\s?[\d,.]+[kKM]?\s)?(?P<noun>[A-Za-z]+)")
_PERCENT_AFTER = re.compile(r"\s(?:full|used|of (?:the|your) (?:window|context|budget))\b")
_WAY_AFTER = re.compile(
    r"\sof (?:the way (?:through|into) )?(?:the |your )?(?:context|budget|window)\b"
)


def is_counter(text: str, context: Context) -> bool:
    """Whether a number counts up or down while a session runs."""
    if context.label.has(LIMITS):
        return False
    named = context.label.has(NAMES) and (_is_turn(context) or _is_usage(text, context))
    return named or _is_left(text, context) or _is_way(text, context)


def _is_turn(context: Context) -> bool:
    """Whether it says which turn, attempt or step this is: "turn 17", "attempt 3 of 5"."""
    label = context.label
    if label.last not in _LOOPS and label.last not in _SERIES:
        return False
    if of := _OF.match(context.after):
        return of["heading"] is None
    if len(label.words) == 1 and label.last in _RUNS and not label.separated:
        return True
    if label.last in _SERIES:
        return bool(_THIS_ONE.search(context.sentence))
    if label.separated:
        return label.last != "step" or label.separator == "="
    bracket = context.before.lstrip().startswith("[") and context.after.startswith("]")
    marked = label.last != "step" and _MARKED.match(context.before)
    return bracket or bool(marked or _THIS_TURN.search(context.sentence))


def _is_usage(text: str, context: Context) -> bool:
    """Whether it is a label's count: "tokens used: 5123", "user_turns: 7"."""
    label = context.label
    if text.endswith("%") and _PERCENT_AFTER.match(context.after):
        return label.has(_COUNTED)
    if not label.separated:
        return False
    near = label.words[-2:] if label.last == "level" else label.words[-1:]
    if not _GAUGES.isdisjoint(near) or (label.has(_LEVELS) and "current" in label.words):
        return True
    if label.separator == "=" and label.last in _COSTS:
        return True
    if label.punctuated and label.has(_LIVE):
        return True
    if not label.has(_QUALIFIERS):
        return False
    return label.has(_COUNTED) or (label.has(_USED) and _noun_after(context) in _COUNTED)


def _is_left(text: str, context: Context) -> bool:
    """Whether it is what is left or used: "8 steps left", "you have used 12 of 40 steps"."""
    if text[0] in "$€£" and "so far" not in context.after:
        return False  # money that is left belongs to somebody
    left = _LEFT_AFTER.match(context.after) or _OF_THIS.match(context.after)
    if not left and _noun_after(context) not in _COUNTED:
        return False
    if CONDITIONAL.search(context.sentence):
        return False
    return bool(left or _HAS_USED.search(context.sentence))


def _is_way(text: str, context: Context) -> bool:
    return text.endswith("%") and bool(_WAY_AFTER.match(context.after))


def _noun_after(context: Context) -> str:
    """The noun that is counted: tokens in "12 tokens" and "12 of 40 tokens"."""
    found = _NOUN_AFTER.match(context.after)
    if found and found["noun"] == "more":
        found = _NOUN_AFTER.match(context.after[found.end() :])
    return found["noun"].lower() if found else ""

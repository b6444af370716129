"""Dates, times of day, and both together, in the notations of several languages.

Owns their patterns and when such a value is the reader's clock: a time stamp to the second is,
unless the words before it give it to a record or a rule; a date or a time alone is one only
behind words such as "today is". Epoch numbers are in `numbers`.
"""

from __future__ import annotations

import re

from kvnotes.lint import words
from kvnotes.lint.context import Context
from kvnotes.lint.findings import Kind
from kvnotes.lint.rules import Rule


def _longest_first(alternatives: str) -> str:
    """Alternatives with the longer ones first, so that "may" does not cut "mayo"."""
    return "|".join(sorted("".join(alternatives.split()).split("|"), key=len, reverse=True))


_MONTH = rf"(?:{_longest_first(words.MONTHS)})\.?"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_YEAR = r"(?:19|20)\d\d"
_WEEKDAY = rf"(?:{_longest_first(words.WEEKDAYS)})\.?"
_START = r"(?<![A-Za-z0-9_/.-])"
_ZONE = (
    r"(?:\s?(?:(?-i:Z|UTC|GMT|MSK|[A-Z]{1,3}[SD]?T)|Uhr|hrs))?(?:\s?[+-]\d\d:?\d\d)?"
    r"(?:\s?\((?-i:[A-Z]{3,4})\))?(?![A-Za-z0-9])"
)
_CLOCK = (
    r"(?P<clock>(?:[01]?\d|2[0-3])(?::[0-5]\d(?P<seconds>:[0-6]\d(?:[.,]\d{1,9})?)?"
    r"(?:\s?[ap]\.?m\b\.?)?|\s?[ap]\.?m\b\.?|\s?h\s?[0-5]\d|[時时](?:[0-5]?\d分(?:[0-5]?\d秒)?)?"
    r"|点(?:[0-5]?\d分?)?|시\s?[0-5]?\d분))"
)
_BEHIND = r"(?:T|,?\s{1,2}(?:at\s|um\s|à\s|a\slas\s|às\s|alle\s|ore\s|o\s|в\s|om\s|-\s|·\s)?)"
_DIGITS_FIRST = re.compile(
    rf"""{_START}(?:
    {_YEAR}(?P<mark>[-/.])(?:0?[1-9]|1[0-2])(?P=mark){_DAY}
    | {_DAY}(?P<sign>[-/.])(?:0?[1-9]|1[0-2])(?P=sign){_YEAR}
    | (?:0?[1-9]|1[0-2])/{_DAY}/{_YEAR}
    | {_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日일]
    | {_DAY}(?:st|nd|rd|th|er|\.|º|ª)?\s(?:de\s|of\s)?{_MONTH},?\s(?:de\s)?{_YEAR}
      (?:\s(?:\u0433\.|года|r\.))?
    )(?![\d/-]|\.\d)(?:{_BEHIND}{_CLOCK}{_ZONE})?""",
    re.VERBOSE | re.IGNORECASE,
)
_MONTH_FIRST = re.compile(
    rf"""{_START}(?=[^\W\d]{{3,12}}\.?\s{{1,2}}\d){_MONTH}\s{{1,2}}{_DAY}(?:st|nd|rd|th)?
    (?P<year>,?\s{_YEAR}(?!\d))?(?:{_BEHIND}{_CLOCK}{_ZONE}(?P<later_year>\s{_YEAR}(?!\d))?)?(?!\w)""",
    re.VERBOSE | re.IGNORECASE,
)
_LOG = re.compile(
    rf"{_START}{_DAY}[/-]{_MONTH}[/-]{_YEAR}[:\s][0-2]\d:[0-5]\d:[0-6]\d(?:\s[+-]\d{{4}})?",
    re.IGNORECASE,
)
_COMPACT = re.compile(
    rf"{_START}{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])[T_-]?"
    r"(?P<clock>[0-2]\d[0-5]\d[0-5]\d)(?:\.\d{1,6})?Z?(?![\w-])"
)
_TIME = re.compile(
    rf"(?<![A-Za-z0-9_/.,+-])(?<!\d:){_CLOCK}{_ZONE}(?![:A-Za-z0-9_])", re.IGNORECASE
)
_WEEKDAY_BEFORE = re.compile(
    rf"(?<!\w)(?:{_WEEKDAY},?\s(?:(?:der|den|le|the|el|il|dem)\s)?|the\s)$", re.IGNORECASE
)
_TODAY_IS = re.compile(
    r"(?:\btoday(?:['\u2019]?s date)?(?: it)?(?: is|:)|\bdate(?: is|:))(?: the)?\s?$"
)
_YEAR_NOW = re.compile(
    rf"(?:\bcurrent\s(?:calendar\s)?year(?:\sis)?|\byear\sis\s(?:now|currently)|aktuelles\sjahr"
    rf"(?:\sist)?|année\sactuelle(?:\sest)?|año\sactual(?:\ses)?)\W{{1,4}}(?P<value>{_YEAR})(?!\w)",
    re.IGNORECASE,
)
_DAY_NOW = re.compile(
    rf"\b(?:today(?:['\u2019]s\sday)?\sis|(?:week)?day(?:\sof\s(?:the\s)?week)?(?:\sis|[:\uff1a])"
    rf"|\bit\sis(?:\snow|\scurrently)?|\bit['\u2019]s(?:\snow|\scurrently)?"
    rf"|heute\sist|hoy\ses|oggi\sè|nous\ssommes)\s?(?:a\s|le\s)?(?P<value>{_WEEKDAY})(?!\w)",
    re.IGNORECASE,
)
_WEEKDAY_CJK = re.compile(
    r"(?:今天|今日|本日|오늘은?)\s?(?:是|は)?\s?(?P<value>(?:星期|周)[一二三四五六日天]|[月火水木金土日]曜日?|[월화수목금토일]요일)"
)
_MONTH_NOW = re.compile(
    rf"{_START}(?=[^\W\d]{{3,12}}\.?\s(?:de\s)?[12])(?P<value>{_MONTH}\s(?:de\s)?{_YEAR})(?!\w)",
    re.IGNORECASE,
)
_RANGE_AFTER = re.compile(
    r"\s?(?:[-~\u2013\u2014\u301c\uff5e至]|to\b|until\b|till\b|bis\b|à\b|a\b|through\b)\s?\d"
)
_RANGE_BEFORE = re.compile(
    r"\d\S{0,4}(?:\s[ap]\.?m\.?)?\s?(?:[-~\u2013\u2014\u301c\uff5e至]|\bto|\bbis|\bà|\band)\s?$"
)
_CONSTANT_CLOCKS = ("00:00:00", "23:59:59", "000000", "235959")
_DATE_LABELS = frozenset((("date",), ("env", "date"), ("datum",), ("fecha",), ("data",), ("дата",)))
_SPANS_OF_TIME = frozenset(("elapsed", "uptime", "duration", "runtime", "vergangen"))


def _quiet(context: Context) -> bool:
    return context.is_example or context.is_call


def _stamp(match: re.Match[str], context: Context) -> Kind | None:
    if match["clock"] is None:
        return _date(match, context)
    return _datetime(match["clock"], context, precise=match["seconds"] is not None)


def _month_first(match: re.Match[str], context: Context) -> Kind | None:
    if match["year"] or match["later_year"]:
        return _stamp(match, context)
    if match["seconds"]:  # system logs have no year
        return _datetime(match["clock"], context, precise=True)
    return "date" if _TODAY_IS.search(context.sentence) and not _quiet(context) else None


def _log(match: re.Match[str], context: Context) -> Kind | None:
    return _datetime(match[0], context, precise=True)


def _compact(match: re.Match[str], context: Context) -> Kind | None:
    return _datetime(match["clock"], context, precise=True)


def _datetime(clock: str, context: Context, *, precise: bool) -> Kind | None:
    """Judge a date with a time of day.

    Args:
        clock: The time of day.
        context: What stands round it.
        precise: A machine wrote it, to the second.
    """
    if _quiet(context) or clock.startswith(_CONSTANT_CLOCKS):
        return None
    cue = context.cue(stamp=True, behind=not precise)
    if cue is not None:
        return "datetime" if cue == "live" else None
    if context.is_code:
        return None
    return "datetime" if precise or context.is_labelled else None


def _date(match: re.Match[str], context: Context) -> Kind | None:
    if _quiet(context) or _is_range(context):
        return None
    if context.cue() == "live":
        return "date"
    label = context.label
    named = label.separated and label.words in _DATE_LABELS
    is_record = context.before.rstrip().endswith(('":', '": "', ': "'))
    return "date" if named and not is_record else None


def _time(match: re.Match[str], context: Context) -> Kind | None:
    if _quiet(context) or _is_range(context) or match[0].startswith(_CONSTANT_CLOCKS):
        return None
    if context.label.has(_SPANS_OF_TIME):
        return "duration"
    precise = match["seconds"] is not None
    cue = context.cue(stamp=True, behind=not (precise and context.at_line_start))
    if cue is not None:
        return "time" if cue == "live" else None
    if context.label.words[-1:] == ("time",) and context.label.separated:
        return "time"
    return "time" if context.at_line_start and precise else None


def _is_range(context: Context) -> bool:
    return bool(_RANGE_AFTER.match(context.after) or _RANGE_BEFORE.search(context.before))


def _now(match: re.Match[str], context: Context) -> Kind | None:
    return None if _quiet(context) else "date"


def _month(match: re.Match[str], context: Context) -> Kind | None:
    return "date" if not _quiet(context) and context.cue() == "live" else None


RULES = (
    Rule(_DIGITS_FIRST, _stamp, _WEEKDAY_BEFORE),
    Rule(_MONTH_FIRST, _month_first, _WEEKDAY_BEFORE),
    Rule(_LOG, _log),
    Rule(_COMPACT, _compact),
    Rule(_TIME, _time),
    Rule(_YEAR_NOW, _now),
    Rule(_DAY_NOW, _now),
    Rule(_WEEKDAY_CJK, _now),
    Rule(_MONTH_NOW, _month),
)

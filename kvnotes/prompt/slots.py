r"""The slot syntax of trusted text: `{{field}}`, `{{segment:name}}` and the escape `\{{`.

Owns parsing. Does not know values, messages or tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvnotes.errors import TemplateError

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
SEGMENT_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@/-]*"
_SLOT = re.compile(
    rf"(\\\{{\{{)|\{{\{{[ \t]*(?:segment:[ \t]*({SEGMENT_NAME})|({NAME}))[ \t]*\}}\}}|(\{{\{{)"
)


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of trusted text; `kind` is "field" or "segment"."""

    kind: str
    name: str


def parse(text: str, where: str) -> tuple[str | Slot, ...]:
    """Split trusted text into literal strings and slots.

    Args:
        text: Trusted text.
        where: What the text is, for the message of an error.

    Returns:
        Literals and slots in order; empty literals are left out.

    Raises:
        TemplateError: `{{` opens something that is no slot.
    """
    if "{{" not in text:
        return (text,) if text else ()
    parts: list[str | Slot] = []
    literal, done = "", 0
    for match in _SLOT.finditer(text):
        literal += text[done : match.start()]
        done = match.end()
        escape, segment, field, broken = match.groups()
        if broken:
            shown = text[match.start() : match.start() + 24]
            raise TemplateError(
                f"{where} has {shown!r} where a slot like {{{{name}}}} or {{{{segment:name}}}} "
                "should stand",
                hint="write \\{{ for literal braces, or mark the message as not trusted",
            )
        if escape:
            literal += "{{"
            continue
        if literal:
            parts.append(literal)
            literal = ""
        parts.append(Slot("segment", segment) if segment else Slot("field", field))
    literal += text[done:]
    if literal:
        parts.append(literal)
    return tuple(parts)


def escape(text: str) -> str:
    """Return trusted text that shows `text` as it is: its braces open no slot."""
    return text.replace("{{", "\\{{")

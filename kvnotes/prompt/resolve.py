"""From messages with slots to texts with marks.

Owns filling slots, the trust rules and escaping. Does not render.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvnotes.errors import MissingFieldError, TemplateError, UnknownFieldError, nearest
from kvnotes.prompt.escape import find_private
from kvnotes.prompt.messages import Field, Message, SegmentText
from kvnotes.prompt.slots import Slot, parse

if TYPE_CHECKING:
    from kvnotes.prompt.template import PromptTemplate
    from kvnotes.prompt.tokenizer import DecodedIds, PromptTokenizer

_ANY_LENGTH = 1 << 30


@dataclass(frozen=True, slots=True)
class Mark:
    """A named range of characters of a message's text."""

    kind: Literal["field", "segment"]
    name: str
    start: int
    stop: int
    value: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """One message as text.

    Args:
        id: Message id.
        role: Role it was written with.
        text: Content with all slots filled, or escaped.
        marks: Values and segments in `text`.
        trusted: Whether its text may hold control strings.
        segment: The segment the whole message is.
        ids: Generated ids.
        decoded: The same as text, without the end token.
        stop_word: The end token that `ids` ends with, as a string.
    """

    id: str
    role: str
    text: str
    marks: tuple[Mark, ...] = ()
    trusted: bool = False
    segment: str | None = None
    ids: tuple[int, ...] | None = None
    decoded: DecodedIds | None = None
    stop_word: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """All messages as texts.

    Args:
        text: The text of a text template, as a message with the id "".
        messages: The messages in order.
        escaped: (message id, string) of what was escaped.
    """

    text: Resolved | None
    messages: tuple[Resolved, ...]
    escaped: tuple[tuple[str, str], ...]


class Filler:
    """Fills the slots of one template with values.

    Args:
        segments: Segments by name.
        values: Values by field.
    """

    def __init__(self, segments: Mapping[str, SegmentText], values: Mapping[str, str]) -> None:
        self.segments = segments
        self.values = values

    def fill(
        self, parts: tuple[str | Slot, ...], where: str, pinned: Mapping[str, str]
    ) -> tuple[str, tuple[Mark, ...]]:
        """Fill slots.

        Args:
            parts: Literals and slots.
            where: What the text is, for the message of an error.
            pinned: Values that win over the current ones.

        Returns:
            The text and its marks.
        """
        texts: list[str] = []
        marks: list[Mark] = []
        size = 0
        for part in parts:
            inner: tuple[Mark, ...] = ()
            if isinstance(part, str):
                text = part
            elif part.kind == "field":
                text = self._value(part.name, where, pinned)
                marks.append(Mark("field", part.name, size, size + len(text), text))
            else:
                text, inner = self.segment_text(part.name, where, pinned)
                marks.append(Mark("segment", part.name, size, size + len(text), text))
            marks.extend(
                Mark(m.kind, m.name, m.start + size, m.stop + size, m.value) for m in inner
            )
            texts.append(text)
            size += len(text)
        return "".join(texts), tuple(marks)

    def segment_text(
        self, name: str, where: str, pinned: Mapping[str, str]
    ) -> tuple[str, tuple[Mark, ...]]:
        """Fill the slots of a segment."""
        return self.fill(self.segments[name].text_parts(), f"segment {name!r} in {where}", pinned)

    def preamble_text(self, name: str) -> str:
        """Fill the slots of a segment's preamble with the current values."""
        parts = self.segments[name].preamble_parts()
        return self.fill(parts, f"the preamble of segment {name!r}", {})[0]

    def _value(self, name: str, where: str, pinned: Mapping[str, str]) -> str:
        if name in pinned:
            return pinned[name]
        if name not in self.values:
            raise MissingFieldError(
                f"{where} has a slot for the field {name!r}, which has no value",
                hint=f"give a value for it; {nearest(name, self.values)}",
            )
        return self.values[name]


def resolve(template: PromptTemplate, filler: Filler, tokenizer: PromptTokenizer) -> ResolvedPrompt:
    """Turn every message of a template into text with marks.

    Raises:
        UnknownFieldError: A value names no field of the template.
        MissingFieldError: A slot has no value.
        FieldValueError: A value is not allowed.
    """
    known = template.field_names
    for name, value in filler.values.items():
        if name not in known:
            raise UnknownFieldError(
                f"a value is given for the field {name!r}, the template has the fields "
                f"{', '.join(known) or 'none'}",
                hint=nearest(name, known),
            )
        Field(name, _ANY_LENGTH).check(value, tokenizer)
    text = None
    if template.text is not None:
        where = "the text template"
        filled, marks = filler.fill(parse(template.text, where), where, dict(template.pinned))
        _refuse_private(filled, where)
        text = Resolved("", "", filled, marks, trusted=True)
    escaped: list[tuple[str, str]] = []
    messages = tuple(_message(m, filler, tokenizer, escaped) for m in template.messages)
    return ResolvedPrompt(text, messages, tuple(escaped))


def _message(
    message: Message,
    filler: Filler,
    tokenizer: PromptTokenizer,
    escaped: list[tuple[str, str]],
) -> Resolved:
    name, role, where = message.id, message.role, f"message {message.id!r}"
    if message.generated_ids is not None:
        ids = tuple(message.generated_ids)
        ended = bool(ids) and tokenizer.is_stop(ids[-1])
        decoded = tokenizer.decode_generated(ids[:-1] if ended else ids)
        stop_word = tokenizer.token(ids[-1]) if ended else ""
        return Resolved(name, role, decoded.content, ids=ids, decoded=decoded, stop_word=stop_word)
    if not message.is_trusted:
        result = tokenizer.escape(message.content)
        escaped.extend((name, found) for found in result.found)
        return Resolved(name, role, result.text)
    pinned = dict(message.pinned)
    for field, value in message.pinned:
        Field(field, _ANY_LENGTH).check(value, tokenizer)
    if message.segment is not None:
        text, inner = filler.segment_text(message.segment, where, pinned)
        marks = (Mark("segment", message.segment, 0, len(text), text), *inner)
    else:
        text, marks = filler.fill(parse(message.content, where), where, pinned)
    _refuse_private(text, where)
    return Resolved(name, role, text, marks, trusted=True, segment=message.segment)


def _refuse_private(text: str, where: str) -> None:
    found = find_private(text)
    if found:
        raise TemplateError(
            f"{where} holds U+{ord(found):04X}, a character kept for sentinels or a lone surrogate",
            hint="remove the private-use character of plane 15 or 16",
        )

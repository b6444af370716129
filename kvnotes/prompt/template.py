"""Prompt templates: chat messages or text, with fields and named segments.

Owns the list of messages and its changes. Rendering itself is in `render`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from kvnotes.errors import TemplateError, UnknownSegmentError, nearest
from kvnotes.prompt.messages import Message, SegmentText
from kvnotes.prompt.render import render as render_template
from kvnotes.prompt.slots import Slot, parse

if TYPE_CHECKING:
    from kvnotes.prompt.spans import TokenizedPrompt
    from kvnotes.prompt.tokenizer import PromptTokenizer

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Chat messages, or a text with messages appended to it as plain paragraphs.

    Args:
        messages: The chat, or what was appended to `text`.
        text: A trusted text template; None for a chat.
        segments: Named segments the messages or the text may use.
        pinned: (field, value) pairs that `text` shows whatever the current values are.
    """

    messages: tuple[Message, ...]
    text: str | None = None
    segments: tuple[SegmentText, ...] = ()
    pinned: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", _with_ids(self.messages))
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.messages and not self.text:
            raise TemplateError(
                "a prompt template has neither messages nor text, it needs one of them",
                hint="use PromptTemplate.chat([...]) or PromptTemplate.text_template('...')",
            )
        if self.text == "":
            raise TemplateError(
                "a text template has messages but an empty text",
                hint="use PromptTemplate.chat([...]) for messages alone",
            )
        names = [segment.name for segment in self.segments]
        for name in names:
            if names.count(name) > 1:
                raise TemplateError(
                    f"segment {name!r} is given {names.count(name)} times, names are unique",
                    hint="rename one of them",
                )
        for part, where in self._slots():
            if part.kind == "segment" and part.name not in names:
                raise UnknownSegmentError(
                    f"{where} uses the segment {part.name!r}, which the template does not hold",
                    hint=nearest(part.name, names),
                )

    @classmethod
    def chat(
        cls, messages: Iterable[Message], segments: Iterable[SegmentText] = ()
    ) -> PromptTemplate:
        """Make a template of chat messages."""
        return cls(tuple(messages), None, tuple(segments))

    @classmethod
    def text_template(cls, text: str, segments: Iterable[SegmentText] = ()) -> PromptTemplate:
        """Make a template of one trusted text, rendered without a chat template."""
        return cls((), text, tuple(segments))

    @property
    def field_names(self) -> tuple[str, ...]:
        """Fields in order of first use: contents, used segments and their preambles."""
        names: dict[str, None] = {}
        for slot, _ in self._slots():
            if slot.kind == "field":
                names[slot.name] = None
                continue
            segment = self.segment(slot.name)
            for part in (*segment.preamble_parts(), *segment.text_parts()):
                if isinstance(part, Slot):
                    names[part.name] = None
        return tuple(names)

    def segment(self, name: str) -> SegmentText:
        """Return a named segment.

        Raises:
            UnknownSegmentError: The template does not hold it.
        """
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise UnknownSegmentError(
            f"the template does not hold the segment {name!r}",
            hint=nearest(name, (segment.name for segment in self.segments)),
        )

    def with_segment(self, segment: SegmentText) -> PromptTemplate:
        """Return a template that holds a segment; its name may have been that of an unused one.

        Raises:
            TemplateError: The prompt uses the name for another text.
        """
        held = next((s for s in self.segments if s.name == segment.name), None)
        if held == segment:
            return self
        used = any(slot == Slot("segment", segment.name) for slot, _ in self._slots())
        if held is not None and used:
            raise TemplateError(
                f"segment {segment.name!r} is in use with {_difference(held, segment)}",
                hint="give the new one another name, such as a version, or delete the messages "
                "that use the old one",
            )
        others = (s for s in self.segments if s is not held)
        return replace(self, segments=(*others, segment))

    def append(self, message: Message) -> PromptTemplate:
        """Return a template with one more message at the end."""
        return replace(self, messages=(*self.messages, message))

    def insert(self, message: Message, before: str | None) -> PromptTemplate:
        """Return a template with one more message before another one, or at the end."""
        index = len(self.messages) if before is None else self._index(before)
        return replace(self, messages=(*self.messages[:index], message, *self.messages[index:]))

    def remove(self, message_id: str) -> PromptTemplate:
        """Return a template without a message, and without what retracts it."""
        self._index(message_id)
        kept = (m for m in self.messages if message_id not in (m.id, m.retracts))
        return replace(self, messages=tuple(kept))

    def replace(self, message_id: str, message: Message) -> PromptTemplate:
        """Return a template with another message in its place; it keeps the id if it has none."""
        index = self._index(message_id)
        if not message.id:
            message = replace(message, id=message_id)
        return replace(
            self, messages=(*self.messages[:index], message, *self.messages[index + 1 :])
        )

    def move(self, message_id: str, before: str | None) -> PromptTemplate:
        """Return a template with a message moved before another one, or to the end."""
        index = self._index(message_id)
        target = len(self.messages) if before is None else self._index(before)
        moved = self.messages[index]
        rest = self.messages[:index] + self.messages[index + 1 :]
        target -= target > index
        return replace(self, messages=(*rest[:target], moved, *rest[target:]))

    def without_errata(self) -> PromptTemplate:
        """Return the clean reference: no errata, nothing that is retracted, no pinned values."""
        retracted = {m.retracts for m in self.messages}
        kept = (
            replace(m, pinned=())
            for m in self.messages
            if not m.is_erratum and m.id not in retracted
        )
        return replace(self, messages=tuple(kept), pinned=())

    def render(
        self,
        values: Mapping[str, str],
        tokenizer: PromptTokenizer,
        *,
        add_generation_prompt: bool = False,
    ) -> TokenizedPrompt:
        """Render and tokenize.

        Args:
            values: One value for each field of `field_names`.
            tokenizer: Tokenizer and chat template.
            add_generation_prompt: Whether the header of the next assistant turn follows.

        Returns:
            The tokens and the spans of everything named.

        Raises:
            MissingFieldError: A slot has no value.
            UnknownFieldError: A value names no field of the template.
            FieldValueError: A value holds control text or several lines.
            TemplateError: The chat template refuses the messages or alters a value.
        """
        return render_template(self, values, tokenizer, add_generation_prompt=add_generation_prompt)

    def _slots(self) -> Iterator[tuple[Slot, str]]:
        """Every slot of trusted text, and where it stands."""
        if self.text is not None:
            for part in parse(self.text, "the text template"):
                if isinstance(part, Slot):
                    yield part, "the text template"
        for message in self.messages:
            for slot in message.slots:
                yield slot, f"message {message.id!r}"

    def _index(self, message_id: str) -> int:
        for index, message in enumerate(self.messages):
            if message.id == message_id:
                return index
        raise TemplateError(
            f"the template has no message {message_id!r}",
            hint=nearest(message_id, (message.id for message in self.messages)),
        )


def _difference(held: SegmentText, given: SegmentText) -> str:
    """Return both sides of the first part in which two segments differ, from there on."""
    for part in ("text", "preamble", "variants"):
        old, new = str(getattr(held, part)), str(getattr(given, part))
        if old != new:
            pairs = enumerate(zip(old, new, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
            start = max(0, first - _SHOWN // 2)
            sides = [repr(text[start : start + _SHOWN]) for text in (old, new)]
            return f"the {part} {sides[0]} at character {start}, and is given with {sides[1]}"
    raise AssertionError("the segments are equal")


def _with_ids(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Give each message without an id the next free "m0", "m1", ..."""
    given = tuple(messages)
    used: set[str] = set()
    for message in given:
        if message.id and message.id in used:
            raise TemplateError(
                f"two messages have the id {message.id!r}, ids are unique in a template",
                hint='give another id, or "" to have one assigned',
            )
        used.add(message.id)
    numbers = [int(name[1:]) for name in used if re.fullmatch("m[0-9]{1,9}", name)]
    free = max(numbers, default=-1) + 1
    names = (f"m{number}" for number in count(free))
    return tuple(m if m.id else replace(m, id=next(names)) for m in given)

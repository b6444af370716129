"""What a prompt is made of: fields, messages, named segments and the style of errata.

Owns the declared values and their own rules. Does not render and holds no tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from kvnotes.errors import FieldValueError, TemplateError
from kvnotes.prompt import slots
from kvnotes.prompt.escape import find_private
from kvnotes.prompt.roles import Role

if TYPE_CHECKING:
    from kvnotes.prompt.tokenizer import PromptTokenizer

ROLES: tuple[str, ...] = get_args(Role)
MAX_SEGMENT_NAME = 500
"""Longest name of a segment; it stands in files, listings and messages."""
_LINE_BREAKS = re.compile("[\x00-\x1f\x85\u2028\u2029]")
_VALUE_SLOT = "{{value}}"


@dataclass(frozen=True, slots=True)
class Field:
    """A declared field and the limits of its values.

    Args:
        name: Name used in slots, `[A-Za-z_][A-Za-z0-9_]*`.
        max_chars: Longest value, in characters.
    """

    name: str
    max_chars: int = 200

    def __post_init__(self) -> None:
        if not re.fullmatch(slots.NAME, self.name):
            raise TemplateError(
                f"field name {self.name!r} is not of the form {slots.NAME}",
                hint="use letters, digits and underscores, and begin with no digit",
            )
        if self.max_chars < 0:
            raise TemplateError(
                f"field {self.name!r} has max_chars={self.max_chars}, less than 0",
                hint="give the longest value in characters",
            )

    def check(self, value: object, tokenizer: PromptTokenizer) -> None:
        """Refuse a value that could break out of its slot.

        Args:
            value: The value to show; empty is allowed.
            tokenizer: Tokenizer whose control strings the value may not hold.

        Raises:
            FieldValueError: Not a string, several lines, too long, or control text.
        """
        text = self.check_text(value)
        marker = tokenizer.control_text.find_marker(text)
        control = marker or tokenizer.control_text.find_control(text)
        if control:
            kind = "the erratum marker" if marker else "the tokenizer's control string"
            raise FieldValueError(
                f"value of field {self.name!r} is plain text, but holds {kind} {control!r}",
                hint="remove it from the value; a value cannot open or end a message",
            )

    def check_text(self, value: object) -> str:
        """Return a value that breaks no rule that can be judged without a tokenizer.

        Raises:
            FieldValueError: Not a string, several lines, or too long.
        """
        name = self.name
        if not isinstance(value, str):
            raise FieldValueError(
                f"field {name!r} takes a string, got {type(value).__name__}",
                hint="convert the value to the text that should be shown",
            )
        if len(value) > self.max_chars:
            raise FieldValueError(
                f"value of field {name!r} has {len(value)} characters, the limit is "
                f"{self.max_chars}",
                hint="shorten the value, or put long text into a segment",
            )
        broken = _LINE_BREAKS.search(value)
        if broken:
            raise FieldValueError(
                f"value of field {name!r} is single-line text, but holds {broken[0]!r} at "
                f"character {broken.start()}",
                hint="replace line breaks, tabs and control characters by spaces; in YAML, > and | "
                "make text with line breaks, >- makes one line",
            )
        private = find_private(value)
        if private:
            raise FieldValueError(
                f"value of field {name!r} holds U+{ord(private):04X}, a character kept for "
                "sentinels or a lone surrogate",
                hint="remove the private-use character of plane 15 or 16",
            )
        return value


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt.

    Args:
        role: system, user, assistant or tool.
        content: Text; in trusted messages a template with `{{field}}` and `{{segment:name}}`.
        id: Name of the message in its prompt; "" is replaced by "m0", "m1", ...
        segment: The whole message is this named segment; `content` is then empty.
        trusted: Whether content may have slots; None means system messages only. In untrusted
            content braces are plain text and control strings are escaped.
        erratum_of: The message is an erratum of this field.
        retracts: The message says that the message of this id no longer holds; "" where that
            one is gone already.
        pinned: (field, value) pairs that this message shows whatever the current values are.
        generated_ids: An assistant message as generated; these ids are authoritative and
            `content` is not read. Includes the end token if it was generated.
    """

    role: str
    content: str = ""
    id: str = ""
    segment: str | None = None
    trusted: bool | None = None
    erratum_of: str | None = None
    retracts: str | None = None
    pinned: tuple[tuple[str, str], ...] = ()
    generated_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        where = f"message {self.id!r}" if self.id else f"a {self.role} message"
        if self.role not in ROLES:
            raise TemplateError(
                f"{where} has the role {self.role!r}, the roles are {', '.join(ROLES)}",
                hint="map the role to one of them (developer is system)",
            )
        if not isinstance(self.content, str):
            raise TemplateError(
                f"{where} takes content as a string, got {type(self.content).__name__}",
                hint="join the text parts; images and audio are not supported",
            )
        if self.segment is not None and self.content:
            raise TemplateError(
                f"{where} is the whole segment {self.segment!r} and has content of its own",
                hint="leave content empty, or write {{segment:name}} inside the content",
            )
        if self.generated_ids is not None and (self.role != "assistant" or self.segment):
            raise TemplateError(
                f"{where} has generated_ids, but is no plain assistant message",
                hint="only what the model generated has generated_ids",
            )
        if len({name for name, _ in self.pinned}) != len(self.pinned):
            raise TemplateError(
                f"{where} pins a field to two values: {self.pinned!r}",
                hint="pin each field once per message",
            )
        if self.erratum_of is not None and not self.is_trusted:
            raise TemplateError(
                f"{where} is an erratum of {self.erratum_of!r} and is not trusted",
                hint="errata are trusted templates; leave trusted as None",
            )
        if self.retracts is not None and (not self.is_trusted or self.erratum_of is not None):
            raise TemplateError(
                f"{where} retracts {self.retracts!r}, and is untrusted or an erratum of a field",
                hint="a retraction is a trusted message of its own",
            )

    @property
    def slots(self) -> tuple[slots.Slot, ...]:
        """Fields and segments the message uses, in order; a whole segment is one slot."""
        if self.segment is not None:
            return (slots.Slot("segment", self.segment),)
        if not self.is_trusted:
            return ()
        parts = slots.parse(self.content, f"message {self.id!r}")
        return tuple(part for part in parts if isinstance(part, slots.Slot))

    @property
    def segment_names(self) -> tuple[str, ...]:
        """Segments the message uses, in order."""
        return tuple(slot.name for slot in self.slots if slot.kind == "segment")

    @property
    def is_trusted(self) -> bool:
        """Whether `content` is a template whose slots are filled."""
        if self.generated_ids is not None:
            return False
        if self.trusted is not None:
            return self.trusted
        return self.role == "system" or self.is_erratum or self.segment is not None

    @property
    def is_erratum(self) -> bool:
        """Whether the message only corrects what stands before it."""
        return self.erratum_of is not None or self.retracts is not None


@dataclass(frozen=True, slots=True)
class SegmentText:
    """A named segment: trusted text that is compiled once and used in many prompts.

    Args:
        name: Name used in `{{segment:name}}` and `Message.segment`.
        text: Trusted template with `{{field}}` slots only.
        preamble: Text the segment is compiled behind; may hold fields.
        variants: (field, values) of fields of the preamble for which variants are compiled.
    """

    name: str
    text: str
    preamble: str = ""
    variants: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(slots.SEGMENT_NAME, self.name):
            raise TemplateError(
                f"segment name {self.name!r} is not of the form {slots.SEGMENT_NAME}",
                hint="use letters, digits and the characters _ . @ / -",
            )
        if len(self.name) > MAX_SEGMENT_NAME:
            raise TemplateError(
                f"segment name {self.name[:40]!r}... has {len(self.name)} characters, the limit is "
                f"{MAX_SEGMENT_NAME}",
                hint="give it a short name",
            )
        if not self.text:
            raise TemplateError(
                f"segment {self.name!r} has no text, it needs at least one character",
                hint="remove the segment from the template",
            )
        for part in (*self.text_parts(), *self.preamble_parts()):
            if isinstance(part, slots.Slot) and part.kind == "segment":
                raise TemplateError(
                    f"segment {self.name!r} holds the segment {part.name!r}; segments hold "
                    "text and fields only",
                    hint="put both segments into the message one after the other",
                )
        for name, _ in self.variants:
            if name not in self.preamble_fields:
                raise TemplateError(
                    f"segment {self.name!r} has variants of the field {name!r}, its preamble "
                    f"has the fields {sorted(self.preamble_fields)}",
                    hint="a variant is compiled behind a preamble that shows its field",
                )

    @property
    def preamble_fields(self) -> frozenset[str]:
        """Fields that stand in the preamble: each value of them is a variant."""
        return frozenset(p.name for p in self.preamble_parts() if isinstance(p, slots.Slot))

    def text_parts(self) -> tuple[str | slots.Slot, ...]:
        """Literals and slots of the text."""
        return slots.parse(self.text, f"segment {self.name!r}")

    def preamble_parts(self) -> tuple[str | slots.Slot, ...]:
        """Literals and slots of the preamble."""
        return slots.parse(self.preamble, f"the preamble of segment {self.name!r}")


_CLAIM = "[STATE UPDATE] {field} has just changed to {{value}}; "


@dataclass(frozen=True, slots=True)
class ErratumStyle:
    """How a change of a field is announced.

    Args:
        marker: What every erratum begins with; neutralised in untrusted text.
        template: One line with `{{value}}` once and `{field}` for the field's name.
        append_template: The same with `{revision}`, for errata that replace earlier ones.
        retraction: What follows the marker where a tool is retracted; one line with `{tool}`.
    """

    marker: str = "[STATE UPDATE]"
    template: str = _CLAIM + "this overrides any earlier value. Apply the current value."
    append_template: str = (
        _CLAIM + "this overrides any earlier value (revision {revision}, replaces all earlier). "
        "Apply the current value."
    )
    retraction: str = "The tool {tool} is no longer available. Do not call it."

    def __post_init__(self) -> None:
        if len(re.sub(r"\W", "", self.marker)) < 3 or _LINE_BREAKS.search(self.marker):
            raise TemplateError(
                f"erratum marker {self.marker!r} is not one line with three letters or more",
                hint="use a marker that ordinary text does not hold, like [STATE UPDATE]",
            )
        for name, text in (("template", self.template), ("append_template", self.append_template)):
            rest = text.replace(_VALUE_SLOT, "", 1)
            if (
                _VALUE_SLOT not in text
                or "{{" in rest
                or not text.startswith(self.marker)
                or _LINE_BREAKS.search(text)
            ):
                raise TemplateError(
                    f"erratum {name} {text!r} is not one line that begins with {self.marker!r} "
                    f"and holds {_VALUE_SLOT} once and no other slot",
                    hint="see ErratumStyle() for a template that works",
                )
        if "{revision}" not in self.append_template:
            raise TemplateError(
                f"erratum append_template {self.append_template!r} has no {{revision}}",
                hint="the revision tells the model which of several errata holds",
            )
        if (
            "{tool}" not in self.retraction
            or "{{" in self.retraction
            or _LINE_BREAKS.search(self.retraction)
        ):
            raise TemplateError(
                f"erratum retraction {self.retraction!r} is not one line that holds {{tool}} and "
                "no slot",
                hint="see ErratumStyle() for a retraction that works",
            )

    def message(self, field: str, *, revision: int | None, id: str) -> Message:
        """Build the erratum message of a field, with a slot for its value.

        Args:
            field: Name of the field.
            revision: Number of the change for `append_template`, or None for `template`.
            id: Id of the message.

        Returns:
            A trusted system message; the chat template may need it wrapped in another role.
        """
        Field(field)
        text = self.template if revision is None else self.append_template
        before, after = text.split(_VALUE_SLOT)
        named = [
            part.replace("{field}", field).replace("{revision}", str(revision))
            for part in (before, after)
        ]
        content = f"{named[0]}{{{{{field}}}}}{named[1]}"
        return Message("system", content, id=id, erratum_of=field)

    def text(self, field: str, value: str, *, revision: int | None = None) -> str:
        """Return an erratum as plain text: for models whose K/V cannot be edited.

        Append it to the conversation as a message, under the role that the model takes there.

        Args:
            field: Name of the field.
            value: Its new value, one line.
            revision: As in `message`.

        Raises:
            FieldValueError: Several lines, too long, or it holds the marker.
        """
        shown = Field(field).check_text(value)
        if self.marker in shown:
            raise FieldValueError(
                f"value of field {field!r} is plain text, but holds the erratum marker "
                f"{self.marker!r}",
                hint="remove it from the value; a value cannot open or end a message",
            )
        content = str(self.message(field, revision=revision, id=f"erratum:{field}").content)
        return content.replace(f"{{{{{field}}}}}", shown)

    def retract(self, tool: str, message_id: str, *, id: str) -> Message:
        """Build the message that takes a tool back.

        Args:
            tool: Name of the tool.
            message_id: The message that shows it.
            id: Id of the new message.
        """
        content = f"{self.marker} {self.retraction.replace('{tool}', tool)}"
        return Message("system", content, id=id, retracts=message_id)

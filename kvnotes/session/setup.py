"""What a session is built from: messages, segments, the variants to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import get_args

from kvnotes.engine.abilities import Abilities
from kvnotes.errors import PlanError, TemplateError, UnknownFieldError, nearest
from kvnotes.prompt import Message, PromptTemplate, SegmentText
from kvnotes.session.edits import ErratumMode, PromptState

_KEYS = ("role", "content", "id", "segment")


def as_segment(name: str, value: str | SegmentText) -> SegmentText:
    """Return a segment from its text."""
    return value if isinstance(value, SegmentText) else SegmentText(name, value)


def as_message(value: Message | Mapping[str, str]) -> Message:
    """Return a message from its keys.

    Raises:
        TemplateError: An unknown key, or no role.
    """
    if isinstance(value, Message):
        return value
    for name in value:
        if name not in _KEYS:
            raise TemplateError(f"unknown key {name!r} in a message", hint=nearest(name, _KEYS))
    if "role" not in value:
        raise TemplateError("a message has no 'role'", hint="add role: system, user or assistant")
    return Message(
        role=value["role"],
        content=value.get("content", ""),
        id=value.get("id", ""),
        segment=value.get("segment"),
    )


def as_mode(mode: ErratumMode | None, abilities: Abilities) -> ErratumMode:
    """Return a mode of errata, by default the engine's own.

    Raises:
        PlanError: No such mode, or the engine has it not.
    """
    known: tuple[ErratumMode, ...] = get_args(ErratumMode)
    chosen = abilities.erratum_modes[0] if mode is None else mode
    check_option("erratum_mode", chosen, known)
    abilities.check_erratum_mode(chosen)
    return known[known.index(chosen)]


def variant_values(state: PromptState, name: str | None = None) -> list[Mapping[str, str]]:
    """Current values, and every combination of the declared variants' values.

    Args:
        state: The conversation.
        name: The segment whose variants count; None for all of them.
    """
    declared: dict[str, tuple[str, ...]] = {}
    for segment in state.template.segments:
        for field, values in segment.variants if name in (None, segment.name) else ():
            declared[field] = tuple(dict.fromkeys((*declared.get(field, ()), *values)))
    result: list[Mapping[str, str]] = [state.values]
    names = list(declared)
    for combination in product(*declared.values()) if names else ():
        result.append({**state.values, **dict(zip(names, combination, strict=True))})
    return result


def check_brought_values(
    state: PromptState,
    message: Message,
    segment: SegmentText | None,
    values: Mapping[str, str],
) -> None:
    """Refuse values that a new message may not bring.

    Raises:
        UnknownFieldError: The message has no such field.
        TemplateError: The conversation shows another value, or another text of the segment.
    """
    template = state.template if segment is None else state.template.with_segment(segment)
    fields = PromptTemplate.chat([message], template.segments).field_names
    for name, value in values.items():
        if name not in fields:
            raise UnknownFieldError(
                f"a value is given for {name!r}, the new message has the fields "
                f"{', '.join(fields) or 'none'}",
                hint=nearest(name, fields),
            )
        if name in state.template.field_names and state.values[name] != value:
            raise TemplateError(
                f"the conversation shows {state.values[name]!r} for the field {name!r}, the new "
                f"message would show {value!r}",
                hint="edit the field, or give the one of the new message another name",
            )


def check_option(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        PlanError: Names the option, the value and the nearest known one.
    """
    if value not in known:
        raise PlanError(f"unknown {name} {value!r}", hint=nearest(value, known))

"""What a session is built from: messages, segments, the variants to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from kvnotes.errors import PlanError, TemplateError, nearest
from kvnotes.prompt import Message, SegmentText
from kvnotes.session.edits import PromptState

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


def variant_values(state: PromptState) -> list[Mapping[str, str]]:
    """Current values, and every combination of the declared variants' values."""
    declared: dict[str, tuple[str, ...]] = {}
    for segment in state.template.segments:
        for name, values in segment.variants:
            declared[name] = tuple(dict.fromkeys((*declared.get(name, ()), *values)))
    result: list[Mapping[str, str]] = [state.values]
    names = list(declared)
    for combination in product(*declared.values()) if names else ():
        result.append({**state.values, **dict(zip(names, combination, strict=True))})
    return result


def check_option(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        PlanError: Names the option, the value and the nearest known one.
    """
    if value not in known:
        raise PlanError(f"unknown {name} {value!r}", hint=nearest(value, known))

"""Which messages a chat template is really given.

Owns joining and wrapping: messages that the template would refuse, hoist or drop where they
stand are joined with a neighbour or shown in another role. Does not render.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from kvnotes.prompt.capabilities import After, TemplateCapabilities


@runtime_checkable
class HasText(Protocol):
    """What `arrange` needs to know of a message."""

    @property
    def role(self) -> str:
        """Role it was written with."""

    @property
    def text(self) -> str:
        """Its content."""


@dataclass(frozen=True, slots=True)
class Part:
    """One message inside an arranged message; `separator` stands before its content."""

    index: int
    separator: str = ""


@dataclass(frozen=True, slots=True)
class Arranged:
    """One message as the chat template is given it.

    Args:
        role: Role for the template.
        parts: The messages it shows, in order.
        wrapped: Indices of messages that were written with another role.
    """

    role: str
    parts: tuple[Part, ...]
    wrapped: tuple[int, ...] = ()


def arrange(
    messages: Sequence[HasText], capabilities: TemplateCapabilities
) -> tuple[Arranged, ...]:
    """Choose roles and joins such that the template keeps every message in place.

    Args:
        messages: Messages in order.
        capabilities: What the template keeps.

    Returns:
        Messages for the template; each given message is a part of exactly one.
    """
    result: list[Arranged] = []
    for index, message in enumerate(messages):
        before = result[-1].role if result else "start"
        role = _role(messages, index, before, capabilities)
        wrapped = () if role == message.role else (index,)
        if result and _joins(role, before, capabilities):
            last = result[-1]
            text = messages[last.parts[-1].index].text
            separator = "\n\n" if role == "user" else "" if text[-1:].isspace() else "\n"
            result[-1] = replace(
                last,
                parts=(*last.parts, Part(index, separator)),
                wrapped=last.wrapped + wrapped,
            )
        else:
            result.append(Arranged(role, (Part(index),), wrapped))
    return tuple(result)


def _role(
    messages: Sequence[HasText], index: int, before: str, capabilities: TemplateCapabilities
) -> str:
    role = messages[index].role
    if role == "tool" and not capabilities.tool_role:
        return "user"
    if role != "system":
        return role
    if capabilities.system == "merged" and before in ("start", "system"):
        # Merged into the user message that follows; without one the template would drop it.
        follower = next((m.role for m in messages[index:] if m.role != "system"), None)
        if follower != "user":
            return "user"
    return capabilities.erratum_role(cast("After", before))


def _joins(role: str, before: str, capabilities: TemplateCapabilities) -> bool:
    if role != before:
        return False
    if role == "system":
        return not capabilities.adjacent_system
    return role == "user" and not capabilities.adjacent_user

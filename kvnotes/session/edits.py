"""What an edit does to the prompt's text: values, pinned occurrences, errata.

Owns the rules of errata. Pure: templates and values in, templates and values out; which
K/V is kept is decided from the result, by `plan`.

    suffix, reprefill   every occurrence shows the new value; no errata
    refresh, selective  every occurrence shows the new value; errata stay and show it too
    erratum             old occurrences stay pinned to the old value; one erratum is appended
    refresh+erratum     every occurrence shows the new value; one erratum is appended
    swap                occurrences before the segment stay pinned; its variant changes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvnotes.errors import PlanError
from kvnotes.prompt import ErratumStyle, Message, PromptTemplate

ErratumMode = Literal["rewrite", "append"]

MAX_APPENDED_ERRATA = 4
"""In `append` mode the session consolidates by `suffix` when a field would get more."""


@dataclass(frozen=True, slots=True)
class PromptState:
    """A conversation as text: template and current values."""

    template: PromptTemplate
    values: Mapping[str, str]

    def shown(self, message: Message, name: str) -> str:
        """Return the value a message shows for a field."""
        return dict(message.pinned).get(name, self.values[name])


def apply_edit(
    state: PromptState,
    changes: Mapping[str, str],
    strategy: str,
    *,
    style: ErratumStyle,
    mode: ErratumMode = "rewrite",
) -> PromptState:
    """Return the conversation after an edit.

    Fields whose value stays the same are left alone, also when an erratum of them is live.

    Raises:
        PlanError: `refresh+erratum` in append mode, which may not touch what is cached.
    """
    if mode == "append" and strategy == "refresh+erratum":
        raise PlanError(
            "strategy 'refresh+erratum' rewrites cached tokens, erratum mode 'append' never does",
            hint="use strategy 'erratum', or erratum_mode='rewrite' on the embedded engine",
        )
    real = {name: value for name, value in changes.items() if state.values[name] != value}
    if not real:
        return state
    values = {**state.values, **real}
    if strategy in ("suffix", "reprefill"):
        return PromptState(state.template.without_errata(), values)
    template = state.template
    for name in real:
        if strategy in ("erratum", "stale"):
            template = _pinned(
                template, state, name, errata=mode == "append" or strategy == "stale"
            )
        elif strategy == "swap":
            template = _pinned_before_variant(template, state, name)
        else:
            template = _unpinned(template, name)
        if strategy in ("erratum", "refresh+erratum"):
            template = _with_erratum(template, name, style, mode)
    return PromptState(template, values)


def num_errata(template: PromptTemplate, name: str) -> int:
    """Return how many errata of a field the conversation holds."""
    return sum(message.erratum_of == name for message in template.messages)


def _with_erratum(
    template: PromptTemplate, name: str, style: ErratumStyle, mode: ErratumMode
) -> PromptTemplate:
    count = num_errata(template, name)
    last = template.messages[-1] if template.messages else None
    if mode == "rewrite" and last is not None and last.erratum_of == name:
        return template  # nothing follows it: its slot shows the new value
    revision = count + 1 if mode == "append" else None
    taken = {message.id for message in template.messages}
    number = count
    while f"erratum:{name}:{number}" in taken:
        number += 1
    return template.append(style.message(name, revision=revision, id=f"erratum:{name}:{number}"))


def _pinned(
    template: PromptTemplate, state: PromptState, name: str, *, errata: bool
) -> PromptTemplate:
    """Pin a field in all messages to what they show; errata only if asked."""
    for message in template.messages:
        if message.erratum_of == name and not errata:
            continue
        template = _pin(template, message, name, state.shown(message, name))
    return template


def _pinned_before_variant(
    template: PromptTemplate, state: PromptState, name: str
) -> PromptTemplate:
    """Pin a field in the messages before the last segment that has variants of it."""
    segments = {s.name for s in template.segments if name in dict(s.variants) or name in s.preamble}
    inline = ["{{segment:" + segment for segment in segments]
    places = [
        index
        for index, message in enumerate(template.messages)
        if message.segment in segments or any(mark in message.content for mark in inline)
    ]
    if not places:
        raise PlanError(
            f"strategy 'swap' needs a segment with variants of {name!r}, the prompt has none",
            hint=f"declare a preamble and variants: {{{name}: [...]}} on the segment",
        )
    for message in template.messages[: places[-1]]:
        template = _pin(template, message, name, state.shown(message, name))
    return template


def _pin(template: PromptTemplate, message: Message, name: str, value: str) -> PromptTemplate:
    if "{{" not in message.content and message.segment is None:
        return template
    pinned = {name: value, **dict(message.pinned)}
    return template.replace(message.id, replace(message, pinned=tuple(sorted(pinned.items()))))


def _unpinned(template: PromptTemplate, name: str) -> PromptTemplate:
    for message in template.messages:
        if name in dict(message.pinned):
            pinned = tuple(item for item in message.pinned if item[0] != name)
            template = template.replace(message.id, replace(message, pinned=pinned))
    return template

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
from itertools import takewhile
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
    """
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
    trailing = takewhile(lambda message: message.erratum_of, reversed(template.messages))
    if mode == "rewrite" and any(message.erratum_of == name for message in trailing):
        return template  # no turn follows it: its slot shows the new value
    revision = count + 1 if mode == "append" else None
    taken = {message.id for message in template.messages}
    number = count
    while f"erratum:{name}:{number}" in taken:
        number += 1
    return template.append(style.message(name, revision=revision, id=f"erratum:{name}:{number}"))


def _pinned(
    template: PromptTemplate, state: PromptState, name: str, *, errata: bool
) -> PromptTemplate:
    """Pin a field everywhere to what is shown; in errata only if asked."""
    if template.text is not None:
        pinned = {name: state.values[name], **dict(template.pinned)}
        template = replace(template, pinned=tuple(sorted(pinned.items())))
    for message in template.messages:
        if message.erratum_of != name or errata:
            template = _pin(template, message, name, state.shown(message, name))
    return template


def _pinned_before_variant(
    template: PromptTemplate, state: PromptState, name: str
) -> PromptTemplate:
    """Pin a field in the messages before the last segment that has variants of it."""
    judging = {s.name for s in template.segments if name in s.preamble_fields}
    uses = [bool(judging & set(message.segment_names)) for message in template.messages]
    if not any(uses):
        raise PlanError(
            f"strategy 'swap' needs a message with a segment that has variants of {name!r}, the "
            "prompt has none",
            hint=f"declare a preamble and variants: {{{name}: [...]}} on the segment",
        )
    last = len(uses) - 1 - uses[::-1].index(True)
    for message, judges in zip(template.messages[:last], uses[:last], strict=True):
        if not judges:
            template = _pin(template, message, name, state.shown(message, name))
    return template


def _pin(template: PromptTemplate, message: Message, name: str, value: str) -> PromptTemplate:
    if not message.is_trusted:
        return template
    pinned = {name: value, **dict(message.pinned)}
    return template.replace(message.id, replace(message, pinned=tuple(sorted(pinned.items()))))


def _unpinned(template: PromptTemplate, name: str) -> PromptTemplate:
    template = replace(template, pinned=tuple(p for p in template.pinned if p[0] != name))
    for message in template.messages:
        if name in dict(message.pinned):
            pinned = tuple(item for item in message.pinned if item[0] != name)
            template = template.replace(message.id, replace(message, pinned=pinned))
    return template

"""Changes that wait for the next turn, as values.

A session keeps its last computed state and the operations since; folding them gives the
state now. So A -> B -> A without a turn between changes nothing, and every rung of an
escalation starts from the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvnotes.prompt import ErratumStyle, Message, PromptTemplate
from kvnotes.session.edits import ErratumMode, PromptState, apply_edit


@dataclass(frozen=True, slots=True)
class Edit:
    """New values of fields."""

    changes: Mapping[str, str]
    strategy: str
    verify: str | None = None
    consolidate: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a message."""

    message_id: str
    strategy: str


@dataclass(frozen=True, slots=True)
class Move:
    """Put a message before another one, or at the end."""

    message_id: str
    before: str | None
    strategy: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Give a message another text."""

    message_id: str
    content: str
    strategy: str


@dataclass(frozen=True, slots=True)
class Append:
    """Add a message at the end."""

    message: Message


Operation = Edit | Delete | Move | Replace | Append


def fold(
    base: PromptState,
    operations: Sequence[Operation],
    strategy: str,
    *,
    style: ErratumStyle,
    mode: ErratumMode,
) -> PromptState:
    """Return the state after the operations, edits made by `strategy`."""
    state = base
    for operation in effective(base, operations):
        if isinstance(operation, Edit):
            if operation.consolidate:
                state = PromptState(state.template.without_errata(), state.values)
            state = apply_edit(state, operation.changes, strategy, style=style, mode=mode)
        else:
            state = PromptState(_changed(state, operation), state.values)
    return state


def effective(base: PromptState, operations: Sequence[Operation]) -> list[Operation]:
    """Join edits that follow each other and leave out what changes no value."""
    values = dict(base.values)
    result: list[Operation] = []
    for operation in _merged(operations):
        if isinstance(operation, Edit):
            changes = {n: v for n, v in operation.changes.items() if values.get(n) != v}
            if not changes and not operation.consolidate:
                continue
            values.update(changes)
            operation = replace(operation, changes=changes)
        result.append(operation)
    return result


def _changed(state: PromptState, operation: Operation) -> PromptTemplate:
    template = state.template
    if isinstance(operation, Append):
        return template.append(operation.message)
    if isinstance(operation, Delete):
        return template.remove(operation.message_id)
    if isinstance(operation, Move):
        return template.move(operation.message_id, operation.before)
    assert isinstance(operation, Replace)
    old = next((m for m in template.messages if m.id == operation.message_id), None)
    content = (
        Message("user", operation.content) if old is None else _with_content(old, operation.content)
    )
    return template.replace(operation.message_id, content)


def _with_content(message: Message, content: str) -> Message:
    return replace(message, content=content, segment=None, generated_ids=None, pinned=())


def _merged(operations: Sequence[Operation]) -> list[Operation]:
    """Join edits that follow each other: only the last value of a field counts."""
    result: list[Operation] = []
    for operation in operations:
        last = result[-1] if result else None
        if (
            isinstance(last, Edit)
            and isinstance(operation, Edit)
            and last.strategy == operation.strategy
        ):
            result[-1] = replace(
                operation,
                changes={**last.changes, **operation.changes},
                verify=operation.verify or last.verify,
                consolidate=last.consolidate or operation.consolidate,
            )
        else:
            result.append(operation)
    return result

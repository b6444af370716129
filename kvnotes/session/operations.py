"""Changes that wait for the next turn, as values.

A session keeps its last computed state and the operations since; folding them gives the
state now. So A -> B -> A without a turn between changes nothing, and every rung of an
escalation starts from the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvnotes.errors import PlanError
from kvnotes.prompt import ErratumStyle, Message, PromptTemplate, SegmentText
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
    """Remove a message; where a note is given, an erratum says so instead."""

    message_id: str
    strategy: str
    note: Message | None = None


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
class Insert:
    """Add a message before another one, or at the end.

    Args:
        message: The message.
        before: Id of the message it is put before; None for the end.
        strategy: None keeps what is cached and computes the rest by the session's default.
        segment: The segment that the message is, if the template may not hold it yet.
        values: Values of the fields it brings.
    """

    message: Message
    before: str | None = None
    strategy: str | None = None
    segment: SegmentText | None = None
    values: Mapping[str, str] = field(default_factory=dict)


Operation = Edit | Delete | Move | Replace | Insert


def fold(
    base: PromptState,
    operations: Sequence[Operation],
    strategy: str,
    *,
    style: ErratumStyle,
    mode: ErratumMode,
) -> PromptState:
    """Return the state after the operations, edits made by `strategy`.

    Raises:
        PlanError: `refresh+erratum` in append mode, which may not touch what is cached.
    """
    state = base
    for operation in effective(base, operations):
        if mode == "append" and strategy == "refresh+erratum" and corrects(operation):
            raise PlanError(
                "strategy 'refresh+erratum' rewrites cached tokens, erratum mode 'append' never "
                "does",
                hint="use strategy 'erratum', or erratum_mode='rewrite' on the embedded engine",
            )
        if isinstance(operation, Edit):
            if operation.consolidate:
                state = PromptState(state.template.without_errata(), state.values)
            state = apply_edit(state, operation.changes, strategy, style=style, mode=mode)
        else:
            brought = operation.values if isinstance(operation, Insert) else {}
            template = _changed(state.template, operation, strategy)
            state = PromptState(template, {**state.values, **brought})
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
        elif isinstance(operation, Insert):
            values.update(operation.values)
        result.append(operation)
    return result


def corrects(operation: Operation) -> bool:
    """Whether an erratum can stand for an operation."""
    return isinstance(operation, Edit) or (
        isinstance(operation, Delete) and operation.note is not None
    )


def reordering(ids: Sequence[str], wanted: Sequence[str], strategy: str) -> list[Move]:
    """Return moves that put messages into another order, in the places they take now.

    Args:
        ids: All messages, in order.
        wanted: Some of them, in the order wanted.
        strategy: Strategy of the moves.
    """
    following = iter(wanted)
    target = [next(following) if name in wanted else name for name in ids]
    if target == list(ids):
        return []
    pairs = zip(target, [*target[1:], None], strict=True)
    # from the end: what a message is put before stands in its place already
    return [Move(name, after, strategy) for name, after in pairs if name in wanted][::-1]


def _changed(template: PromptTemplate, operation: Operation, strategy: str) -> PromptTemplate:
    if isinstance(operation, Insert):
        if operation.segment is not None:
            template = template.with_segment(operation.segment)
        return template.insert(operation.message, operation.before)
    if isinstance(operation, Delete):
        return _deleted(template, operation, strategy)
    if isinstance(operation, Move):
        return template.move(operation.message_id, operation.before)
    assert isinstance(operation, Replace)
    old = next((m for m in template.messages if m.id == operation.message_id), None)
    content = (
        Message("user", operation.content) if old is None else _with_content(old, operation.content)
    )
    return template.replace(operation.message_id, content)


def _deleted(template: PromptTemplate, operation: Delete, strategy: str) -> PromptTemplate:
    """Remove a message, or leave it where it is and append what retracts it, or both."""
    note = operation.note
    if note is None or strategy not in ("erratum", "refresh+erratum"):
        return template.remove(operation.message_id)
    if strategy == "erratum":
        return template.append(note)
    return template.remove(operation.message_id).append(replace(note, retracts=""))


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

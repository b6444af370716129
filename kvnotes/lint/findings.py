"""What the lint says: a finding, its kinds, and what to do about each.

Owns the names that others script against. Does not look at text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "datetime",
    "date",
    "time",
    "epoch",
    "uuid",
    "id",
    "digest",
    "token",
    "path",
    "process",
    "address",
    "duration",
    "counter",
    "seed",
]
"""Kinds of values that change from request to request."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Change = Literal[
    "changed-text",
    "lines-reordered",
    "message-rewritten",
    "message-removed",
    "message-inserted",
    "message-moved",
    "tools-reordered",
    "tool-added",
    "tool-removed",
    "tool-changed",
    "tool-keys-reordered",
]
"""What differs between two requests and is not one value."""

CHANGES: tuple[Change, ...] = get_args(Change)

_FIELDS: dict[Kind, str] = {
    "datetime": "now",
    "date": "today",
    "time": "clock",
    "epoch": "now",
    "uuid": "request_id",
    "id": "request_id",
    "digest": "checksum",
    "token": "token",
    "path": "workdir",
    "process": "pid",
    "address": "client",
    "duration": "elapsed",
    "counter": "turn",
    "seed": "seed",
}

_ADVICE: dict[Kind | Change, str] = {
    "datetime": "make it a field {field}, or move it into a late system message; "
    "else coarsen it to the day",
    "date": "make it a field {field}, or move it behind the stable text: it changes every midnight",
    "time": "make it a field {field}, or let the model ask a tool for the time",
    "epoch": "drop it, or make it a field {field} behind the stable text",
    "uuid": "send it as a header or metadata, not in the prompt; else make it a field {field}",
    "id": "send it as a header or metadata, not in the prompt; else make it a field {field}",
    "digest": "drop it: the model cannot use it; keep it in the log or a header",
    "token": "remove it: a secret does not belong into a prompt; pass it to the tool instead",
    "path": "use a fixed folder name, or make it a field {field} behind the stable text",
    "process": "drop it, or cut the log lines down to what the model needs",
    "address": "drop it, or cut the log lines down to what the model needs",
    "duration": "drop it, or round it; else move it into the last message",
    "counter": "move it into the last message, or make it a field {field}",
    "seed": "pass it as a sampling parameter, not in the prompt",
    "changed-text": "declare what changes as a field {field}, or move it behind the stable text",
    "lines-reordered": "sort these lines before rendering, or move the block to the end",
    "message-rewritten": "keep earlier messages as they were sent; append a correction instead",
    "message-removed": "drop history rarely and in large blocks, not one message per request",
    "message-inserted": "append new messages at the end",
    "message-moved": "keep messages where they were sent",
    "tools-reordered": "sort the tools by name before sending them",
    "tool-added": "offer all tools from the start, or announce the new one in a late message",
    "tool-removed": "keep the tool in the list, and say in a late message that it is unavailable",
    "tool-changed": "keep descriptions and schemas fixed for a conversation",
    "tool-keys-reordered": "write the schema with sorted keys",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One value that changes from request to request.

    Attributes:
        kind: What it is.
        part: Part of the prompt that holds it, such as `messages[0] system`; "" for plain text.
        start: First character of the value in the text of its part.
        stop: Character after its last.
        text: The value.
        line: Its line in the part, from 1.
        column: Its column in that line, from 1.
        num_invalidated_tokens: Tokens from the value's first one to the end of the prompt.
        share: The same as a share of the prompt's tokens.
        advice: What to do about it.
    """

    kind: Kind
    part: str
    start: int
    stop: int
    text: str
    line: int
    column: int
    num_invalidated_tokens: int
    share: float
    advice: str


def advice_for(kind: Kind | Change) -> str:
    """Return what to do about a kind of finding."""
    return _ADVICE[kind].format(field=f"{{{{{field_for(kind)}}}}}")


def field_for(kind: Kind | Change) -> str:
    """Return a name for the field that a value of this kind becomes."""
    return next((name for known, name in _FIELDS.items() if known == kind), "value")

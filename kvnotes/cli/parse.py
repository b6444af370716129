"""From a YAML source to a `Scenario`: every fault with its place, its line and a hint."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from kvnotes.cli.scenario import FORMAT, OPERATIONS, Scenario, explain_turn
from kvnotes.cli.source import KeyPath, Source
from kvnotes.errors import KVNotesError, ScenarioError, nearest

_DOCS = "see docs/scenario.md"
_TYPES = {
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def parse_scenario(source: Source) -> Scenario:
    """Return the scenario that a source holds.

    Raises:
        ScenarioError: The first fault in it, by line; the message says where it is.
    """
    try:
        return Scenario.model_validate(source.data)
    except ValidationError as error:
        faults = [_explained(source, dict(fault)) for fault in error.errors(include_url=False)]
    _, message, hint = min(faults, key=lambda fault: fault[0])
    more = len({fault[1] for fault in faults}) - 1
    if more:
        hint = f"{hint} (and {more} more {'fault' if more == 1 else 'faults'} in this file)"
    raise ScenarioError(message, hint=hint)


def spoken(path: KeyPath) -> str:
    """Return a path in words: ("turns", 2, "edit", "status") is "turn 3, edit.status"."""
    parts: list[str] = []
    if len(path) > 1 and path[0] in ("turns", "messages") and isinstance(path[1], int):
        parts.append(f"{str(path[0])[:-1]} {path[1] + 1}")
        path = path[2:]
    names = ""
    for part in path:
        names += f"[{part + 1}]" if isinstance(part, int) else f".{part}"
    return ", ".join([*parts, *([names.lstrip(".")] if names else [])])


def located(error: KVNotesError, source: Source, path: KeyPath) -> KVNotesError:
    """Return the same error, its message beginning with file, line and place."""
    place = source.where(path, spoken(path))
    return type(error)(f"{place}: {error.message}", hint=error.hint)


def _explained(source: Source, fault: dict[str, Any]) -> tuple[int, str, str]:
    """Return line, message and hint of one validation error."""
    path = _without_tags(fault["loc"])
    message, hint = _worded(fault, path)
    label = path
    if fault["type"] == "missing":
        path = label = path[:-1]
    elif key := fault.get("ctx", {}).get("key"):
        path = (*path, key)  # the key's own line; the label is the mapping it stands in
    line = source.lines.get(path, 0)
    return line, f"{source.where(path, spoken(label))}: {message}", hint


def _worded(fault: dict[str, Any], path: KeyPath) -> tuple[str, str]:
    kind, context, value = fault["type"], fault.get("ctx", {}), fault.get("input")
    if kind == FORMAT:
        return context["message"], context["hint"]
    if kind == "missing":
        return f"has no {fault['loc'][-1]!r}", _DOCS
    if kind == "union_tag_not_found":
        return explain_turn(value)
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        return f"unknown value {_shown(value)}", nearest(str(value), known)
    if kind in _TYPES:
        return f"takes {_TYPES[kind]}, got {_shown(value)}", _DOCS
    if kind in _LIMITS:
        key, words = _LIMITS[kind]
        return f"must be {words} {context[key]}, got {_shown(value)}", _DOCS
    if kind == "too_short" and path[-1] in ("messages", "turns"):
        what = "the prompt" if path[-1] == "messages" else "the conversation"
        return f"{what} is empty: there are no {path[-1]}", "write at least one"
    if kind in ("too_short", "string_too_short"):
        least = context.get("min_length", 1)
        return ("is empty" if least == 1 else f"needs {least} or more entries"), _DOCS
    return str(fault["msg"]), _DOCS


def _without_tags(path: KeyPath) -> KeyPath:
    """Drop what pydantic adds: the operation's name after a turn, `[key]` after a key."""
    if len(path) > 2 and path[0] == "turns" and path[2] in OPERATIONS:
        path = (*path[:2], *path[3:])
    return tuple(part for part in path if part != "[key]")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

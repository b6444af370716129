"""Tools as segments: one canonical text for each JSON schema of a tool.

Owns the canonical form, its limits and the names of tool segments. Knows no messages and no
tokenizer: whether the text holds control strings is for whoever puts it into a prompt.

Equal schemas give equal text, byte for byte, so a tool is compiled once whoever sends it:
keys are sorted but for name, description and parameters, arrays keep their order, 1.0 is 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvnotes.errors import TemplateError
from kvnotes.prompt import slots
from kvnotes.prompt.escape import find_private
from kvnotes.prompt.messages import SegmentText

TOOL_PREFIX = "tool/"
"""What the name of every tool segment begins with; a version follows the name behind an @."""

MAX_TOOL_DEPTH = 32
"""Most objects and arrays inside each other; APIs that take tools allow 5 to 10."""

MAX_TOOL_CHARS = 65_536
"""Longest canonical text: a tool of this size fills a context of 16k tokens."""

MAX_NAME_CHARS = 128

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_./-]*"
_VERSION = r"[A-Za-z0-9_.-]+"
_ORDER = ("name", "description", "parameters")
_OTHER_NAMES = ("input_schema", "inputSchema")
_MAX_NUMBER = 1 << 1024
"""One above the largest double, rounded up: no JSON reader is sure to take more."""


def tool_text(schema: object) -> str:
    """Return the canonical text of a tool.

    Args:
        schema: The JSON object of a function, `{"name", "description", "parameters"}`, bare or
            as `{"type": "function", "function": {...}}`; all forms give the same text.

    Returns:
        JSON on one line, in the form that chat templates show tools in.

    Raises:
        TemplateError: Not a function, no name, not JSON, too deep or too large.
    """
    function = _function(schema)
    where = f"tool {_name(function)!r}"
    _check_known(function, where)
    canonical = _Canonical(where)
    found = canonical.members(function, 1)
    ordered = {key: found[key] for key in (*_ORDER, *found) if key in found}
    text = json.dumps({"type": "function", "function": ordered}, ensure_ascii=False)
    canonical.check_size(len(text))
    return text


def tool_segment(schema: object, *, version: str | None = None) -> SegmentText:
    """Return a tool as a segment named `tool/NAME`, or `tool/NAME@VERSION`.

    Args:
        schema: As for `tool_text`.
        version: Tells texts of one tool apart.

    Raises:
        TemplateError: As for `tool_text`, or the version has other characters.
    """
    text = tool_text(schema)
    name = f"{TOOL_PREFIX}{_name(_function(schema))}"
    if version is not None:
        if not re.fullmatch(_VERSION, version):
            raise TemplateError(
                f"version {version!r} of {name!r} is not of the form {_VERSION}",
                hint="use letters, digits and the characters _ . -",
            )
        name = f"{name}@{version}"
    return SegmentText(name, slots.escape(text))


def tool_name(segment_name: str) -> str | None:
    """Return the tool that a segment of this name shows; None if it shows none."""
    if not segment_name.startswith(TOOL_PREFIX):
        return None
    return segment_name.removeprefix(TOOL_PREFIX).partition("@")[0]


def _function(schema: object) -> dict[object, object]:
    """Return the function's own keys, whatever form it came in."""
    if not isinstance(schema, Mapping):
        raise TemplateError(
            f"a tool schema is a JSON object, got {type(schema).__name__}",
            hint="pass the object itself; json.loads makes one of a text",
        )
    kind = schema.get("type", "function")
    if kind != "function":
        raise TemplateError(
            f"a tool schema has the type {kind!r}, only tools of type 'function' have a schema",
            hint='pass {"type": "function", "function": {...}} or the function alone',
        )
    function = schema.get("function", schema)
    if not isinstance(function, Mapping):
        raise TemplateError(
            f"'function' of a tool schema is a JSON object, got {type(function).__name__}",
            hint='pass {"type": "function", "function": {"name": ...}}',
        )
    if function is not schema and set(schema) - {"type", "function"}:
        raise TemplateError(
            f"a tool schema has the keys {sorted(map(str, schema))}, known are function and type",
            hint="put everything else inside 'function'",
        )
    return {k: v for k, v in function.items() if function is not schema or k != "type"}


def _name(function: Mapping[object, object]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise TemplateError(
            f"a tool schema has the keys {sorted(map(str, function))} and the name {name!r}, it "
            "needs a name",
            hint='pass {"name": ..., "description": ..., "parameters": ...}',
        )
    if not re.fullmatch(_NAME, name) or len(name) > MAX_NAME_CHARS:
        raise TemplateError(
            f"tool name {name!r} is not of the form {_NAME} with at most {MAX_NAME_CHARS} "
            "characters",
            hint="use letters, digits and the characters _ . / -",
        )
    return name


def _check_known(function: Mapping[object, object], where: str) -> None:
    """Refuse the parts whose form is known and that have another one."""
    for key, kind in (("description", str), ("parameters", Mapping)):
        if key in function and not isinstance(function[key], kind):
            wanted = "a string" if kind is str else "a JSON object"
            raise TemplateError(
                f"{where} has {key} of type {type(function[key]).__name__}, it takes {wanted}",
                hint=f"leave {key} out if there is none",
            )
    for key in _OTHER_NAMES:
        if key in function:
            raise TemplateError(
                f"{where} has its parameters under {key!r}, they belong under 'parameters'",
                hint="rename the key",
            )


class _Canonical:
    """Brings one tool's JSON into its one form, and counts: shared parts may multiply."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.size = 0

    def value(self, value: object, depth: int) -> object:
        """Return a value with its keys sorted and its numbers in one form."""
        self.size += 1
        self.check_size(self.size)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, (int, float)):
            return self._number(value)
        if depth >= MAX_TOOL_DEPTH:
            raise TemplateError(
                f"{self.where} is nested deeper than {MAX_TOOL_DEPTH} objects and arrays",
                hint="flatten the schema; one that contains itself cannot be shown",
            )
        if isinstance(value, (list, tuple)):
            return [self.value(item, depth + 1) for item in value]
        if isinstance(value, Mapping):
            return self.members(value, depth)
        raise TemplateError(
            f"{self.where} holds a {type(value).__name__}, JSON has objects, arrays, strings, "
            "numbers, true, false and null",
            hint="convert it to one of them",
        )

    def members(self, value: Mapping[object, object], depth: int) -> dict[str, object]:
        """Return the members of an object, sorted by key."""
        keys = sorted(self._key(key) for key in value)
        return {key: self.value(value[key], depth + 1) for key in keys}

    def check_size(self, num_chars: int) -> None:
        """Refuse a text of more characters than a tool may have."""
        if num_chars > MAX_TOOL_CHARS:
            raise TemplateError(
                f"{self.where} has more than {MAX_TOOL_CHARS} characters, the limit",
                hint="shorten its descriptions, or split it into several tools",
            )

    def _key(self, key: object) -> str:
        if not isinstance(key, str):
            raise TemplateError(
                f"{self.where} has the key {key!r} of type {type(key).__name__}, keys are strings",
                hint="write the key as a string",
            )
        return self._text(key)

    def _text(self, text: str) -> str:
        self.size += len(text)
        private = find_private(text)
        if private:
            raise TemplateError(
                f"{self.where} holds U+{ord(private):04X}, a character kept for sentinels or a "
                "lone surrogate",
                hint="remove it; prompts hold neither",
            )
        return text

    def _number(self, value: int | float) -> int | float:
        """Return an integer without a point, whatever it came as."""
        if not -_MAX_NUMBER < value < _MAX_NUMBER:  # also what is no number
            shown = "an integer of 309 digits or more" if isinstance(value, int) else repr(value)
            raise TemplateError(
                f"{self.where} holds {shown}, JSON has finite numbers",
                hint="leave the limit out, or give a number",
            )
        return int(value) if isinstance(value, int) or value.is_integer() else float(value)

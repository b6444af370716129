"""Reading JSON that may be hostile: what it may cost, and how to quote it.

Owns the limits that are checked before a parser or pydantic sees a header, and the words
for what is wrong with one. Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from kvnotes.errors import SegmentFormatError

MAX_BRACKETS = 1 << 20
"""Most brackets and braces in a JSON text, those in its strings included: without a limit
32 MB of `[],[],` become lists of 1 GB before anybody looks at them."""
MAX_VALUES = 1 << 17
"""Most values besides token ids: pydantic keeps an error for each that is wrong."""
MAX_PROBLEM = 300
"""What is wrong is cut to this many characters: it may quote the file."""

DAMAGED = "the file is damaged or was made by something else; compile the segment again"


class FaultError(ValueError):
    """What is wrong with a text, without the name of its file."""


def bounded_json(text: bytes | str, where: str) -> Any:
    """Parse JSON.

    Args:
        text: UTF-8 if it is bytes.
        where: Name of the file, for messages.

    Raises:
        SegmentFormatError: Not JSON as the standard has it, a key stands twice, or too much.
    """
    if num_brackets(text) > MAX_BRACKETS:
        raise SegmentFormatError(
            f"{where} has a header with {num_brackets(text)} brackets, the limit is {MAX_BRACKETS}",
            hint=DAMAGED,
        )
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, FaultError) else "it is not JSON"
        raise SegmentFormatError(
            f"{where} has a header that is damaged: {reason}", hint=DAMAGED
        ) from error


def num_brackets(text: bytes | str) -> int:
    """Return how many objects and lists a JSON text can have at most."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def check_cost(data: dict[str, Any], id_lists: Sequence[str], where: str) -> None:
    """Refuse a header that would cost much to validate.

    Args:
        data: The parsed header.
        id_lists: Names of lists of token ids, which may be long.
        where: Name of the file, for messages.

    Raises:
        SegmentFormatError: A list of token ids holds something else, or there is too much.
    """
    rest: dict[str, Any] = dict(data)
    for name in id_lists:
        ids = rest.pop(name, [])
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise SegmentFormatError(f"{where} has {name} that are none", hint=DAMAGED)
    left = MAX_VALUES
    waiting: list[Any] = [rest]
    while waiting:
        part = waiting.pop()
        left -= len(part)
        if left < 0:
            raise SegmentFormatError(
                f"{where} has a header of more than {MAX_VALUES} values besides its tokens",
                hint=DAMAGED,
            )
        values = part.values() if isinstance(part, dict) else part
        waiting += [value for value in values if isinstance(value, (dict, list))]


def problem(error: ValidationError) -> str:
    """Say the first thing that is wrong, short and without anything that a terminal obeys."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"][:6])
    text = f"{place}: {fault['msg']}" if place else fault["msg"].removeprefix("Value error, ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:MAX_PROBLEM])


def quoted(value: object) -> str:
    """Quote a value, short; of lists and objects only their kind."""
    return ascii(value)[:80] if isinstance(value, (str, int, float)) else type(value).__name__


def texts(value: object) -> Iterator[str]:
    """Yield every text in nested facts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FaultError("a key stands twice")
    return result


def _no_constant(name: str) -> float:
    raise FaultError(f"it holds {name}, which is no JSON")

"""What `kvnotes lint` is given: a text, a scenario, a request or a log, told by its content.

Owns reading and telling them apart. Does not search for anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvnotes.cli.parse import parse_scenario
from kvnotes.cli.scenario import Scenario
from kvnotes.cli.source import STDIN, parse_source, read_text
from kvnotes.errors import InputError
from kvnotes.lint import Part, Request, looks_like_request, parse_request
from kvnotes.prompt.slots import Slot, parse

MAX_NBYTES = 64 << 20
"""Longest log that is read."""

MAX_PROMPT_NBYTES = 8 << 20
"""Longest single prompt; one of a million tokens takes about 4 MB."""

Taken = Literal["text", "scenario", "request", "log"]

_LOG_SUFFIXES = (".jsonl", ".ndjson")
_YAML_SUFFIXES = (".yaml", ".yml")
_SCENARIO_KEYS = (re.compile(r"^messages:", re.MULTILINE), re.compile(r"^turns:", re.MULTILINE))
_NUM_LINES_TRIED = 3
_LINE_HINT = 'each line of a log is one request, such as {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class LintInput:
    """What is searched.

    Attributes:
        name: The file's name.
        taken_as: What its content was taken for.
        parts: The prompt in order; of a log, nothing.
        requests: Those of a log; of anything else, none.
    """

    name: str
    taken_as: Taken
    parts: tuple[Part, ...]
    requests: tuple[Request, ...] = ()


def read_input(path: str) -> LintInput:
    """Read a file and tell what it is; `-` is standard input.

    Raises:
        InputError: It cannot be read, is no UTF-8 text or too long, or a line of a log is no
            request.
        ScenarioError: It is a scenario with a fault.
    """
    if path == STDIN:
        name, content = "<stdin>", sys.stdin.buffer.read(MAX_NBYTES + 1)
        return tell(_decoded(content, name), name, "", Path.cwd())
    file = Path(path)
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot read the prompt {path!r} (in {file.parent.absolute()}): {reason}",
            hint="name a file with a prompt or a log of requests, or - for standard input",
        ) from error
    return tell(_decoded(content, path), path, file.suffix.lower(), file.resolve().parent)


def tell(text: str, name: str, suffix: str, folder: Path) -> LintInput:
    """Tell what a text is.

    Args:
        text: The content of a file.
        name: What to call it in messages.
        suffix: Its suffix in lower case, which decides where the content does not.
        folder: Folder that file names in a scenario are relative to.

    Raises:
        InputError: A line of a log is no request, or a prompt is too long.
        ScenarioError: A scenario has a fault.
    """
    if suffix in _LOG_SUFFIXES or _is_log(text):
        requests = tuple(_requests(text, name))
        if len(requests) != 1:
            return LintInput(name, "log", (), requests)
        return _prompt(name, "request", requests[0].parts)
    if text.lstrip()[:1] in ("{", "[", '"'):
        found = _json(text, name, suffix)
        if found is not None:
            return found
    if all(key.search(text) for key in _SCENARIO_KEYS) or _is_flow_scenario(text, suffix):
        return _prompt(name, "scenario", tuple(_scenario_parts(text, name, folder)))
    return _prompt(name, "text", (Part(text),))


def _prompt(name: str, taken_as: Taken, parts: tuple[Part, ...]) -> LintInput:
    size = sum(len(part.text) for part in parts)
    if size > MAX_PROMPT_NBYTES:
        raise InputError(
            f"{name} is a prompt of {size >> 20} MiB, more than {MAX_PROMPT_NBYTES >> 20} MiB",
            hint="is this the file you meant? a log of many requests has one JSON value per line",
        )
    return LintInput(name, taken_as, parts)


def _decoded(content: bytes, name: str) -> str:
    if len(content) > MAX_NBYTES:
        raise InputError(
            f"{name} has more than {MAX_NBYTES >> 20} MiB", hint="split the log, or take its end"
        )
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}",
            hint="save it as UTF-8",
        ) from error


def _is_log(text: str) -> bool:
    """Whether the first lines are JSON requests, and there is more than one line."""
    lines = [line for _, line in zip(range(_NUM_LINES_TRIED), _filled(text), strict=False)]
    if len(lines) < 2:
        return False
    found = [_loaded(line) for _, line in lines]
    if any(looks_like_request(data) for data in found):
        return True
    return all(isinstance(data, str) for data in found)


def _filled(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers from 1."""
    start, number = 0, 1
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        if line := text[start:stop].strip():
            yield number, line
        start, number = stop + 1, number + 1


def _loaded(text: str) -> object:
    """Return JSON data, None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _requests(text: str, name: str) -> Iterator[Request]:
    for number, line in _filled(text):
        try:
            data = json.loads(line)
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{name}:{number}: not JSON: {reason}", hint=_LINE_HINT) from error
        except RecursionError as error:
            raise InputError(f"{name}:{number}: nested too deeply", hint=_LINE_HINT) from error
        try:
            yield parse_request(data)
        except InputError as error:
            raise InputError(f"{name}:{number}: {error.message}", hint=error.hint) from error


def _json(text: str, name: str, suffix: str) -> LintInput | None:
    """Return what JSON text is: a request, a list of them; None for a plain text."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise InputError(f"{name}: nested too deeply", hint="is this a request?") from error
    except ValueError as error:
        if suffix == ".json" and isinstance(error, json.JSONDecodeError):
            raise InputError(
                f"{name}:{error.lineno}: not JSON: {error.msg}", hint="correct it, or rename it"
            ) from error
        return None
    if isinstance(data, dict) and "turns" in data:
        return None
    if isinstance(data, list) and data and all(_is_message(entry) for entry in data):
        data = {"messages": data}
    if isinstance(data, list) and data and all(looks_like_request(entry) for entry in data):
        requests = tuple(parse_request(entry) for entry in data)
        return LintInput(name, "log", (), requests)
    if isinstance(data, str) or looks_like_request(data):
        return _prompt(name, "request", parse_request(data).parts)
    return None


def _is_message(data: object) -> bool:
    return isinstance(data, dict) and "role" in data


def _is_flow_scenario(text: str, suffix: str) -> bool:
    """Whether a scenario is written in braces."""
    if not text.lstrip().startswith("{"):
        return False
    data = _loaded(text)
    keys = data.keys() if isinstance(data, dict) else ()
    return {"messages", "turns"} <= set(keys) or (
        suffix in _YAML_SUFFIXES and "messages:" in text and "turns:" in text
    )


def _scenario_parts(text: str, name: str, folder: Path) -> Iterator[Part]:
    """Yield the prompt that a scenario starts with; a slot stays a slot.

    The text of a segment that stands inside of a message comes behind the message.
    """
    source = parse_source(text, name, folder)
    scenario = parse_scenario(source)
    for index, message in enumerate(scenario.messages):
        place = f"messages[{index}] {message.role}"
        names = [message.segment] if message.segment else []
        if message.content is not None:
            yield Part(message.content, place)
            if message.role == "system":
                slots = (part for part in parse(message.content, place) if isinstance(part, Slot))
                names += [slot.name for slot in slots if slot.kind == "segment"]
        for segment in names:
            if segment in scenario.segments:
                yield Part(_segment_text(scenario, segment, folder), f"segment {segment}")


def _segment_text(scenario: Scenario, name: str, folder: Path) -> str:
    spec = scenario.segments[name]
    if spec.text is not None:
        return spec.text
    return read_text(folder / str(spec.file), f"file of segment {name!r}")

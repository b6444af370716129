"""Reading a YAML file: plain data, and the line on which each part of it stands.

Owns files, YAML and line numbers; does not know what a scenario is. Every scalar stays the
text that was written: `yes`, `1.10` and `2024-05-01` are no booleans, floats and dates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvnotes.errors import ScenarioError

STDIN = "-"
"""Name of the file that means standard input."""

MAX_NBYTES = 8 << 20
"""Longest file that is read; a policy of a million tokens takes about 4 MB."""

MAX_NODES = 200_000
"""Most YAML values, aliases counted as often as they are used."""

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

Value = object
"""A text, or a list or mapping of values."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed YAML file.

    Args:
        name: What to call it in messages.
        folder: Folder that file names in it are relative to.
        data: Mappings, lists and texts.
        lines: Line of each value, counted from 1, by the keys and indices that lead to it.
    """

    name: str
    folder: Path
    data: Mapping[str, Value]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath, label: str = "") -> str:
        """Return `file:line: label`, the line of the longest known part of `path`."""
        line = next(
            (self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None
        )
        place = self.name if line is None else f"{self.name}:{line}"
        return f"{place}: {label}" if label else place


def read_source(path: str) -> Source:
    """Read and parse a file; `-` is standard input.

    Raises:
        ScenarioError: No such file, not text, not YAML, not a mapping.
    """
    if path == STDIN:
        name, folder = "<stdin>", Path.cwd()
        content = _limited(sys.stdin.buffer.read(MAX_NBYTES + 1), name)
    else:
        name, folder = path, Path(path).resolve().parent
        content = read_bytes(Path(path), "scenario")
    return parse_source(content, name, folder)


def read_bytes(path: Path, what: str) -> bytes:
    """Return the content of a file.

    Raises:
        ScenarioError: It cannot be read; `what` says what it was wanted for.
    """
    try:
        with path.open("rb") as file:
            return _limited(file.read(MAX_NBYTES + 1), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError(
            f"cannot read the {what} {str(path)!r} (in {path.parent.absolute()}): {reason}",
            hint="check the name; files named in a scenario are relative to its folder",
        ) from error


def read_text(path: Path, what: str) -> str:
    """Return a file's text, line ends normalised.

    Raises:
        ScenarioError: It cannot be read or is not UTF-8.
    """
    content = read_bytes(path, what)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"the {what} {path} is not UTF-8 text: byte {error.start} is "
            f"0x{content[error.start]:02x}",
            hint="save it as UTF-8",
        ) from error


def parse_source(content: bytes | str, name: str, folder: Path) -> Source:
    """Parse YAML text.

    Raises:
        ScenarioError: Not YAML, not a mapping, a key given twice, a tag.
    """
    try:
        node = yaml.compose(content, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise ScenarioError(
            f"{place}: not YAML: {error.problem or error.context}", hint=_yaml_hint(error)
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ScenarioError(
            f"{name}: not YAML: {reason}", hint="save it as UTF-8 text without control characters"
        ) from error
    except RecursionError as error:
        raise ScenarioError(
            f"{name}: not a scenario: lists or mappings are nested too deeply",
            hint="a scenario needs five levels",
        ) from error
    if not isinstance(node, yaml.MappingNode):
        kind = "is empty" if node is None else f"is {_kind(node)}"
        raise ScenarioError(
            f"{name}: {kind}, a scenario is a mapping",
            hint="begin with the keys messages: and turns:; see docs/scenario.md",
        )
    reader = _Reader(name)
    data = reader.value(node, ())
    assert isinstance(data, dict)
    return Source(name, folder, data, reader.lines)


class _Reader:
    """Turns YAML nodes into data and notes their lines."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._name = name
        self._open: set[int] = set()
        self._num_nodes = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Value:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self._error(node, f"more than {MAX_NODES} values", "split the scenario")
        if node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"the tag {node.tag}", "remove it: every value is text")
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        if id(node) in self._open:
            raise self._error(node, "a value that holds itself", "remove the alias")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Value]:
        result: dict[str, Value] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, f"{_kind(key)} as a key", _SLOT_HINT)
            name = str(key.value)
            place = (*path, name)
            if name in result:
                what = f"the key {name!r} twice, first on line {self.lines[place]}"
                raise self._error(key, what, "keep one of them")
            self.lines[place] = key.start_mark.line + 1
            result[name] = self.value(value, place)
        return result

    def _error(self, node: yaml.Node, what: str, hint: str) -> ScenarioError:
        return ScenarioError(f"{self._name}:{node.start_mark.line + 1}: holds {what}", hint=hint)


_SLOT_HINT = "quote text that begins with a brace or bracket, such as '{{field}} is known'"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "plain text"


def _yaml_hint(error: yaml.MarkedYAMLError) -> str:
    problem = f"{error.context or ''} {error.problem or ''}"
    if "tab" in problem or "\\t" in problem:
        return "indent with spaces, not with tabs"
    if "mapping values" in problem:
        return "quote text that holds ': '"
    if "single document" in problem:
        return "keep one scenario in a file: remove the line ---"
    if "flow" in problem:
        return f"close the bracket or brace; {_SLOT_HINT}"
    return "quote text that holds : # { } [ ] & * ! or %"


def _limited(content: bytes, name: str) -> bytes:
    if len(content) > MAX_NBYTES:
        raise ScenarioError(
            f"{name} has more than {MAX_NBYTES >> 20} MiB", hint="is this the file you meant?"
        )
    return content

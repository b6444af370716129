"""The pages of the documentation, taken apart and run like a reader would.

    ```console            commands behind "$ ", continued by "> "; what stands below a command is
                          its output, and where nothing stands there, the output is not compared
    ```python             runs in one namespace for the page; an unnamed block right behind it is
                          what it prints, and without one it must print nothing
    <!-- file: NAME -->   on a line of its own, the block behind it is saved under that name

Everything of a page runs in order, in a folder of its own that has the repository's examples and
docs, with a KVNOTES_HOME of its own that has the converted model.

In every output `...` stands for any text in a line, and alone on a line for any number of lines.
Outputs of commands are compared after these rules, on both sides:

* Runs of blanks count as one, blanks at the ends of lines as none.
* Times (`12 ms`, `3.4 s`), speedups (`3.4x`) with the three times before them, dates, versions
  (`5.24.0`), hashes (8 hex digits and more), numbers of threads and numbers with an exponent
  (`2.3e-06`) are all alike.
* The folder of the page is `/home/you/kvnotes`, KVNOTES_HOME is `/home/you/.cache/kvnotes`.
* A command fails exactly if its output has a line that begins with `error:`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

FOLDER, HOME = "/home/you/kvnotes", "/home/you/.cache/kvnotes"
COMMAND_SECONDS = 600
"""A reader's machine takes a tenth of this; a loaded one must not fail a page."""

STAND_INS = {"make demo": "make --no-print-directory -o .venv/.ready demo"}
"""Set-up is done already: these tests run in it, and maybe inside another make."""

_FENCE = re.compile(r"^```(\w*)[ \t]*$")
_FILE = re.compile(r"^<!-- file: (\S+) -->$")
_RULES = (
    (
        re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?"),
        "DATE",
    ),
    (re.compile(r"\b\d+\.\d+\.\d+(?:\+\w+)*\b"), "VERSION"),
    (re.compile(r"\b\d[\d.]*e[+-]\d+\b"), "SMALL"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b"), "HASH"),
    (re.compile(r"\b\d[\d,]*(?:\.\d+)? (?:ms|s|min)\b"), "TIME"),
    (re.compile(r"(?:(?:\s+\d[\d,.]*){3}\s+|\b)\d+(?:\.\d+)?x"), " SPEEDUP"),
    (re.compile(r"\b\d+ threads?\b"), "THREADS"),
    (re.compile(r"[ \t]+"), " "),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        language: What stands behind the fence, "" for nothing.
        text: Its lines, each with its end.
        line: Line of the opening fence, from 1.
        file: Name that it is saved under, "" for none.
        follows: It stands right behind the block before it.
    """

    language: str
    text: str
    line: int
    file: str = ""
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block; `output` is None where it is not compared."""

    command: str
    output: str | None


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, name, between = 0, "", True
    while number < len(lines):
        line = lines[number]
        number += 1
        opening = _FENCE.match(line)
        if opening is None:
            named = _FILE.match(line)
            name = named[1] if named else name if not line.strip() else ""
            between = between or bool(line.strip())
            continue
        start = number
        while lines[number] != "```":
            number += 1
        text = "".join(f"{line}\n" for line in lines[start:number])
        number += 1
        found.append(Block(opening[1], text, start, name, follows=bool(found) and not between))
        name, between = "", False
    return found


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console block."""
    command, output = "", ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield Command(command, output or None)
            command, output = line[2:], ""
        elif line.startswith("> ") and not output:
            command += "\n" + line[2:]
        else:
            assert command, f"line {block.line}: a console block begins with a command"
            output += line + "\n"
    yield Command(command, output or None)


def matches(expected: str, actual: str, *, strict: bool = False) -> bool:
    """Whether an output is the one a page shows, by the rules of this module.

    Args:
        expected: What the page shows.
        actual: What came.
        strict: Nothing may vary but what `...` stands for.
    """
    pattern = ""
    for line in _lines(expected, strict):
        if line == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + r"\n"
    whole = "".join(f"{line}\n" for line in _lines(actual, strict))
    return re.fullmatch(pattern, whole) is not None


def _lines(output: str, strict: bool) -> list[str]:
    return output.rstrip().splitlines() if strict else alike(output)


def alike(output: str) -> list[str]:
    """Return the lines of an output with everything that may vary made alike."""
    result = []
    for line in output.rstrip().splitlines():
        for rule, word in _RULES:
            line = rule.sub(word, line)
        result.append(line.strip())
    return result


class Page:
    """Runs one page.

    Args:
        path: The page.
        folder: An empty folder for it.
        models: Folder of converted models.
    """

    def __init__(self, path: Path, folder: Path, models: Path) -> None:
        self.path = path
        self.folder, self.home = folder / "kvnotes", folder / "home"
        self._state = folder / "state.sh"
        self._names: dict[str, object] = {"__name__": path.stem}
        for place, target in (
            (self.folder / "examples", ROOT / "examples"),
            (self.folder / "docs", DOCS),
            (self.folder / "Makefile", ROOT / "Makefile"),
            (self.folder / "requirements.lock", ROOT / "requirements.lock"),
            (self.folder / "pyproject.toml", ROOT / "pyproject.toml"),
            (self.folder / ".venv", Path(sys.prefix)),
            (self.home / "models", models),
        ):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)

    @property
    def environment(self) -> dict[str, str]:
        """What its commands see: nothing of the caller's own settings."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVNOTES")}
        return own | {
            "KVNOTES_HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }

    def run(self) -> None:
        """Run everything in order.

        Raises:
            AssertionError: Something prints or does what the page does not say.
        """
        found = blocks(self.path)
        for block, after in zip(found, [*found[1:], None], strict=True):
            place = f"{self.path.name}:{block.line}"
            if block.file:
                target = self.folder / block.file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            elif block.language == "console":
                for command in commands(block):
                    self._check_command(command, place)
            elif block.language == "python":
                shown = after.text if after and after.follows and not after.language else ""
                check(shown, self._python(block), place, strict=True)

    def _check_command(self, command: Command, place: str) -> None:
        code, output = self._shell(command.command)
        place = f"{place}: $ {command.command}"
        fails = re.search(r"^error:", command.output or "", re.MULTILINE) is not None
        if command.output is not None:
            check(command.output, output, place)
        assert (code != 0) == fails, f"{place}\nexit code {code}\n{output}"

    def _shell(self, command: str) -> tuple[int, str]:
        """Run a command in a shell that has what the ones before it exported."""
        command = STAND_INS.get(command, command)
        script = (
            f'cd "{self.folder}"; [ ! -e "{self._state}" ] || . "{self._state}"\n{command}\n'
            f'code=$?; {{ export -p; echo "cd \\"$PWD\\""; }} > "{self._state}"; exit $code\n'
        )
        done = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            env=self.environment,
            check=False,
        )
        return done.returncode, self._placed(done.stdout)

    def _python(self, block: Block) -> str:
        """Run a block in this process, in the folder of the page."""
        printed = io.StringIO()
        before, old = os.getcwd(), dict(os.environ)
        os.environ.update({"KVNOTES_HOME": str(self.home)})
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(printed):
                source = "\n" * block.line + block.text  # line numbers of the page
                exec(compile(source, self.path.name, "exec"), self._names)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(old)
        return self._placed(printed.getvalue())

    def _placed(self, output: str) -> str:
        return output.replace(str(self.home), HOME).replace(str(self.folder), FOLDER)


def check(expected: str, actual: str, place: str, *, strict: bool = False) -> None:
    """Compare an output with what a page shows."""
    if not matches(expected, actual, strict=strict):
        lines = difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), "the page", "the output", lineterm=""
        )
        raise AssertionError("\n".join([place, *lines]))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        title = re.fullmatch(r"#{1,6} (.*)", line)
        if title and not fenced:
            plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", title[1]).strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures, without those of other hosts."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]

"""Writes the generated documents; a test checks that they are current.

    python -m kvnotes.cli.documents docs

Owns docs/cli.md and the schemas, docs/*.schema.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvnotes import errors
from kvnotes.cli import failures
from kvnotes.cli.doctor_records import DoctorRecord
from kvnotes.cli.explain_records import ExplainRecord
from kvnotes.cli.lint_records import LintRecord
from kvnotes.cli.main import HELP_WIDTH, command_paths, help_text
from kvnotes.cli.records import RunRecord
from kvnotes.cli.scenario import Scenario

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_CLI = """\
# The command line

Written by `python -m kvnotes.cli.documents docs`; a test checks that it is current. The
scenario format and the JSON output are in [scenario.md](scenario.md).

Data goes to stdout; progress and errors go to stderr, progress only while that is a
terminal. An error is a line `error: ...` and mostly a line `hint: ...` with the way out;
there are no tracebacks. The text output is 100 columns wide when it goes to a pipe or file,
else as wide as the terminal, up to 120; set `COLUMNS` for another width. `NO_COLOR` is
respected. `KVNOTES_HOME` is the folder of converted models.

```console
$ kvnotes run examples/retail.yaml
$ kvnotes run examples/retail.yaml --json --no-compare | jq '.turns[].ttft_ms'
$ kvnotes run - --check < examples/retail.yaml
ok: 10 turns, 5 fields, 1 segment
```

{help}
## Exit codes

| code | class | meaning |
|---|---|---|
{codes}
"""


def documents() -> dict[str, str]:
    """Return the text of each generated document, by its name in docs/."""
    return {
        "scenario.schema.json": _schema(Scenario, "validation", "A kvnotes scenario"),
        "run.schema.json": _schema(RunRecord, "serialization", "What kvnotes run --json prints"),
        "explain.schema.json": _schema(
            ExplainRecord, "serialization", "What kvnotes explain --json prints"
        ),
        "doctor.schema.json": _schema(
            DoctorRecord, "serialization", "What kvnotes doctor --json prints"
        ),
        "lint.schema.json": _schema(LintRecord, "serialization", "What kvnotes lint --json prints"),
        "cli.md": _CLI.format(help=_help(), codes="\n".join(_codes())),
    }


def main(folder: str) -> None:
    """Write all documents into a folder."""
    for name, text in documents().items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


def _schema(model: type[BaseModel], mode: Any, title: str) -> str:
    schema = model.model_json_schema(mode=mode)
    result = {"$schema": _DIALECT, "title": title, **_tidy(schema)}
    return json.dumps(result, indent=2, ensure_ascii=False) + "\n"


def _tidy(value: Any, *, names: bool = False) -> Any:
    """Shorten what pydantic writes.

    Titles made of names go. A key that may be left out takes no null: in a scenario that is
    the text "null". Alternatives of plain types become one list of types.

    Args:
        value: Part of a schema.
        names: Its keys are names of properties or definitions.
    """
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    if names:
        return {key: _tidy(item) for key, item in value.items()}
    result = {
        key: _tidy(item, names=key in ("properties", "$defs"))
        for key, item in value.items()
        if key != "title"
    }
    options = result.get("anyOf", [])
    if "default" in result and result["default"] is None:
        del result["default"]
        options = [option for option in options if option != {"type": "null"}]
        result["anyOf"] = options
    if len(options) == 1:
        del result["anyOf"]
        return {**options[0], **result}
    if options and all(set(option) == {"type"} for option in options):
        del result["anyOf"]
        return {"type": [option["type"] for option in options], **result}
    return result


def _help() -> str:
    parts = []
    for command in command_paths():
        name = " ".join(["kvnotes", *command])
        text = help_text(command, HELP_WIDTH)
        parts.append(f"## {name}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def _codes() -> Iterator[str]:
    rows = [
        (0, "", "done"),
        (failures.FINDINGS_CODE, "", "`kvnotes lint --check` found something"),
        (failures.USAGE_CODE, "", "the command line is wrong"),
        (failures.INTERNAL_CODE, "", "a fault of kvnotes itself"),
        (failures.INTERRUPTED_CODE, "", "interrupted by Ctrl-C"),
        (failures.BROKEN_PIPE_CODE, "", "the reader of the output went away"),
    ]
    for kind in vars(errors).values():
        if kind is errors.KVNotesError:  # never raised itself
            continue
        if _is_error(kind) and "exit_code" in vars(kind):  # the others share their base's
            doc = (kind.__doc__ or "").splitlines()[0]
            rows.append((kind.exit_code, f"`{kind.__name__}`", doc))
    return (f"| {code} | {name} | {meaning} |" for code, name, meaning in sorted(rows))


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.KVNotesError)


if __name__ == "__main__":
    main(*sys.argv[1:])

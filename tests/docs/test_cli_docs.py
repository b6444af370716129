"""The documents of the command line are current, and their examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvnotes.cli import scenario as form
from kvnotes.cli.check import prepare
from kvnotes.cli.documents import documents
from kvnotes.cli.records import TurnRecord
from kvnotes.cli.source import parse_source

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(documents()))
def test_generated_document_is_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == documents()[name], "run: python -m kvnotes.cli.documents docs"


def test_help_names_every_option() -> None:
    text = documents()["cli.md"]
    for option in ("--json", "--no-compare", "--strategy", "--threads", "--repeat", "--check"):
        assert option in text
    assert max(map(len, text.splitlines())) <= 120


def test_every_scenario_in_the_documents_is_valid() -> None:
    blocks = [
        block
        for path in DOCS.glob("*.md")
        for block in re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
        if "\nturns:" in block
    ]
    assert blocks
    for block in blocks:
        assert prepare(parse_source(block, "docs", DOCS))


def test_every_key_of_a_scenario_is_documented() -> None:
    text = (DOCS / "scenario.md").read_text(encoding="utf-8")
    names = [*form.Scenario.model_fields, *form.Sampling.model_fields, *form.OPERATIONS]
    names += [*form.SegmentSpec.model_fields, *form.EditTurn.model_fields]
    for name in names:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


def test_every_key_of_the_json_is_documented() -> None:
    text = (DOCS / "scenario.md").read_text(encoding="utf-8")
    schema = json.loads((DOCS / "run.schema.json").read_text(encoding="utf-8"))
    for name in [*TurnRecord.model_fields, *schema["$defs"]["Fidelity"]["properties"]]:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name

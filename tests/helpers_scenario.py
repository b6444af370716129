"""A good scenario, and ways to spoil it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvnotes.cli.check import Prepared, prepare
from kvnotes.cli.source import parse_source
from kvnotes.errors import KVNotesError, ScenarioError

ROOT = Path(__file__).resolve().parents[1]

GOOD = """\
model: smollm2-135m
fields:
  status: pending
segments:
  policy: {text: "Orders that are pending can be cancelled.\\n"}
messages:
  - {role: system, segment: policy}
  - {role: system, content: "status: {{status}}\\n", id: order}
turns:
  - {user: "Can I cancel?", id: ask, generate: {max_new_tokens: 4}}
  - {tool: "lookup: 7 days", id: lookup}
  - {edit: {status: shipped}, strategy: suffix, verify: cheap}
  - {decide: [yes, no]}
  - {move: lookup, before: ask}
  - {replace: lookup, content: "lookup: 9 days"}
  - {delete: ask}
  - {system: "Answer in one word.", decide: ["1.10", 1.1]}
  - {assistant: "Yes."}
  - {generate: {temperature: 0.5, top_p: 0.9, top_k: 5, seed: 3, stop: ["\\n"]}}
"""


def check(text: str, folder: Path = Path("/nowhere")) -> Prepared:
    return prepare(parse_source(text, "s.yaml", folder))


def changed(**keys: Any) -> str:
    """The good scenario with some keys replaced, or (None) removed."""
    data: dict[str, Any] = yaml.safe_load(GOOD)
    for key, value in keys.items():
        data[key] = value
        if value is None:
            del data[key]
    return yaml.safe_dump(data, sort_keys=False)


def with_turns(*turns: Any) -> str:
    return changed(turns=list(turns))


def refused(text: str, kind: type[KVNotesError] = ScenarioError) -> KVNotesError:
    with pytest.raises(KVNotesError) as caught:
        check(text)
    assert type(caught.value) is kind, caught.value
    assert caught.value.hint, "every error has a way out"
    assert "s.yaml" in caught.value.message
    return caught.value

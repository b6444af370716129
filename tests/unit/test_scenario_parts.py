"""Scenarios whose parts do not fit each other, and the schema of scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helpers_scenario import GOOD, ROOT, changed, check, refused, with_turns

from kvnotes.cli.check import prepare
from kvnotes.cli.source import parse_source
from kvnotes.errors import (
    FieldValueError,
    KVNotesError,
    MissingFieldError,
    ModelNotFoundError,
    PlanError,
    ScenarioError,
    TemplateError,
    UnknownFieldError,
    UnknownSegmentError,
)

# -- what the parts say about each other -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "said", "hint"),
    [
        (changed(fields={}), MissingFieldError, "the slot {{status}} has no value", "status"),
        (changed(fields={"sttus": "a"}), UnknownFieldError, "'sttus'", "'status'"),
        (changed(fields={"status": "a", "x": "b"}), UnknownFieldError, "'x'", "{{x}}"),
        (changed(fields={"status": "a", "a b": "c"}), TemplateError, "'a b'", "letters"),
        (changed(fields={"status": "a\nb"}), FieldValueError, "single-line", ">-"),
        (changed(fields={"status": "a\tb"}), FieldValueError, "single-line", "spaces"),
        (changed(fields={"status": "a" * 201}), FieldValueError, "201 characters", "segment"),
        (changed(segments={}), UnknownSegmentError, "'policy'", "known: none"),
        (changed(segments={"polcy": {"text": "a"}}), UnknownSegmentError, "'policy'", "'polcy'"),
        (
            changed(segments={"policy": {"text": "a"}, "b": {"text": "c"}}),
            ScenarioError,
            "no message uses the segment 'b'",
            "segment: b",
        ),
        (changed(segments={"policy": {"text": "{{other}}"}}), MissingFieldError, "other", "other"),
        (changed(segments={"policy": {"text": "{{"}}), TemplateError, "slot", "literal"),
        (changed(segments={"policy": {"text": ""}}), TemplateError, "no text", "remove"),
        (
            changed(segments={"policy": {"text": "a", "variants": {"status": ["b"]}}}),
            TemplateError,
            "variants of the field 'status'",
            "preamble",
        ),
        (
            changed(
                segments={
                    "policy": {
                        "text": "a",
                        "preamble": "{{status}}",
                        "variants": {"status": ["b\nc"]},
                    }
                }
            ),
            FieldValueError,
            "single-line",
            "spaces",
        ),
        (changed(segments={"policy": "none.md"}), ScenarioError, "none.md", "folder"),
        (changed(segments={"policy": "a\x00b"}), ScenarioError, "segments.policy", "name"),
        (changed(chat_template="none.jinja"), ScenarioError, "none.jinja", "folder"),
        (changed(model="./none.gguf"), ModelNotFoundError, "none.gguf", "--model"),
        (changed(erratum="no value"), TemplateError, "{{value}}", "[UPDATE]"),
        (changed(erratum="[U] {revision} {{value}}"), TemplateError, "revision", "[UPDATE]"),
        (
            changed(erratum_mode="append", strategy="refresh+erratum"),
            PlanError,
            "strategy: strategy 'refresh+erratum'",
            "erratum",
        ),
        (with_turns({"edit": {"stat": "a"}}), UnknownFieldError, "turn 1: unknown field", "status"),
        (with_turns({"edit": {"status": "a\nb"}}), FieldValueError, "turn 1", ">-"),
        (
            with_turns({"edit": {"status": "a"}, "strategy": "swap"}),
            PlanError,
            "needs a segment with variants of 'status'",
            "preamble",
        ),
        (with_turns({"delete": "odrer"}), TemplateError, "no message 'odrer'", "'order'"),
        (
            with_turns({"delete": "ask"}, {"user": "a", "id": "ask"}),
            TemplateError,
            "turn 1: there is no message 'ask' at this turn, turn 2 adds it",
            "behind it",
        ),
        (
            with_turns({"user": "a", "id": "ask"}, {"delete": "ask"}, {"delete": "ask"}),
            TemplateError,
            "turn 3: there is no message 'ask' at this turn",
            "deleted before",
        ),
        (with_turns({"delete": "order"}), UnknownFieldError, "nothing shows the field", "keep"),
        (with_turns({"move": "x"}), TemplateError, "no message 'x'", "known"),
        (with_turns({"move": "order", "before": "x"}), TemplateError, "no message 'x'", "known"),
        (with_turns({"replace": "x", "content": "a"}), TemplateError, "no message 'x'", "known"),
        (with_turns({"replace": "order", "content": "a"}), UnknownFieldError, "status", "keep"),
        (with_turns({"user": "a", "id": "order"}), TemplateError, "ids are unique", "another"),
        (with_turns({"system": "{{nothing}}"}), MissingFieldError, "turn 1", "nothing"),
        (with_turns({"system": "{{segment:x}}"}), UnknownSegmentError, "'x'", "policy"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    text: str, kind: type[KVNotesError], said: str, hint: str
) -> None:
    error = refused(text, kind)
    assert said in error.message
    assert hint in error.hint


def test_the_only_message_cannot_be_deleted() -> None:
    text = 'messages: [{role: user, content: "a", id: one}]\nturns: [{delete: one}]'
    assert "only one left" in refused(text, TemplateError).message


def test_missing_file_of_a_segment_names_path_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        check(changed(segments={"policy": "sub/none.md"}), tmp_path)
    assert "none.md" in caught.value.message
    assert str(tmp_path / "sub") in caught.value.message


def test_segment_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.md").write_bytes(b"caf\xe9")
    with pytest.raises(ScenarioError, match="byte 3 is 0xe9"):
        check(changed(segments={"policy": "policy.md"}), tmp_path)


def test_chat_template_that_is_not_jinja_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}", encoding="utf-8")
    with pytest.raises(TemplateError, match=r"chat_template: .* not valid jinja"):
        check(changed(chat_template="chat.jinja"), tmp_path)


def test_strategy_and_dtype_of_the_command_line_are_checked() -> None:
    source = parse_source(GOOD, "s.yaml", Path("/nowhere"))
    assert prepare(source, {"strategy": "suffix"}).scenario.strategy == "suffix"
    assert prepare(source, {"model": "./x"}).model == "./x"
    with pytest.raises(PlanError, match="unknown strategy 'sufix'"):
        prepare(source, {"strategy": "sufix"})
    with pytest.raises(KVNotesError, match="no dtype 'int8'"):
        prepare(source, {"dtype": "int8"})
    with pytest.raises(PlanError, match="swap"):
        prepare(
            parse_source(with_turns({"edit": {"status": "a"}}), "s", Path()), {"strategy": "swap"}
        )


# -- the schema --------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    text = (ROOT / "docs" / "scenario.schema.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def test_schema_accepts_what_is_accepted() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    for text in (
        GOOD,
        *(p.read_text(encoding="utf-8") for p in (ROOT / "examples").glob("*.yaml")),
    ):
        validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "keys",
    [
        {"modle": "x"},
        {"turns": []},
        {"turns": [{"usr": "a"}]},
        {"turns": [{"user": "a", "generate": {"max_tokens": 1}}]},
        {"turns": [{"edit": {"status": "a"}, "delete": "b"}]},
        {"segments": {"policy": {}}},
        {"segments": {"policy": {"file": "a", "text": "b"}}},
        {"messages": [{"role": "boss", "content": "a"}]},
        {"num_seam_tokens": -1},
    ],
)
def test_schema_refuses_what_is_refused(keys: dict[str, Any]) -> None:
    data = yaml.safe_load(changed(**keys))
    assert not jsonschema.Draft202012Validator(schema()).is_valid(data)
    refused(changed(**keys))

"""Scenarios: what is read, and that a file of the wrong form is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_scenario import GOOD, ROOT, changed, check, refused, with_turns

from kvnotes.cli import scenario as form
from kvnotes.cli import source as source_module
from kvnotes.cli.check import erratum_style, prepare
from kvnotes.cli.run import title_of
from kvnotes.cli.source import read_source
from kvnotes.errors import ScenarioError

# -- what is read ------------------------------------------------------------------------------


def test_every_operation_is_read() -> None:
    prepared = check(GOOD)
    assert prepared.summary == "10 turns, 1 field, 1 segment"
    operations = [form.operation_of(turn) for turn in prepared.scenario.turns]
    assert set(operations) == set(form.OPERATIONS)


def test_scalars_stay_as_they_are_written() -> None:
    text = """
fields: {a: yes, b: 1.10, c: 2024-05-01, d: null, e: 0x10, f: "", g: , h: !!str 007}
messages: [{role: system, content: "{{a}}{{b}}{{c}}{{d}}{{e}}{{f}}{{g}}{{h}}"}]
turns: [{user: 12:30:00, decide: [on, off]}]
"""
    scenario = check(text).scenario
    values = ["yes", "1.10", "2024-05-01", "null", "0x10", "", "", "007"]
    assert list(scenario.fields.values()) == values
    turn = scenario.turns[0]
    assert isinstance(turn, form.UserTurn)
    assert turn.user == "12:30:00"
    assert turn.decide == ["on", "off"]


def test_segment_file_is_found_beside_the_scenario_not_beside_the_shell(tmp_path: Path) -> None:
    (tmp_path / "policy.md").write_text("\ufeffBe kind.\r\n", encoding="utf-8", newline="")
    prepared = check(changed(segments={"policy": "policy.md"}), tmp_path)
    assert prepared.segments["policy"].text == "Be kind.\n"
    prepared = check(changed(segments={"policy": {"file": "policy.md"}}), tmp_path)
    assert prepared.segments["policy"].text == "Be kind.\n"


def test_segment_with_variants_is_read() -> None:
    spec = {"text": "t", "preamble": "status: {{status}}\n", "variants": {"status": ["a", "b"]}}
    segment = check(changed(segments={"policy": spec})).segments["policy"]
    assert segment.variants == (("status", ("a", "b")),)


def test_late_system_message_may_use_segments_and_fields() -> None:
    text = changed(
        segments={"policy": {"text": "p"}, "rules": {"text": "r"}},
        turns=[{"system": "{{segment:rules}} {{status}}"}],
    )
    assert set(check(text).segments) == {"policy", "rules"}


def test_empty_generate_means_the_defaults() -> None:
    turn = check(
        GOOD.replace("{generate: {temperature", "{generate: }\n  - {generate: {temperature")
    )
    generate = turn.scenario.turns[-2]
    assert isinstance(generate, form.GenerateTurn)
    assert generate.generate == form.Sampling()


def test_reply_has_an_id_that_later_turns_can_name() -> None:
    assert check(with_turns({"user": "a", "generate": {}}, {"delete": "t1"}))


def test_erratum_marker_is_what_the_template_begins_with() -> None:
    bracketed = erratum_style("[NEWS] {field} is {{value}}.", "rewrite")
    assert bracketed.marker == "[NEWS]"
    worded = erratum_style("Correction: {field} is {{value}}.", "append")
    assert worded.marker == "Correction:"
    assert "{revision}" in worded.append_template
    numbered = erratum_style("[NEWS] {revision}: {field} is {{value}}.", "append")
    assert numbered.append_template == "[NEWS] {revision}: {field} is {{value}}."


def test_titles_name_operation_and_text() -> None:
    titles = [title_of(turn) for turn in check(GOOD).scenario.turns]
    assert titles == [
        "user: Can I cancel?",
        "tool: lookup: 7 days",
        "edit status = shipped",
        "decide",
        "move lookup before ask",
        "replace lookup: lookup: 9 days",
        "delete ask",
        "system: Answer in one word.",
        "assistant: Yes.",
        "generate",
    ]


def test_defaults_are_those_of_the_library() -> None:
    from dataclasses import fields

    from kvnotes.engine.base import SamplingParams
    from kvnotes.engine.models import DEFAULT_MODEL, DTYPES

    ours = {**form.Sampling().model_dump(), "stop": ()}
    assert ours == {f.name: f.default for f in fields(SamplingParams)}
    assert form.DEFAULT_MODEL == DEFAULT_MODEL
    assert form.DTYPES == DTYPES


@pytest.mark.parametrize("name", ["retail.yaml", "variants.yaml"])
def test_examples_are_valid(name: str) -> None:
    assert prepare(read_source(str(ROOT / "examples" / name)))


# -- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("", "is empty", "messages"),
        ("# nothing\n", "is empty", "messages"),
        ("- user: a\n", "is a list", "messages"),
        ("hello\n", "is plain text", "messages"),
        ("a: [1\n", "s.yaml:2: not YAML", "close the bracket"),
        ("a: b: c\n", "s.yaml:1: not YAML: mapping values", "quote"),
        ("a:\n\tb: c\n", "s.yaml:2: not YAML", "spaces"),
        ("a: *b\n", "s.yaml:1: not YAML: found undefined alias", "quote"),
        ("a: 1\n---\nb: 2\n", "s.yaml:2: not YAML", "one scenario in a file"),
        ("a: 1\na: 2\n", "s.yaml:2: holds the key 'a' twice, first on line 1", "keep one"),
        ("a: !!python/object:os.system x\n", "holds the tag", "remove it"),
        ("a: !x y\n", "holds the tag !x", "remove it"),
        ("a: &x [*x]\n", "a value that holds itself", "alias"),
        ("a: {{b}}\n", "a mapping as a key", "{{field}}"),
        ("[a]: b\n", "a list as a key", "{{field}}"),
        ("a: \x00\n", "not YAML", "UTF-8"),
    ],
)
def test_file_that_is_no_scenario_is_refused(text: str, said: str, hint: str) -> None:
    error = refused(text)
    assert said in error.message
    assert hint in error.hint


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(ScenarioError, match="not YAML"):
        read_source(str(path))


def test_deep_nesting_is_refused() -> None:
    assert "nested" in refused("a: " + "[" * 5000).message


def test_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "values" in refused("\n".join(lines)).message


def test_missing_file_names_the_path_and_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_source(str(tmp_path / "none.yaml"))
    assert "none.yaml" in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="directory"):
        read_source(str(tmp_path))


def test_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_NBYTES", 1000)
    with pytest.raises(ScenarioError, match="more than"):
        read_source("/dev/zero")


# -- the form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (changed(modle="x"), "unknown key 'modle'", "'model'"),
        (changed(model=""), "model: is empty", "scenario.md"),
        (changed(model=["a"]), "model: takes a text, got a list", "scenario.md"),
        (changed(dtype="float23"), "dtype: unknown value 'float23'", "float32"),
        (changed(strategy="refrsh"), "unknown strategy 'refrsh'", "refresh"),
        (changed(strategy="stale"), "unknown strategy 'stale'", "known:"),
        (changed(num_seam_tokens=-1), "at least 0, got '-1'", "scenario.md"),
        (changed(num_seam_tokens="one"), "takes a whole number, got 'one'", "scenario.md"),
        (changed(erratum_mode="rewrit"), "unknown value 'rewrit'", "rewrite"),
        (changed(splice="allways"), "unknown value 'allways'", "always"),
        (changed(fields=["a"]), "fields: takes a mapping, got a list", "scenario.md"),
        (changed(fields={"status": ["a"]}), "fields.status: takes a text", "scenario.md"),
        (changed(segments={"policy": {"txt": "a"}}), "unknown key 'txt'", "'text'"),
        (changed(segments={"policy": {}}), "neither file nor text", "file"),
        (changed(segments={"policy": {"file": "a", "text": "b"}}), "both file and text", "file"),
        (changed(segments={"policy": ""}), "segments.policy", "scenario.md"),
        (changed(segments={"policy": {"text": "a", "variants": {"x": []}}}), "empty", "scenario"),
        (changed(messages=None), "has no 'messages'", "scenario.md"),
        (changed(messages=[]), "the prompt is empty", "at least one"),
        (changed(messages=[{"role": "system", "content": ""}]), "prompt is empty", "content"),
        (changed(messages=[{"content": "a"}]), "message 1: has no 'role'", "scenario.md"),
        (changed(messages=[{"role": "sytem", "content": "a"}]), "value 'sytem'", "'system'"),
        (changed(messages=[{"role": "user"}]), "neither content nor segment", "{{segment:"),
        (
            changed(messages=[{"role": "user", "content": "a", "segment": "policy"}]),
            "both content and segment",
            "{{segment:",
        ),
        (changed(messages=[{"role": "user", "content": "a", "ids": "b"}]), "'ids'", "'id'"),
        (changed(messages=[{"role": "user", "content": "a", "id": "t1"}]), "kept for", "another"),
        (changed(turns=None), "has no 'turns'", "scenario.md"),
        (changed(turns=[]), "the conversation is empty", "at least one"),
        (changed(turns={"user": "a"}), "turns: takes a list", "scenario.md"),
        (with_turns("generate"), "turn 1: a turn is a mapping", "{user: ...}"),
        (with_turns({}), "turn 1: the turn has no operation", "known: user, tool"),
        (with_turns({"usr": "a"}), "unknown key 'usr'", "'user'"),
        (with_turns({"user": "a", "genrate": {}}), "unknown key 'genrate'", "'generate'"),
        (with_turns({"user": ""}), "turn 1, user: is empty", "scenario.md"),
        (with_turns({"user": {"a": "b"}}), "user: takes a text, got a mapping", "scenario.md"),
        (
            with_turns({"edit": {"status": "a"}, "delete": "order"}),
            "'edit' and 'delete'",
            "one turn",
        ),
        (with_turns({"edit": {"status": "a"}, "generate": {}}), "do not go together", "one turn"),
        (with_turns({"user": "a", "generate": {}, "decide": ["a", "b"]}), "together", "one turn"),
        (with_turns({"generate": {}, "decide": ["a", "b"]}), "'generate' and 'decide'", "one"),
        (with_turns({"generate": {}, "strategy": "suffix"}), "unknown key 'strategy'", "known"),
        (with_turns({"generate": {"max_tokens": 1}}), "turn 1, generate: unknown key", "max_new"),
        (with_turns({"generate": {"max_new_tokens": 0}}), "at least 1, got '0'", "scenario.md"),
        (with_turns({"generate": {"max_new_tokens": 2.5}}), "a whole number", "scenario.md"),
        (with_turns({"generate": {"temperature": "hot"}}), "takes a number, got 'hot'", "scen"),
        (with_turns({"generate": {"temperature": "nan"}}), "temperature", "scenario.md"),
        (with_turns({"generate": {"top_p": 0}}), "more than 0", "scenario.md"),
        (with_turns({"generate": {"top_p": 1.5}}), "at most 1", "scenario.md"),
        (with_turns({"generate": {"stop": "x"}}), "stop: takes a list", "scenario.md"),
        (with_turns({"generate": {"stop": [""]}}), "stop[1]: is empty", "scenario.md"),
        (with_turns({"generate": {"seed": 2**70}}), "seed", "scenario.md"),
        (with_turns({"generate": "yes"}), "takes a mapping, got 'yes'", "scenario.md"),
        (with_turns({"decide": ["a"]}), "decide: needs 2 or more", "scenario.md"),
        (with_turns({"decide": ["a", "a"]}), "not different", "each once"),
        (with_turns({"decide": ["a", ""]}), "not different", "none empty"),
        (with_turns({"edit": {}}), "edit: is empty", "scenario.md"),
        (with_turns({"edit": {"status": "a"}, "strategy": "sufix"}), "strategy 'sufix'", "suffix"),
        (with_turns({"edit": {"status": "a"}, "verify": "ful"}), "unknown value 'ful'", "'full'"),
        (with_turns({"delete": ""}), "delete: is empty", "scenario.md"),
        (with_turns({"replace": "order"}), "has no 'content'", "scenario.md"),
    ],
)
def test_wrong_form_is_refused(text: str, said: str, hint: str) -> None:
    error = refused(text)
    assert said in error.message
    assert hint in error.hint


def test_fault_is_found_on_its_line() -> None:
    text = GOOD.replace("  - {delete: ask}", "  - delete: ask\n    strategi: suffix")
    line = text.splitlines().index("    strategi: suffix") + 1
    assert refused(text).message.startswith(f"s.yaml:{line}: turn 7: unknown key 'strategi'")


def test_first_of_several_faults_is_named_and_the_others_counted() -> None:
    text = GOOD.replace("strategy: suffix", "strategi: suffix").replace("pending\n", "[]\n")
    error = refused(text)
    assert "fields.status" in error.message
    assert "1 more fault" in error.hint

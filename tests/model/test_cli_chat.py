"""`kvnotes chat`: lines, commands, and what goes to which stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_session import POLICY, tiny_model

from kvnotes import SamplingParams, Session
from kvnotes.cli.chat_loop import ChatLoop
from kvnotes.cli.commands.chat import parse_value
from kvnotes.cli.table import clean
from kvnotes.errors import FieldValueError
from kvnotes.library import Library, Skill
from kvnotes.session import Model
from kvnotes.store import KVStore

FEW = SamplingParams(max_new_tokens=4)


def loop_on(folder: Path, **options: bool) -> ChatLoop:
    tiny = tiny_model()
    model = Model(tiny.engine, tiny.tokenizer, tiny.name, KVStore(folder))
    session = Session(
        model,
        messages=[{"role": "system", "content": "tier: {{tier}}"}],
        fields={"tier": "gold"},
        id="talk",
    )
    settings = {"json": False, "quiet": False, **options}
    return ChatLoop(session, Library(model.store), FEW, **settings)


def test_reply_goes_to_stdout_and_what_was_reused_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_on(tmp_path)
    loop.run(["hello", "", "and?"])
    out, err = capsys.readouterr()
    replies = [m.content for m in loop.session.messages if m.role == "assistant"]
    assert len(replies) == 2 and all(clean(reply).strip() in out for reply in replies)
    lines = [line for line in err.splitlines() if "computed" in line]
    assert len(lines) == 2 and "reused" in lines[1] and "suffix | exact" in lines[1]
    assert "reused" not in out


def test_quiet_says_nothing_beside_the_reply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop_on(tmp_path, quiet=True).run(["hello"])
    assert capsys.readouterr().err == ""


def test_json_is_a_line_for_each_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop_on(tmp_path, json=True).run(["hello", "/nope", "and?"])
    first, wrong, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["said"] == "hello" and first["reply"] and first["error"] is None
    assert first["turn"]["tokens"]["computed"] > 0
    assert second["turn"]["tokens"]["reused"] > 0
    assert wrong["turn"] is None and "no command /nope" in wrong["error"]


def test_set_edits_a_field_with_the_next_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_on(tmp_path)
    loop.run(["hello", "/set tier=silver", "/fields"])
    err = capsys.readouterr().err
    assert "waits for the next turn: suffix" in err and "tier = silver" in err
    loop.run(["which tier?"])
    assert "silver" in loop.session.render().text and "gold" not in loop.session.render().text


def test_skill_is_spliced_listed_and_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_on(tmp_path)
    library = Library(loop.session.model.store)
    library.add(Skill("policy", POLICY + "{{who}}", fields=(("who", "everybody"),)))
    loop.run(["hello", "/skill policy", "/messages"])
    err = capsys.readouterr().err
    assert "[skill policy@1]" in err
    assert loop.session.values["who"] == "everybody"
    id = next(m.id for m in loop.session.messages if m.segment)
    loop.run([f"/drop {id}", "again"])
    assert not any(m.segment for m in loop.session.messages)


def test_inline_skill_is_spliced_as_a_system_message(tmp_path: Path) -> None:
    loop = loop_on(tmp_path)
    Library(loop.session.model.store).add(Skill("tone", POLICY, role="inline"))
    loop.run(["/skill tone", "hello"])
    assert POLICY.strip() in loop.session.render().text


def test_fork_save_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = loop_on(tmp_path)
    loop.run(["hello", "/save", "/fork other", "more", "/save", "/verify"])
    err = capsys.readouterr().err
    assert "kvnotes chat --resume talk" in err and "--resume other" in err
    assert "a fork of talk" in err and "nothing to check" in err
    again = Session.load(loop.session.model, "other")
    assert again.parent_id == "talk" and len(again.messages) == 5


def test_fault_ends_no_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = loop_on(tmp_path)
    loop.run(["/set tear=x", "/set tier", "/skill none", "/drop none", "hello", "/quit", "never"])
    err = capsys.readouterr().err
    assert err.count("error:") == 4 and "did you mean 'tier'?" in err
    assert sum(m.role == "user" for m in loop.session.messages) == 1


def test_control_characters_of_a_reply_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_on(tmp_path)
    loop.run(["/set tier=\x1b[31mred"])
    assert "\x1b[31m" not in capsys.readouterr().err


def test_help_lists_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = loop_on(tmp_path)
    loop.run(["/help"])
    err = capsys.readouterr().err
    for name in loop._commands:
        assert name == "help" or f"/{name}" in err


@pytest.mark.parametrize("text", ["tier", "=gold", " = gold"])
def test_value_without_a_name_or_a_sign_is_refused(text: str) -> None:
    with pytest.raises(FieldValueError, match="gives no field a value"):
        parse_value(text)
    assert parse_value("a = b=c ") == ("a", "b=c")

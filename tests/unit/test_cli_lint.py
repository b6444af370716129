"""`kvnotes lint`: what a file is taken for, what is printed, and how it ends."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvnotes.cli import lint_source
from kvnotes.cli.failures import FINDINGS_CODE, USAGE_CODE, guarded
from kvnotes.cli.lint_records import LintRecord, log_record, prompt_record
from kvnotes.cli.lint_source import tell
from kvnotes.cli.lint_table import LintTable
from kvnotes.cli.main import _call
from kvnotes.errors import InputError, KVNotesError, ModelNotFoundError, ScenarioError
from kvnotes.lint import best_saving, lint_parts, lint_requests

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lint.md"
PROMPT = "The time is 14:32.\nOrders placed before 2024-01-31 are refunded.\n"
REQUEST = {"messages": [{"role": "system", "content": PROMPT}]}
SCENARIO = """\
fields: {clock: "14:32"}
segments:
  policy: {text: "Now: 2024-05-14T09:12:44Z"}
  rules: {text: "The time is 09:12."}
messages:
  - {role: system, segment: policy}
  - {role: system, content: "clock: {{clock}} {{segment:rules}}"}
  - {role: user, content: "{{braces}} are text here"}
turns: [{user: "The time is 15:00."}]
"""


def taken(text: str, suffix: str = "", folder: Path = Path("/nowhere")) -> lint_source.LintInput:
    return tell(text, "file", suffix, folder)


def refused(text: str, suffix: str = "") -> KVNotesError:
    with pytest.raises(KVNotesError) as caught:
        taken(text, suffix)
    return caught.value


class Ended:
    """One run of the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *args: str) -> None:
        self.code = guarded(lambda: self._call(["lint", *args]))
        self.out, self.err = capsys.readouterr()

    @staticmethod
    def _call(args: list[str]) -> int:
        try:
            return _call(args)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    file = tmp_path / "prompt.md"
    file.write_text(PROMPT, encoding="utf-8")
    return str(file)


# -- what a file is taken for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "suffix", "kind", "num_parts"),
    [
        (PROMPT, ".md", "text", 1),
        ("", "", "text", 1),
        ("{{clock}} is the time", "", "text", 1),
        ('{"colour": "red"}', "", "text", 1),
        ("[1, 2, 3]", "", "text", 1),
        ('"Hello," she said.', "", "text", 1),
        ("{not json", "", "text", 1),
        ("messages: are kept\nno turns here", ".yaml", "text", 1),
        (json.dumps(REQUEST), "", "request", 1),
        (json.dumps(REQUEST, indent=2), ".json", "request", 1),
        (json.dumps(REQUEST["messages"]), "", "request", 1),
        (json.dumps({"body": {"prompt": "a"}}), "", "request", 1),
        (json.dumps(PROMPT), "", "request", 1),
        (json.dumps(REQUEST) + "\n", ".jsonl", "request", 1),
        (SCENARIO, "", "scenario", 4),
        (SCENARIO, ".yaml", "scenario", 4),
    ],
)
def test_content_tells_what_a_file_is(text: str, suffix: str, kind: str, num_parts: int) -> None:
    result = taken(text, suffix)
    assert (result.taken_as, len(result.parts), result.requests) == (kind, num_parts, ())


@pytest.mark.parametrize(
    "text",
    [
        f"{json.dumps(REQUEST)}\n{json.dumps(REQUEST)}\n",
        f"\n{json.dumps(REQUEST)}\r\n\n{json.dumps({'prompt': 'x'})}",
        '"a prompt"\n"another one"\n',
        json.dumps([REQUEST, REQUEST]),
    ],
)
def test_several_requests_are_a_log(text: str) -> None:
    result = taken(text)
    assert (result.taken_as, len(result.requests), result.parts) == ("log", 2, ())


def test_slots_of_a_scenario_are_no_findings_and_its_segments_are_searched() -> None:
    result = taken(SCENARIO)
    assert [part.name for part in result.parts] == [
        "segment policy",
        "messages[1] system",
        "segment rules",
        "messages[2] user",
    ]
    findings = lint_parts(result.parts)
    assert [(f.part, f.text) for f in findings] == [
        ("segment policy", "2024-05-14T09:12:44Z"),
        ("segment rules", "09:12"),
    ]


def test_scenario_in_braces_is_one() -> None:
    text = json.dumps({"messages": [{"role": "system", "content": "a"}], "turns": [{"user": "b"}]})
    assert taken(text, ".yaml").taken_as == "scenario"


def test_segment_file_of_a_scenario_is_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "policy.md").write_text("The time is 09:12.", encoding="utf-8")
    text = SCENARIO.replace('{text: "Now: 2024-05-14T09:12:44Z"}', "policy.md")
    assert taken(text, "", tmp_path).parts[0].text == "The time is 09:12."
    with pytest.raises(ScenarioError):
        taken(text)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "suffix", "said"),
    [
        (f"{json.dumps(REQUEST)}\n\n{{broken\n", "", "file:3: not JSON: "),
        (f"{json.dumps(REQUEST)}\n17\n", "", "file:2: 17 where a request should stand"),
        ("nonsense\n", ".jsonl", "file:1: not JSON: "),
        (f"{json.dumps(REQUEST)}\n{'[' * 200_000}\n", "", "file:2: "),
        ("{\n  broken\n}", ".json", "file:2: not JSON: "),
        ('{"messages": ["a"]}', "", "messages[0] is a text"),
    ],
)
def test_malformed_input_names_its_line(text: str, suffix: str, said: str) -> None:
    error = refused(text, suffix)
    assert isinstance(error, InputError)
    assert said in error.message
    assert error.hint


def test_faulty_scenario_is_refused_as_one() -> None:
    assert isinstance(refused(SCENARIO.replace("turns: [{user", "turns: [{usr")), ScenarioError)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lint_source, "MAX_PROMPT_NBYTES", 100)
    monkeypatch.setattr(lint_source, "MAX_NBYTES", 1000)
    assert "is a prompt of" in refused("x" * 101).message
    assert taken("x" * 100).taken_as == "text"
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"x" * 1001)
    with pytest.raises(InputError, match="has more than"):
        lint_source.read_input(str(file))


def test_unreadable_files_are_one_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    binary = tmp_path / "image.png"
    binary.write_bytes(b"\x89PNG\r\n")
    for path, said in (
        (str(tmp_path / "none.md"), "No such file"),
        (str(tmp_path), "Is a directory"),
        ("a\0b", "cannot read the prompt"),
        (str(binary), "is not UTF-8 text: byte 0 is 0x89"),
    ):
        ended = Ended(capsys, path)
        assert (ended.code, ended.out) == (InputError.exit_code, "")
        assert said in ended.err and "hint: " in ended.err


# -- how it ends -------------------------------------------------------------------------------


def test_findings_are_no_failure_unless_checked(
    prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ended(capsys, prompt).code == 0
    assert Ended(capsys, prompt, "--check").code == FINDINGS_CODE
    assert Ended(capsys, prompt, "--check", "--ignore", "time").code == 0
    assert Ended(capsys, prompt, "--check", "--json").code == FINDINGS_CODE
    log = str(ROOT / "examples" / "lint" / "log.jsonl")
    assert Ended(capsys, log, "--check").code == FINDINGS_CODE
    every = [arg for kind in ("time", "tools-reordered") for arg in ("--ignore", kind)]
    assert Ended(capsys, log, "--check", *every).code == 0


def test_unknown_kind_is_a_usage_error(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = Ended(capsys, prompt, "--ignore", "tme")
    assert ended.code == USAGE_CODE
    assert "did you mean 'time'?" in ended.err


def test_nothing_found_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ended = Ended(capsys, str(ROOT / "examples" / "retail.yaml"), "--check")
    assert ended.code == 0
    assert "taken as a scenario" in ended.out
    assert "nothing in it changes" in ended.out


# -- what is printed ---------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """Each command of the page, and what it prints there."""
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    return blocks


@pytest.mark.parametrize(("command", "printed"), commands(), ids=lambda text: text[:40])
def test_every_command_of_the_page_prints_what_it_says(
    command: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    words = shlex.split(re.split(r" [|>] ", command)[0])
    assert words[:2] == ["kvnotes", "lint"]
    ended = Ended(capsys, *words[2:])
    if "jq" in command:
        causes = json.loads(ended.out)["log"]["causes"]
        assert printed == "".join(f"{json.dumps(cause['kind'])}\n" for cause in causes)
    elif ">" in command:
        assert ended.code == FINDINGS_CODE
    else:
        assert ended.out == printed


def record_of(text: str) -> LintRecord:
    result = taken(text)
    if result.taken_as == "log":
        return log_record(result, lint_requests(result.requests), tokenizer=None)
    findings = lint_parts(result.parts)
    return prompt_record(result, findings, best_saving(findings), tokenizer=None, num_tokens=9)


def shown(record: LintRecord, width: int) -> list[str]:
    file = io.StringIO()
    LintTable(Console(file=file, width=width, highlight=False), record).show()
    return file.getvalue().splitlines()


def long_log() -> str:
    lines = []
    for i in range(30):
        system = f"Current time: 09:{i + 10}\n" + "Be polite to everyone, always. " * 9
        lines.append(json.dumps({"messages": [{"role": "system", "content": system}]}))
    return "\n".join(lines)


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(
    "text", [PROMPT, "token: eyJ" + "a1" * 900 + "." + "b2" * 90 + "." + "c3" * 90, long_log()]
)
def test_output_fits_its_width(text: str, width: int) -> None:
    lines = shown(record_of(text), width)
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)


def test_long_list_of_misses_is_cut_and_says_so() -> None:
    text = "\n".join(shown(record_of(long_log()), 100))
    assert "and 19 more; --json has all" in text


def test_control_characters_are_shown_and_not_sent() -> None:
    log = "\n".join(
        json.dumps({"prompt": f"mood \x1b[3{i}m\x07 is here\n" + "Rules are rules. " * 20})
        for i in (1, 2)
    )
    text = "\n".join(shown(record_of(log), 100))
    assert "\x1b" not in text and "\x07" not in text


def test_json_has_every_key_always() -> None:
    for text in ("nothing", PROMPT, long_log()):
        data: dict[str, Any] = json.loads(record_of(text).to_json())
        assert set(data) == set(LintRecord.model_fields)
        assert LintRecord.model_validate(data) == record_of(text)
    found = json.loads(record_of(PROMPT).to_json())["findings"][0]
    assert (found["text"], found["line"], found["column"], found["start"]) == ("14:32", 1, 13, 12)


def test_json_matches_its_schema() -> None:
    schema = json.loads((ROOT / "docs" / "lint.schema.json").read_text("utf-8"))
    assert set(schema["required"]) == set(LintRecord.model_fields)


@pytest.mark.real
def test_tokens_are_those_of_the_model_that_is_named(
    prompt: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    offsets = Tokenizer.from_file(str(smollm2_path / "tokenizer.json")).encode(PROMPT).offsets
    ended = Ended(capsys, prompt, "--model", "smollm2-135m", "--json")
    record = json.loads(ended.out)
    (finding,) = record["findings"]
    assert record["tokenizer"] == "smollm2-135m"
    assert record["num_tokens"] == len(offsets)
    behind = [stop for start, stop in offsets if stop > finding["start"]]
    assert finding["num_invalidated_tokens"] == len(behind)
    table = Ended(capsys, prompt, "--model", "smollm2-135m").out
    assert "~" not in table


def test_model_without_a_tokenizer_is_refused(
    prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    ended = Ended(capsys, prompt, "--model", str(tmp_path))
    assert ended.code == ModelNotFoundError.exit_code
    assert "has no tokenizer" in ended.err


def test_standard_input_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(PROMPT.replace("\n", "\r\n").encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    ended = Ended(capsys, "-", "--json")
    assert json.loads(ended.out)["name"] == "<stdin>"
    assert len(json.loads(ended.out)["findings"]) == 1

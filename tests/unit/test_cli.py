"""The command line without a model: its table, its exit codes, its start-up."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvnotes.cli.failures import BROKEN_PIPE_CODE, INTERRUPTED_CODE, guarded
from kvnotes.cli.records import (
    DecisionRecord,
    Fidelity,
    FidelityPair,
    RunRecord,
    Tokens,
    TurnRecord,
    with_times,
)
from kvnotes.cli.run import Compiled, Done
from kvnotes.cli.table import Table, clean, kl, ms, short_plan
from kvnotes.errors import ScenarioError, UnknownFieldError

ROOT = Path(__file__).resolve().parents[2]

SCENARIO = """\
fields: {status: pending}
messages: [{role: system, content: "status: {{status}}"}]
turns: [{edit: {status: shipped}}, {decide: [yes, no]}]
"""

FIDELITY = Fidelity(
    top1_agree=True, kl_nats=0.25, cosine=0.9, max_logit_gap=0.1, floor_kl_nats=2e-13
)
ANSWER = TurnRecord(
    turn=1,
    op="user",
    strategy="refresh+erratum",
    plan="R C R' C R' C",
    exact=False,
    tokens=Tokens(total=12345, reused=12000, moved=300, computed=45),
    ttft_ms=50.0,
    prefix_hit_ttft_ms=40.0,
    full_ttft_ms=12000.0,
    speedup=240.0,
    fidelity=FidelityPair(same_tokens=FIDELITY, clean=FIDELITY),
    decision=DecisionRecord(
        choices={"cancel": -1.5, "deny": -0.25},
        chosen="deny",
        clean_chosen="deny",
        stale_chosen="cancel",
        recovery=0.98,
    ),
    text=None,
    template_rewrote=[],
    fallback_reason=None,
)
WAITING = ANSWER.model_copy(
    update={
        "turn": 2,
        "ttft_ms": None,
        "prefix_hit_ttft_ms": None,
        "full_ttft_ms": None,
        "speedup": None,
        "fidelity": None,
        "decision": None,
        "fallback_reason": "the reason",
        "template_rewrote": ["t1: trimmed"],
    }
)


TABLE_TO_STDOUT = """
import sys
from kvnotes.cli.failures import guarded
from kvnotes.cli.table import stdout_console
sys.exit(guarded(lambda: stdout_console().print('a') or 0))
"""


def shown(*done: Done, width: int = 100, compare: bool = True) -> str:
    file = io.StringIO()
    table = Table(Console(file=file, width=width, highlight=False), compare=compare)
    table.start(model="m", fingerprint="f" * 64, dtype="float32", threads=1, versions={"a": "1"})
    table.segments([Compiled("policy", 1234)], 1500.0)
    for each in done:
        table.add(each)
    table.finish()
    return file.getvalue()


# -- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120])
def test_table_fits_its_width_and_shows_every_number(width: int) -> None:
    text = shown(Done(ANSWER, "user: " + "a long question " * 20, ("a notice",)), width=width)
    assert max(map(len, text.splitlines())) <= width
    numbers = ("12,345", "12,000", "300", "45", "50.0", "40.0", "240.0x", "0.250", "2e-13", "0.98")
    for part in (*numbers, "-1.50", "deny", "stale: cancel", "approximate", "note: a notice"):
        assert part in text.replace("\n    ", " "), part


def test_row_stands_under_its_header() -> None:
    lines = shown(Done(ANSWER, "user: a", ())).splitlines()
    header = next(line for line in lines if line.lstrip().startswith("strategy"))
    row = next(line for line in lines if "12,345" in line and "240" in line)
    for name, value in {"tokens": "12,345", "TTFT ms": "50.0", "full ms": "12,000"}.items():
        end = header.index(name) + len(name)
        assert row[:end].endswith(value), name
    assert row.rindex("240.0x") + len("240.0x") == len(header)


def test_turn_that_waits_says_so_and_counts_nothing() -> None:
    text = shown(Done(ANSWER, "user: a", ()), Done(WAITING, "edit a = b", ()))
    assert "waits" in text
    assert "note: the reason" in text
    assert "note: the template rewrote t1: trimmed" in text
    assert "1 answer: computed 45 tokens, full prefills compute 12,345: 274.3x" in text
    assert "TTFT 50.0 ms in all, full prefills 12,000 ms: 240.0x" in text


def test_notice_that_stays_true_is_shown_once() -> None:
    turns = [Done(WAITING, "delete a", ("escaped x",)), Done(WAITING, "delete b", ("escaped x",))]
    text = shown(*turns)
    assert text.count("note: escaped x") == 1
    assert text.count("note: the reason") == 2


def test_output_has_no_double_blank_lines() -> None:
    assert "\n\n\n" not in shown(Done(ANSWER, "user: a", ()))


def test_run_without_an_answer_has_no_totals() -> None:
    assert "nothing was computed" in shown(Done(WAITING, "edit a = b", ()))


def test_columns_of_references_vanish_with_them() -> None:
    text = shown(Done(WAITING, "edit a = b", ()), compare=False)
    assert "speedup" not in text and "hit" not in text and "full" not in text
    assert "exact" in text


def test_range_of_times_is_shown_where_the_run_was_repeated() -> None:
    assert "TTFT from 49.0 to 51.5 ms" in shown(Done(ANSWER, "user: a", (), (49.0, 51.5)))


def test_control_characters_are_shown_and_not_sent() -> None:
    assert clean("a\x1b[31mb\x07\u202ec\td\ne") == r"a\x1b[31mb\x07\u202ec d" + "\ne"
    reply = ANSWER.model_copy(update={"text": "x\x1b]0;y\x07[bold]z[/bold]"})
    assert r"reply: x\x1b]0;y\x07[bold]z[/bold]" in shown(Done(reply, "user: a", ()))


def test_long_plan_loses_its_middle() -> None:
    assert short_plan("R C R' C", 11) == "R C R' C"
    assert short_plan("R C R C R C R C", 11) == "R C .. C"
    assert len(short_plan("R' C R' C R' C R' C", 11)) <= 11


def test_numbers_are_short() -> None:
    assert [ms(v) for v in (None, 0.04, 12.34, 999.9, 1234.5)] == [
        "-",
        "0.0",
        "12.3",
        "999.9",
        "1,234",
    ]
    assert [kl(v) for v in (None, 0.0, 0.25, 3.2e-5)] == ["-", "0", "0.250", "3e-05"]


# -- the JSON ----------------------------------------------------------------------------------


def test_number_that_is_not_finite_is_null() -> None:
    broken = FIDELITY.model_copy(update={"kl_nats": float("nan"), "cosine": float("inf")})
    turn = ANSWER.model_copy(update={"fidelity": FidelityPair(same_tokens=broken, clean=broken)})
    record = RunRecord(model="m", fingerprint="f", versions={}, threads=1, turns=[turn])
    read = RunRecord.model_validate_json(record.to_json())
    fidelity = read.turns[0].fidelity
    assert fidelity is not None
    assert fidelity.clean.kl_nats is None and fidelity.clean.cosine is None


def test_speedup_follows_the_times() -> None:
    record = with_times(ANSWER, ttft=10.0, hit=9.0, full=25.0)
    assert (record.ttft_ms, record.full_ttft_ms, record.speedup) == (10.0, 25.0, 2.5)
    assert with_times(WAITING, ttft=None, hit=None, full=None).speedup is None


# -- the border --------------------------------------------------------------------------------


def fails(error: BaseException) -> int:
    def body() -> int:
        raise error

    return guarded(body)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ScenarioError("a", hint="b"), 9, "error: a\nhint: b\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (MemoryError(), 11, "error: out of memory\nhint: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 11, "error: out of memory\n"),
        (OSError(28, "No space left on device", "/x"), 10, "No space left on device '/x'\n"),
        (BrokenPipeError(), 141, ""),
        (TypeError("x"), 70, "error: internal error: TypeError: x"),
    ],
)
def test_every_error_has_its_code_and_no_traceback(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(error) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert "\x1b" not in shown.err
    assert shown.out == ""


def kvnotes(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvnotes.cli.main import main; main()", *args],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **env},
        timeout=60,
    )


def test_check_reads_standard_input_and_says_what_is_there() -> None:
    done = kvnotes("run", "-", "--check", stdin=SCENARIO)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "ok: 2 turns, 1 field, 0 segments\n",
        "",
    )


def test_bad_scenario_ends_with_the_code_of_its_class() -> None:
    done = kvnotes(
        "run", "-", "--check", stdin=SCENARIO.replace("{edit: {status:", "{edit: {stat:")
    )
    assert done.returncode == UnknownFieldError.exit_code
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith("error: <stdin>:")
    assert done.stderr.splitlines()[1] == "hint: did you mean 'status'?"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run",), "Missing argument"),
        (("run", "a", "--chek"), "--chek"),
        (("run", "a", "--threads", "0"), "--threads"),
        (("run", "a", "--repeat", "x"), "--repeat"),
        (("rn",), "rn"),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(args: tuple[str, ...], said: str) -> None:
    done = kvnotes(*args)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ") and said in first
    assert second.startswith("hint: see kvnotes") and second.endswith("--help")


def test_bare_command_prints_its_help_and_version_its_version() -> None:
    assert kvnotes().stdout == kvnotes("--help").stdout
    assert "run" in kvnotes().stdout
    assert kvnotes().returncode == 0
    assert kvnotes("--version").stdout.startswith("kvnotes ")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "--help"], ["run", "--check"]])
def test_what_needs_no_model_imports_no_torch(args: list[str]) -> None:
    if args[-1] == "--check":
        args = [*args, str(ROOT / "examples" / "retail.yaml")]
    code = (
        "import sys\n"
        "from kvnotes.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["main(['run', '--help'])", TABLE_TO_STDOUT])
def test_reader_that_goes_away_is_no_error(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", f"from kvnotes.cli.main import main; {command}"],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == BROKEN_PIPE_CODE


def test_interrupted_command_says_so() -> None:
    # interrupted where it waits for input, and not while it still imports something
    code = (
        "import os, signal, sys, time, types, kvnotes.cli.main as m\n"
        "def read(size):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "sys.stdin = types.SimpleNamespace(buffer=types.SimpleNamespace(read=read))\n"
        "m.main(['run', '-'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.stderr == b"error: interrupted\n"
    assert done.returncode == INTERRUPTED_CODE

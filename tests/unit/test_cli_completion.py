"""`kvnotes completion`: scripts of four shells, and the answers that they ask for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("bash", "zsh", "fish", "powershell")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with `kvnotes` in it."""
    folder = tmp_path_factory.mktemp("bin")
    file = folder / "kvnotes"
    call = f'exec "{sys.executable}" -c "from kvnotes.cli.main import main; main()" "$@"'
    file.write_text(f"#!/bin/sh\n{call}\n", encoding="utf-8")
    file.chmod(0o755)
    return folder


def kvnotes(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvnotes.cli.main import main; main()", *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        timeout=120,
    )


def in_bash(program: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words, after the script was eval'ed."""
    script = (
        'eval "$(kvnotes completion bash)"\n'
        "complete -p kvnotes > /dev/null || exit 3\n"
        f"COMP_WORDS=({' '.join(map(repr, words))})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        '_kvnotes_completion kvnotes\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = f"{program}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
def test_bash_completes_commands_after_eval(program: Path) -> None:
    assert in_bash(program, "kvnotes", "r") == ["run"]
    offered = in_bash(program, "kvnotes", "")
    assert {"run", "explain", "doctor", "completion"} <= set(offered)


@needs_bash
def test_bash_completes_options_and_the_names_of_shells(program: Path) -> None:
    assert {"--strategy", "--json", "--quiet"} <= set(in_bash(program, "kvnotes", "explain", "--"))
    assert in_bash(program, "kvnotes", "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_calls_the_program(shell: str) -> None:
    done = kvnotes("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_KVNOTES_COMPLETE" in done.stdout and f"complete_{shell}" in done.stdout
    record = json.loads(kvnotes("completion", shell, "--json", "--quiet").stdout)
    assert record == {"shell": shell, "script": done.stdout.rstrip("\n")}


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "kvnotes r"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "kvnotes r", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
        (
            "powershell",
            {"_TYPER_COMPLETE_ARGS": "kvnotes r", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "r"},
        ),
    ],
)
def test_questions_of_other_shells_are_answered(shell: str, asked: dict[str, str]) -> None:
    done = kvnotes(_KVNOTES_COMPLETE=f"complete_{shell}", **asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run" in done.stdout and "doctor" not in done.stdout


def test_completing_imports_no_torch() -> None:
    code = (
        "import sys\nfrom kvnotes.cli.main import main\n"
        "try:\n    main([])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    asked = {
        "_KVNOTES_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvnotes explain --",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dtype" in done.stdout.split()


def test_unknown_shell_is_a_usage_error_that_names_the_known_ones() -> None:
    done = kvnotes("completion", "tcsh")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ") and all(shell in first for shell in SHELLS)
    assert second == "hint: see kvnotes completion --help"


def test_options_that_install_completion_are_not_in_the_help() -> None:
    assert "completion" in kvnotes("--help").stdout
    assert "--install-completion" not in kvnotes("--help").stdout
    assert "--show-completion" not in kvnotes("--help").stdout
    assert kvnotes("--show-completion").returncode == 2

"""`kvnotes bench`: what it refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvnotes.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *args])
    assert stopped.value.code not in (0, None)
    return capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["", "0", "12,", "a", "-4", "1.5", "8;9"])
def test_lengths_that_are_none_are_refused(
    lengths: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "compose", f"--lengths={lengths}", "--out", str(tmp_path / "out"))
    assert f"--lengths {lengths!r} is no list of whole numbers above 0" in said
    assert not (tmp_path / "out").exists()


def test_a_wrong_number_of_new_tokens_is_called_by_its_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "decode", "--new", "x", "--out", str(tmp_path))
    assert "--new 'x'" in said


def test_a_text_that_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "store", "--text", str(tmp_path / "none"), "--out", str(tmp_path))
    assert "cannot read" in said and "No such file" in said
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    said = refused(capsys, "share", "--text", str(tmp_path / "picture"), "--out", str(tmp_path))
    assert "it is no UTF-8 text" in said


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("rates", "fast", "--rates 'fast' is no list of numbers"),
        ("rates", "0", "rates are (0.0,) requests per second"),
        ("places", "first", "--places 'first' is no list of whole numbers"),
        ("places", "100", "places of the field are (100,)"),
        ("lengths", "0", "--lengths '0' is no list"),
        ("blocks", "99", "16 requests cannot be cut into 99 blocks"),
        ("url", "localhost", "'localhost' is no address of a server"),
    ],
)
def test_options_of_serve_that_are_none_are_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = refused(capsys, "serve", f"--{option}={value}", "--out", str(tmp_path / "out"))
    assert said in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--stock", "--compiled", "--python=/usr/bin/python3"])
def test_a_server_that_runs_takes_no_options_of_a_new_one(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = refused(capsys, "serve", "--url=http://127.0.0.1:9", option, "--out", str(tmp_path))
    assert f"--url names a server that runs, {option.partition('=')[0]} is about a new one" in shown


def test_without_a_benchmark_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    shown = capsys.readouterr()
    for name in ("compose", "edit", "decode", "store", "share", "serve"):
        assert name in shown.out + shown.err

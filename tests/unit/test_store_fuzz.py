"""A sample of bench/fuzz_format.py, and a proof that it finds what it looks for."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_five_seconds_of_fuzzing_find_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "fuzz_format.py"), "--seconds", "5", "--engine", "own"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["crashes"] == 0 and not list(tmp_path.iterdir())
    # mutations get past every check, or they would prove little
    assert report["outcomes"]["read"] >= 1 and report["outcomes"]["SegmentFormatError"] >= 10


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("fuzz_format")


def found(fuzz: ModuleType, folder: Path) -> list[str]:
    """Last lines of the tracebacks of the crashes that are found in a few seconds."""
    files = fuzz.seeds(folder)
    out = folder / "out"
    args = argparse.Namespace(seconds=20.0, seed=1, engine="own", max_crashes=1, out=out)
    code = fuzz.fuzz_own(files, fuzz.Reader(folder), args)
    texts = [path.read_text().splitlines()[-1] for path in sorted(out.glob("*.txt"))]
    assert (code == 1) == bool(texts) and len(list(out.glob("*.bin"))) == len(texts)
    return texts


def test_an_error_of_another_class_is_a_crash_and_its_input_is_saved(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fuzz.open_segment

    def broken(path: Path, **options: Any) -> Any:
        opened = real(path, **options)
        return {"shop": opened}[opened.header.tenant]

    monkeypatch.setattr(fuzz, "open_segment", broken)
    assert found(fuzz, tmp_path)[0].startswith("KeyError")
    (saved,) = (tmp_path / "out").glob("*.bin")
    with pytest.raises(KeyError):
        fuzz.Reader(tmp_path).read(saved.read_bytes())


def test_a_segment_that_is_not_what_its_file_says_is_a_crash(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = type(fuzz.open_segment(written(fuzz, tmp_path)))
    real = opened.segment

    def changed(self: Any, run: Any = None) -> Any:
        segment = real(self, run)
        segment.keys[0].data = segment.keys[0].clone() + 1
        return segment

    monkeypatch.setattr(opened, "segment", changed)
    assert found(fuzz, tmp_path)[0].startswith("AssertionError")


def written(fuzz: ModuleType, folder: Path) -> Path:
    """A good file."""
    path = folder / "good"
    path.write_bytes(fuzz.seeds(folder)[0])
    return path


def test_a_message_that_a_terminal_obeys_is_a_crash(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hostile(path: Path, **options: Any) -> Any:
        raise fuzz.SegmentFormatError("\x1b[31m", hint="x")

    monkeypatch.setattr(fuzz, "open_segment", hostile)
    assert found(fuzz, tmp_path)[0].startswith("AssertionError: a message as no message")

"""Writing files: whole or not at all, private, whatever the disk says and whoever dies."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers_store import facts_of, segment_of
from torch import Tensor

from kvnotes.errors import KVNotesError, LineageError, SegmentFormatError, StorageError, TrustError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.store import Trust, load_segment, save_segment
from kvnotes.store.atomic import (
    make_folder,
    new_file,
    storage_errors,
    sync_folder,
    write_file,
)

ROOT = Path(__file__).resolve().parents[2]
NAME = "x.kv.safetensors"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"int8": True},
    "sealed": {"trust": Trust(encryption_key=bytes(32))},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def save(path: Path, seed: int, kind: str) -> None:
    save_segment(path, segment_of(3, 2, seed=seed), **KINDS[kind])


def load(path: Path, kind: str) -> KVSegment:
    return load_segment(path, trust=KINDS[kind].get("trust", Trust()))


def holds(path: Path, seed: int, kind: str) -> bool:
    """Whether a file holds what `save` writes for a seed."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / NAME, seed, kind)
        return facts_of(load(path, kind)) == facts_of(load(Path(folder) / NAME, kind))


def failing_at(
    patch: pytest.MonkeyPatch, name: str, number: int, code: int, *, after: int = 0
) -> Callable[[], bool]:
    """Let the n-th call of an os function fail; returns whether it was reached.

    Args:
        after: For `write`: write that many bytes first, as a disk that fills up does.
    """
    real, calls = getattr(os, name), count()
    reached = []

    def function(*arguments: Any, **options: Any) -> Any:
        if next(calls) != number:
            return real(*arguments, **options)
        reached.append(True)
        if name == "close":
            real(*arguments)
        if after:
            real(arguments[0], bytes(arguments[1][:after]))
        raise OSError(code, os.strerror(code))

    patch.setattr(os, name, function)
    return lambda: bool(reached)


# -- the disk says no ----------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("name", ["write", "fsync", "replace", "lseek", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, kind: str, name: str, code: int
) -> None:
    path = tmp_path / NAME
    save(path, 0, kind)
    for number in count():
        with pytest.MonkeyPatch.context() as patch:
            reached = failing_at(patch, name, number, code, after=5 if name == "write" else 0)
            try:
                save(path, 1, kind)
                error = None
            except StorageError as raised:
                error = raised
        if not reached():
            assert error is None
            break
        assert error is not None and os.strerror(code) in error.message
        assert str(path) in error.message
        assert ("free some space" in error.hint) == (code in (errno.ENOSPC, errno.EDQUOT))
        assert [entry.name for entry in tmp_path.iterdir()] == [NAME]
        if not holds(path, 0, kind):
            # the file is in its place, only making that last has failed
            assert holds(path, 1, kind) and number == {"fsync": 1, "close": 1}[name]
            save(path, 0, kind)
    assert number >= {"write": 2, "fsync": 2, "close": 2, "replace": 1, "lseek": 0}[name]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:1000]))
    save(tmp_path / NAME, 1, "plain")
    assert facts_of(load(tmp_path / NAME, "plain")) == facts_of(segment_of(3, 2, seed=1))


@every_kind
def test_a_file_larger_than_the_system_allows_is_refused_and_removed(
    tmp_path: Path, kind: str
) -> None:
    """A real limit of the kernel, which writes up to it and then fails."""
    path = tmp_path / NAME
    save(path, 0, kind)
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, 4095, 4096, 4100, size - 1):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(StorageError, match="File too large"):
                save(path, 1, kind)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert holds(path, 0, kind)
        assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of that size."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@every_kind
def test_a_full_disk_keeps_what_it_has_and_takes_more_once_there_is_room(
    tmp_path: Path, kind: str
) -> None:
    with small_disk(tmp_path / "disk", "64k") as folder:
        saved = []
        with pytest.raises(StorageError, match="No space left on device") as caught:
            for index in count():
                save(folder / f"{index}.kv", index, kind)
                saved.append(index)
        assert "free some space" in caught.value.hint
        assert sorted(entry.name for entry in folder.iterdir()) == [f"{i}.kv" for i in saved]
        assert saved
        for index in saved:
            assert holds(folder / f"{index}.kv", index, kind)
        with pytest.raises(StorageError):  # a replacement needs room beside what it replaces
            save(folder / "0.kv", 9, kind)
        (folder / "0.kv").unlink()
        save(folder / "new.kv", 9, kind)
        assert holds(folder / "new.kv", 9, kind)


# -- whoever dies --------------------------------------------------------------------------


def test_a_killed_process_leaves_the_old_file_or_the_new_one() -> None:
    """Killed 30 times at random, and once before each system call: see the script."""
    command = [sys.executable, str(ROOT / "bench" / "crash.py"), "--kills", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report.pop("faults"), done.returncode) == ([], 0), done.stderr
    for how, outcomes in report.items():
        assert outcomes["old or new file"] > 0, how
        if "calls" in how:
            assert outcomes["calls"] >= 8, how
    assert report["plain, calls, new"]["parts"] > 0


# -- who may read --------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o000])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@every_kind
@pytest.mark.usefixtures("_umask")
def test_files_and_all_new_folders_above_them_are_private(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a" / "b" / "c" / NAME
    save(path, 0, kind)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in path.parents:
        if folder == tmp_path:
            break
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path)
    write_file(tmp_path / "x", b"1")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_replaced_file_is_private_although_the_old_one_was_not(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "x").chmod(0o666)
    write_file(tmp_path / "x", b"2")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_nobody_but_the_owner_can_read_a_part_while_it_is_written(tmp_path: Path) -> None:
    with new_file(tmp_path / "x"):
        (part,) = tmp_path.iterdir()
        assert part.name.startswith(".") and stat.S_IMODE(part.stat().st_mode) == 0o600


# -- names ---------------------------------------------------------------------------------


def test_a_link_is_replaced_and_what_it_points_to_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (tmp_path / "x").symlink_to(target)
    write_file(tmp_path / "x", b"new")
    assert target.read_bytes() == b"mine"
    assert not (tmp_path / "x").is_symlink() and (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["a\0b", "a\0/b", "..", "folder", "n" * 256, "file/x", "file/a/b"])
def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        write_file(tmp_path / name, b"1")
    assert caught.value.hint
    assert {entry.name for entry in tmp_path.iterdir()} == {"folder", "file"}


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("n" * 255), b"1")
    assert [len(entry.name) for entry in tmp_path.iterdir()] == [255]


# -- other errors --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TrustError("key"), StorageError("x"), SegmentFormatError("y")])
def test_our_own_errors_pass_also_those_that_are_an_oserror(error: KVNotesError) -> None:
    with pytest.raises(type(error)) as caught, storage_errors(Path("f")):
        raise error
    assert caught.value is error


def test_a_file_system_that_cannot_sync_folders_is_no_fault_but_a_failing_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.EINVAL, errno.ENOTSUP):
        with monkeypatch.context() as patch:
            reached = failing_at(patch, "fsync", 0, code)
            sync_folder(tmp_path)
            assert reached()
    failing_at(monkeypatch, "fsync", 0, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_a_slice_of_a_conversation_is_not_saved_as_a_segment(tmp_path: Path) -> None:
    segment = segment_of(3)
    run = Run(segment.run.token_ids, 2, Run((1, 2)).whole().run.after)
    part = KVSegment(run, segment.identity, segment.tensors)
    with pytest.raises(LineageError, match="was computed at position 2"):
        save_segment(tmp_path / NAME, part)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (segment_of(4).keys, segment_of(4).values),
        (segment_of(3, head_dim=4).keys, segment_of(3, head_dim=4).values),
        (segment_of(3, dtype="float16").keys, segment_of(3).values),
        (segment_of(3).keys, segment_of(3, dtype="float16").values),
        (segment_of(3, num_layers=2).keys, segment_of(3).values),
        (segment_of(3).keys, ()),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_not_saved(
    tmp_path: Path, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]
) -> None:
    good = segment_of(3)
    mixed = KVSegment(good.run, good.identity, {"keys": keys, "values": values})
    with pytest.raises(SegmentFormatError, match="its model makes"):
        save_segment(tmp_path / NAME, mixed)
    assert not list(tmp_path.iterdir())


def test_a_segment_without_tokens_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SegmentFormatError, match="cannot be stored"):
        save_segment(tmp_path / NAME, segment_of(0))
    assert not list(tmp_path.iterdir())

"""A disk that is full: at every write, of files and of the index, and on a real small disk."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers_tiers import IDENTITY, find, named, run_named, variant

from kvnotes.errors import StorageError
from kvnotes.store import KVStore, Limits, Provenance, Rule, content_key, load_segment

CALLS = ("open", "write", "fsync", "replace", "mkdir", "utime", "ftruncate")


class Full:
    """Lets the n-th call that needs space fail, and all after it."""

    def __init__(self, at: int, root: Path) -> None:
        self.at = at
        self.root = root
        self.num = 0

    def take(self) -> bool:
        self.num += 1
        return self.num > self.at


@contextmanager
def full(at: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    state = Full(at, root)

    def limited(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            reads = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
            if not reads and state.take():
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        return call

    class Connection(sqlite3.Connection):
        def execute(self, *arguments: Any) -> Any:
            if str(arguments[0]).startswith(("BEGIN IMM", "INSERT", "CREATE", "COMMIT")):
                reading = str(arguments[0]) == "COMMIT" and not self.in_transaction
                if not reading and self.total_changes >= 0 and state.take():
                    raise sqlite3.OperationalError("database or disk is full")
            return super().execute(*arguments)

    connect = sqlite3.connect

    def limited_connect(*arguments: Any, **options: Any) -> Any:
        if arguments[0] == ":memory:":
            return connect(*arguments, **options)
        return connect(*arguments, factory=Connection, **options)

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, limited(name))
        patch.setattr(sqlite3, "connect", limited_connect)
        yield state


def key(name: str) -> str:
    return content_key("segment", "", IDENTITY.fingerprint, run_named(name).digest)


def put(store: KVStore) -> None:
    store.put(named("new"), Provenance(name="new"))


def put_pinned(store: KVStore) -> None:
    store.put(named("new"), Provenance(name="new"), pinned=True)


def put_variant(store: KVStore) -> None:
    store.put(*variant("policy", "x"))


def compile_new(store: KVStore) -> None:
    store.get_or_compile(IDENTITY, run_named("new"), lambda: named("new"), strict=True)


def put_run(store: KVStore) -> None:
    store.put_run(named("new"))


def pull(store: KVStore) -> None:
    store.pull(key("far"))


def pin(store: KVStore) -> None:
    store.pin(key("old"))


def remove(store: KVStore) -> None:
    store.remove([key("other")])


def list_after_loss(store: KVStore) -> None:
    assert store.disk is not None
    next(store.disk.root.glob("index*.sqlite")).unlink()
    assert len(store.entries()) == 2


def read(store: KVStore) -> None:
    assert find(store, "old") is not None
    find(store, "far")  # there is no space to download it


def prune(store: KVStore) -> None:
    store.prune(Rule(unused_days=0.0))


ACTIONS = [
    put,
    put_pinned,
    put_variant,
    compile_new,
    put_run,
    pull,
    pin,
    remove,
    list_after_loss,
    read,
    prune,
]


CASES = [(action, False) for action in ACTIONS] + [(put_pinned, True), (pull, True)]


@pytest.mark.parametrize(
    ("action", "limited"), CASES, ids=[f"{a.__name__}{'-limited' * b}" for a, b in CASES]
)
def test_full_disk_loses_nothing_and_leaves_nothing_half(
    tmp_path: Path, action: Callable[[KVStore], None], limited: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power cut here, and it takes long
    url = f"memory://{tmp_path.name}"
    donor = KVStore(tmp_path / "donor", remote=url)
    donor.put(named("far"))
    donor.push([key("far")])
    limits = Limits(max_nbytes=1 << 20) if limited else None
    for at in count():
        root = tmp_path / f"s{at}"
        before = KVStore(root, limits=limits)
        before.put(named("old"), Provenance(name="old"))
        before.put(named("other"), Provenance(name="other"))
        store = KVStore(root, limits=limits, remote=url)
        failed = ""
        with full(at, root, monkeypatch) as state:
            try:
                action(store)
            except StorageError as error:
                failed = error.message
            reached = state.num > at
        look(root, action, failed, limits)
        if not reached:
            assert not failed
            assert at > 1 or action in (list_after_loss,)
            return
        assert not failed or "No space left" in failed or "disk is full" in failed, failed


def look(root: Path, action: Callable[[KVStore], None], failed: str, limits: Limits | None) -> None:
    """What every process sees afterwards, when there is space again."""
    for path in (root / "segments").rglob("*"):
        if path.is_file():
            assert path.name.endswith(".safetensors"), f"half a file: {path}"
            load_or_run(path)
    again = KVStore(root, limits=limits)
    gone = {remove: {"other"}, prune: {"old", "other"}}.get(action, set())
    for name in ("old", "other"):
        assert name in gone or find(again, name) is not None, f"{name} is lost"
    if not failed and action in (put, put_pinned, compile_new):
        assert find(again, "new") is not None, "it was said to be stored"
    entries = again.entries()
    assert {entry.key for entry in entries} == {
        path.name.split(".")[0] for path in (root / "segments").rglob("*.safetensors")
    }
    if failed:
        assert again.pinned() <= {entry.family for entry in entries}
    if action is not remove or again.path(key("other")):
        action(KVStore(root, limits=limits, remote=f"memory://{root.parent.name}"))
    assert not [f for f in again.faults if "damaged" in f.reason]


def load_or_run(path: Path) -> None:
    from kvnotes.store import open_segment

    opened = open_segment(path)
    opened.verify()
    if opened.header.kind == "segment":
        load_segment(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_small_disk_fills_up_and_works_again_after_making_room(small_disk: Path) -> None:
    store = KVStore(small_disk / "s")
    stored: list[str] = []
    for index in range(100):
        name = f"{index}"
        try:
            entry = store.put(named(name, 200), Provenance(name=name))
        except StorageError as error:
            assert "No space left" in error.message or "full" in error.message
            assert "free some space" in error.hint
            break
        assert entry is not None
        stored.append(entry.key)
    assert 3 < len(stored) < 100
    again = KVStore(small_disk / "s")
    for index in range(len(stored)):
        assert find(again, str(index), 200) is not None
    assert {entry.key for entry in again.entries()} >= set(stored)
    found = again.get_or_compile(IDENTITY, run_named("x", 200), lambda: named("x", 200))
    assert found is not None, "a full disk does not stop anybody"
    again.remove(stored[:3])
    again.put(named("y", 200))
    assert find(KVStore(small_disk / "s"), "y", 200) is not None
    assert not list(small_disk.rglob(".*.part"))

"""Processes that share a folder: one compile for all, and none that is killed holds up others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
from helpers_tiers import Compiler, barrier, find, finish, named, start
from helpers_workers import (
    ask_at_once,
    check_end,
    compile_and_hang,
    hammer,
    judged,
    key_of,
)

from kvnotes.store import KVStore
from kvnotes.store.locks import KeyLocks


def test_processes_and_threads_that_ask_at_once_compile_once(tmp_path: Path) -> None:
    gate = barrier(3)
    workers = [start(ask_at_once, tmp_path / "s", tmp_path / "log", gate, 3) for _ in range(3)]
    finish(*workers)
    assert Compiler(tmp_path / "log").names == ["a"]


def wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come")


def test_another_process_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    first = start(compile_and_hang, tmp_path / "s", tmp_path / "started")
    wait_for(tmp_path / "started")
    compiler, store = Compiler(tmp_path / "log"), KVStore(tmp_path / "s")
    waiting = Thread(target=compiler.get, args=(store, "a"))
    waiting.start()
    other = Compiler(tmp_path / "other")
    other.get(store, "b")  # is not held up
    time.sleep(0.3)
    assert compiler.names == [], "somebody compiles it already"
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    waiting.join(30)
    assert compiler.names == ["a"]
    first.join(10)
    assert find(KVStore(tmp_path / "s"), "a") is not None


def test_find_does_not_wait_for_a_compile(tmp_path: Path) -> None:
    first = start(compile_and_hang, tmp_path / "s", tmp_path / "started")
    wait_for(tmp_path / "started")
    began = time.monotonic()
    assert find(KVStore(tmp_path / "s", remote=f"memory://{tmp_path.name}"), "a") is None
    assert time.monotonic() - began < 60
    first.kill()
    first.join()


def test_lock_files_of_dead_processes_block_nobody(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    assert store.disk is not None and store.disk.locks.folder is not None
    store.disk.locks.folder.mkdir(parents=True)
    (store.disk.locks.folder / f"{key_of('a')}.lock").write_text("left behind")
    compiler = Compiler(tmp_path / "log")
    compiler.get(store, "a")
    assert compiler.names == ["a"]


@pytest.mark.parametrize("folder", ["locks", None])
def test_lock_may_be_taken_again_by_its_holder_alone(tmp_path: Path, folder: str | None) -> None:
    locks = KeyLocks(tmp_path / folder if folder else None)
    others: list[bool] = []

    def try_elsewhere() -> None:
        with locks.try_hold("k") as free:
            others.append(free)

    with locks.hold("k"), locks.hold("k"), locks.try_hold("k") as again:
        assert again
        for _ in range(2):
            thread = Thread(target=try_elsewhere)
            thread.start()
            thread.join()
        with locks.try_hold("other") as free:
            assert free
    try_elsewhere()
    assert others == [False, False, True]


def test_locks_of_two_stores_on_one_folder_exclude_each_other(tmp_path: Path) -> None:
    one, two = KeyLocks(tmp_path), KeyLocks(tmp_path)
    with one.hold("k"), two.try_hold("k") as free:
        assert not free
    with two.try_hold("k") as free:
        assert free


@pytest.mark.parametrize("limit", [None, 100_000])
def test_processes_lose_and_double_nothing(tmp_path: Path, limit: int | None) -> None:
    root, log = tmp_path / "s", tmp_path / "log"
    finish(*(start(hammer, root, log, seed, 150, limit) for seed in (1, 2)))
    verdict = check_end(root, log)
    assert verdict.faults == []
    assert verdict.num_compiled > 20
    assert len(verdict.present) > 3


def test_judge_finds_what_went_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "1 compile-begin n0\n1 compile-end n0\n2 compile-begin n0\n2 compile-end n0\n"
        "1 put-begin n1\n2 gone-begin n1\n2 gone-end n1\n1 put-end n1\n"
        "1 put-begin n2\n1 put-end n2\n1 pin-begin n2\n1 pin-end n2\n2 gone-begin n2\n"
        "2 gone-end n2\n"
    )
    verdict = judged(log)
    assert verdict.present == {"n0"}
    assert verdict.absent == {"n2"}
    assert verdict.faults == [
        "line 2: n0 was compiled twice",
        "line 12: n2 was evicted although it was pinned",
    ]
    assert named("n0").num_tokens == 8

"""What processes do to a store that they share, and how one judges them afterwards.

Every process notes in one log what it begins and ends; lines of the log are in the order in
which they were written. Nothing is known about what happens between two lines, so a judge
asks only for what every order allows.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from helpers_tiers import IDENTITY, Compiler, find, named, run_named, same

from kvnotes.errors import StorageError
from kvnotes.store import KVStore, Limits, Provenance, content_key
from kvnotes.store.index import INDEX_NAME, Table

NAMES = [f"n{index}" for index in range(24)]

WEIGHTS = {
    "put": 5,
    "find": 6,
    "compile": 10,
    "pin": 1,
    "unpin": 2,
    "remove": 3,
    "list": 2,
    "reopen": 2,
    "lose index": 1,
    "damage": 1,
}


def key_of(name: str) -> str:
    """The content key of a name."""
    return content_key("segment", "", IDENTITY.fingerprint, run_named(name).digest)


class Log:
    """Lines that processes append to one file."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, name: str) -> None:
        os.write(self.file, f"{os.getpid()} {event} {name}\n".encode())


def hammer(root: Path, log_path: Path, seed: int, num: int, limit: int | None) -> None:
    """Do random operations; with a limit the index is not lost, nor are files damaged."""
    os.fsync = lambda file: None  # type: ignore[assignment]  # no power cut here
    log, chosen = Log(log_path), random.Random(seed)
    by_key = {key_of(name): name for name in NAMES}
    operations = dict(WEIGHTS)
    if limit is not None:
        operations |= {"lose index": 0, "damage": 0}
    store = opened(root, log, by_key, limit)
    for _ in range(num):
        name = chosen.choice(NAMES)
        operation = chosen.choices(list(operations), list(operations.values()))[0]
        if operation == "reopen":
            store = opened(root, log, by_key, limit)
        else:
            step(store, operation, name, log, limit)


def opened(root: Path, log: Log, by_key: dict[str, str], limit: int | None) -> KVStore:
    """A store that notes which files it evicts."""
    store = KVStore(root, limits=Limits(max_nbytes=limit), memory_nbytes=1)
    disk: Any = store.disk
    unlink: Callable[[Table, Collection[str]], int] = disk._unlink

    def noting(table: Table, keys: Collection[str]) -> int:
        for key in keys:
            log.note("gone-begin", by_key[key])
        freed = unlink(table, keys)
        for key in keys:
            log.note("gone-end", by_key[key])
        return freed

    disk._unlink = noting
    return store


def step(store: KVStore, operation: str, name: str, log: Log, limit: int | None) -> None:
    """Do one operation and note it."""
    key, disk = key_of(name), store.disk
    assert disk is not None
    if operation == "put":
        log.note("put-begin", name)
        with suppress(StorageError):  # too much is pinned
            store.put(named(name), Provenance(name=name))
            log.note("put-end", name)
    elif operation == "find":
        find(store, name)
    elif operation == "compile":
        compile_noted(store, name, log)
    elif operation in ("pin", "unpin"):
        log.note(f"{operation}-begin", name)
        with suppress(StorageError):
            store.pin(key, operation == "pin")
            log.note(f"{operation}-end", name)
    elif operation == "remove":
        log.note("remove-begin", name)
        with suppress(StorageError):
            store.remove([key])
    elif operation == "list":
        entries = store.entries()
        assert {entry.name for entry in entries} <= set(NAMES)
        assert len({entry.key for entry in entries}) == len(entries)
        # the other process may have a file in its place, and not yet have made room for it
        sizes = [entry.nbytes for entry in entries]
        assert limit is None or sum(sizes) <= limit + max(sizes, default=0)
    elif operation == "lose index":
        with suppress(FileNotFoundError):
            path = disk.root / INDEX_NAME
            new = path.with_name(f"broken-{os.getpid()}")
            new.write_bytes(random.choice([b"garbage" * 1000, b"", path.read_bytes()[:5000]]))
            new.replace(path)
    elif operation == "damage":
        damage(disk.path(key), name, log)


def compile_noted(store: KVStore, name: str, log: Log) -> None:
    """Ask for a segment; it must be right, and what is compiled is noted."""
    compiled = []
    faults = store.counters.refused["StorageError"]

    def compile() -> Any:
        log.note("compile-begin", name)
        compiled.append(name)
        time.sleep(0.001)
        return named(name)

    found = store.get_or_compile(IDENTITY, run_named(name), compile, Provenance(name=name))
    assert same(found, named(name))
    if compiled:
        stored = store.counters.refused["StorageError"] == faults
        log.note("compile-end" if stored else "compile-lost", name)


def damage(path: Path, name: str, log: Log) -> None:
    """Put a damaged copy in the place of a file; who has the old one mapped keeps it."""
    try:
        content = bytearray(path.read_bytes())
    except FileNotFoundError:
        return
    content[-1] = (content[-1] + 1) % 256  # damaged twice is damaged
    new = path.with_name(f".{os.getpid()}.part")
    new.write_bytes(content)
    log.note("damage-begin", name)
    new.replace(path)
    log.note("damage-end", name)


# -- other work ---------------------------------------------------------------------------


def ask_at_once(root: Path, log: Path, gate: Any, num_threads: int) -> None:
    """Several threads of a process ask for one segment that takes long to compile."""
    store = KVStore(root)
    compiler = Compiler(log, before=lambda: time.sleep(0.2))
    gate.wait()
    threads = [Thread(target=compiler.get, args=(store, "a")) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert find(store, "a") is not None


def compile_and_hang(root: Path, started: Path) -> None:
    """Compile something, and never get done."""

    def hang() -> None:
        started.touch()
        time.sleep(600)

    Compiler(started.with_name("never"), before=hang).get(KVStore(root), "a")


def read_only(root: Path, key: str) -> None:
    """Run by another user: whoever runs the tests may be allowed everything."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    store = KVStore(root, limits=Limits(max_nbytes=1 << 30))
    assert find(store, "a") is not None
    assert [entry.key for entry in store.entries()] == [key]
    store.get_or_compile(named("b").identity, named("b").run, lambda: named("b"))
    assert find(store, "b") is not None, "in memory"
    assert store.counters.refused["StorageError"] == 1, store.faults
    try:
        store.put(named("c"))
    except StorageError as error:
        assert "Permission denied" in error.message or "readonly" in error.message, error.message
    else:
        raise AssertionError("written into a read-only folder")
    assert store.for_tenant("t").entries() == store.entries()


# -- judging -------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What a log says about the end.

    Args:
        present: Must be there.
        absent: Must not be there.
        num_compiled: Compilations.
        faults: What should not have happened.
    """

    present: set[str]
    absent: set[str]
    num_compiled: int
    faults: list[str]


def check_end(root: Path, log: Path) -> Verdict:
    """Look at what is there when all processes are done."""
    verdict, store = judged(log), KVStore(root)
    for name in NAMES:
        found = find(store, name) is not None
        if not found and name in verdict.present:
            verdict.faults.append(f"{name} is lost")
        if found and name in verdict.absent:
            verdict.faults.append(f"{name} came from nowhere")
    verdict.faults += [f.reason for f in store.faults if "is damaged" not in f.reason]
    return verdict


def judged(log: Path) -> Verdict:
    """Judge what processes noted."""
    lines = [line.split() for line in log.read_text().splitlines()]
    verdict = Verdict(set(), set(), 0, [])
    for name in NAMES:
        events = [(i, pid, event) for i, (pid, event, of) in enumerate(lines) if of == name]
        _judge_compiles(name, events, verdict)
        _judge_end(name, events, verdict)
        _judge_pins(name, events, verdict)
    return verdict


def _judge_compiles(name: str, events: list[tuple[int, str, str]], verdict: Verdict) -> None:
    free = True
    for index, _, event in events:
        if event == "compile-begin":
            verdict.num_compiled += 1
            if not free:
                verdict.faults.append(f"line {index}: {name} was compiled twice")
            free = False
        elif event.startswith(("gone", "damage")) or event == "compile-lost":
            free = True


def _judge_end(name: str, events: list[tuple[int, str, str]], verdict: Verdict) -> None:
    """Compare the last time it came with the last time it went."""
    begun: dict[tuple[str, str], int] = {}
    came_begin = came_end = gone_begin = gone_end = -1
    open_ends = 0
    for index, pid, event in events:
        what, _, edge = event.partition("-")
        if what in ("put", "compile"):
            if edge == "begin":
                begun[pid, what] = index
                open_ends += 1
            else:
                open_ends -= 1
                came_end = index
                if edge == "end":
                    came_begin = max(came_begin, begun[pid, what])
        elif what in ("gone", "damage"):
            gone_begin, gone_end = (index, gone_end) if edge == "begin" else (gone_begin, index)
    if came_begin > gone_end:
        verdict.present.add(name)
    if gone_begin > came_end and open_ends <= 0:
        verdict.absent.add(name)


def _judge_pins(name: str, events: list[tuple[int, str, str]], verdict: Verdict) -> None:
    """What is pinned goes only by being removed, or damaged by the test itself."""
    pinned, excused = False, False
    for index, _, event in events:
        if event == "pin-end":
            pinned = True
        elif event in ("unpin-begin", "pin-begin"):
            pinned = False  # not known until it ends
        elif event == "remove-begin":
            excused = True  # by anybody, from now on
        elif event == "gone-begin" and pinned and not excused:
            verdict.faults.append(f"line {index}: {name} was evicted although it was pinned")
        elif event in ("gone-end", "damage-begin"):
            pinned = False

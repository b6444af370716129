"""Processes that are killed while they compile, save, push or pull; and what is there then.

A process notes each thing that it was told is done. After its death everything noted must be
there, no half file may be visible, and the next process must not be held up.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from helpers_store import identity
from helpers_tiers import find, named, run_named, start, variant

from kvnotes.errors import KVNotesError
from kvnotes.store import KVStore, Limits, Provenance, content_key, open_segment

CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "lseek",
    "ftruncate",
    "sendfile",
)
MODEL = identity(num_layers=8, num_kv_heads=2, head_dim=32)
LONG = 3000
"""Tokens of a segment whose file takes a while to write: 12 MB."""

WORKS = ("compile", "put", "variant", "push", "pull", "evict", "remove", "prune")


def work_forever(work: str, root: Path, remote: Path, notes: Path, long: bool, from_: int) -> None:
    """Do one kind of work again and again; with `long`, on files of some size."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for index in count(from_):
        one_work(work, root, remote, f"{work}{index}", LONG if long else 8)
        os.write(file, f"{work}{index}\n".encode())


def one_work(work: str, root: Path, remote: Path, name: str, num_tokens: int) -> None:
    """Do one kind of work on a name."""
    limit = 6 * named(name, num_tokens, who=MODEL).nbytes + 60_000 if work == "evict" else None
    store = KVStore(root, remote=str(remote), limits=Limits(max_nbytes=limit), memory_nbytes=1)
    segment, source = named(name, num_tokens, who=MODEL), Provenance(name=name)
    if work == "compile":
        run = run_named(name, num_tokens)
        store.get_or_compile(MODEL, run, lambda: segment, source, strict=True)
    elif work == "variant":
        store.put(*variant(name, "x", num_tokens, who=MODEL), pinned=True)
    elif work == "pull":
        assert store.pull(key_of(far(name), num_tokens))
    else:
        entry = store.put(segment, source)
        assert entry is not None
        if work == "push":
            store.push([entry.key])
        elif work == "remove":
            store.remove([entry.key])
        elif work == "prune":
            store.prune()


def far(name: str) -> str:
    """Which of the files that lie on the remote tier from the beginning is pulled."""
    return f"far{int(name.removeprefix('pull')) % NUM_FAR}"


NUM_FAR = 4


def key_of(name: str, num_tokens: int) -> str:
    """The content key of a name."""
    return content_key("segment", "", MODEL.fingerprint, run_named(name, num_tokens).digest)


def die_at_call(call: int, work: str, root: Path, remote: Path, notes: Path, reached: Path) -> None:
    """Kill this process before its n-th system call that changes something."""
    counter = count()

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            if next(counter) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return function

    real_open, real_write = os.open, os.write
    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    name = f"{work}{call}"
    one_work(work, root, remote, name, 8)
    file = real_open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    real_write(file, f"{name}\n".encode())
    reached.touch()


class Scene:
    """A folder and a remote tier in which processes die.

    Args:
        folder: Empty.
        long: Files of some size: for kills at random times.
        pulls: Files lie on the remote tier from the beginning.
    """

    def __init__(self, folder: Path, *, long: bool, pulls: bool = True) -> None:
        self.root, self.remote, self.notes = folder / "s", folder / "remote", folder / "notes"
        self.num_tokens = LONG if long else 8
        self.long = long
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self._number = 0
        donor = KVStore(folder / "donor", remote=str(self.remote), memory_nbytes=1)
        for index in range(NUM_FAR * pulls):
            entry = donor.put(named(f"far{index}", self.num_tokens, who=MODEL))
            assert entry is not None
            donor.push([entry.key])

    def kill_at_random(self, work: str, chosen: random.Random, seconds: float) -> None:
        """Let a process work, and kill it at some time."""
        self._number += 1000
        arguments = (work, self.root, self.remote, self.notes, self.long, self._number)
        process = start(work_forever, *arguments)
        time.sleep(chosen.uniform(0.0, seconds))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            self.faults.append(f"{work}: ended by itself with {process.exitcode}")
        self.look(work)

    def kill_at_call(self, work: str, call: int) -> bool:
        """Let a process die at a system call; says whether it came that far."""
        done = self.notes.with_name(f"done-{work}-{call}")
        process = start(die_at_call, call, work, self.root, self.remote, self.notes, done)
        process.join(60)
        if not done.exists() and process.exitcode != -signal.SIGKILL:
            self.faults.append(f"{work} at call {call}: ended with {process.exitcode}")
        self.look(work)
        return not done.exists()

    # -- afterwards --------------------------------------------------------------------

    def look(self, work: str) -> None:
        """See what is there after a death, and tidy up."""
        self.seen["kills"] += 1
        for place in (self.root, self.remote):
            self._look_at_files(work, place)
        self._look_for_noted(work)
        self._go_on(work)
        self._tidy(work)

    def _look_at_files(self, work: str, place: Path) -> None:
        for path in (place / "segments").rglob("*"):
            if path.name.startswith("."):
                self.seen["parts"] += 1
            elif path.is_file():
                try:
                    open_segment(path).verify()
                except KVNotesError as error:
                    self.faults.append(f"{work}: {error.message}")

    def _look_for_noted(self, work: str) -> None:
        store = KVStore(self.root, memory_nbytes=1)
        elsewhere = KVStore(self.notes.with_name("elsewhere"), remote=str(self.remote))
        noted = self.notes.read_text().split() if self.notes.exists() else []
        self.notes.write_text("")
        self.seen["acknowledged"] += len(noted)
        for index, name in enumerate(noted):
            held, facts = name, {}
            if name.startswith("variant"):
                facts = {"preamble": variant(name, "x")[0].preamble_ids}
            elif name.startswith("pull"):
                held = far(name)
            gone = name.startswith("remove")
            evicted = name.startswith("evict") and index < len(noted) - 4
            found = find(store, held, self.num_tokens, who=MODEL, **facts)
            if found is None and not gone and not evicted:
                self.faults.append(f"{work}: {name} was acknowledged, and is lost")
            if name.startswith("push") and not elsewhere.pull(key_of(name, self.num_tokens)):
                self.faults.append(f"{work}: {name} was pushed, and is not there")

    def _go_on(self, work: str) -> None:
        """The same work must be possible at once, on the very thing that was interrupted."""
        began = time.monotonic()
        last = [p.name.split(".")[0] for p in (self.root / "locks").glob("*.lock")]
        store = KVStore(self.root, memory_nbytes=1)
        for key in last[-3:]:
            assert store.disk is not None
            with store.disk.locks.try_hold(key) as free:
                if not free:
                    self.faults.append(f"{work}: the lock of {key[:8]} is still held")
        name = f"{work}{self._number + 1}"
        one_work(work, self.root, self.remote, name, self.num_tokens)
        if time.monotonic() - began > 30:
            self.faults.append(f"{work}: the next process was held up")
        keys = {entry.key for entry in KVStore(self.root).entries()}
        files = {p.name.split(".")[0] for p in self.root.glob("segments/*/*.safetensors")}
        if keys != files:
            self.faults.append(f"{work}: {len(keys)} entries, {len(files)} files")

    def _tidy(self, work: str) -> None:
        """Leftovers go when they are old; here they are made old."""
        for place in (self.root, self.remote):
            for path in place.rglob(".*.part"):
                os.utime(path, (1.0, 1.0))
        store = KVStore(self.root, remote=str(self.remote), memory_nbytes=1)
        freed = store.prune()
        self.seen["leftovers"] += len(freed)
        left = list(self.root.rglob(".*.part"))
        if left:
            self.faults.append(f"{work}: {left[0].name} was not taken away")
        for folder in {path.parent for path in self.remote.rglob(".*.part")}:
            assert store.remote is not None
            store.remote.sweep(str(folder.relative_to(self.remote)))
        if list(self.remote.rglob(".*.part")):
            self.faults.append(f"{work}: a part on the remote tier was not taken away")
        size = sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())
        if size > 100_000_000 or work == "pull":  # what is here is not pulled
            store.remove([entry.key for entry in store.entries()])

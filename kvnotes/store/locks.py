"""One at a time: locks by key, among the threads and the processes that share a folder.

A lock is the system's own, on an open file: it goes away with the process that held it,
however that one died. Where no file can be written, only threads keep each other out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from kvnotes.errors import StorageError
from kvnotes.store.atomic import make_folder


@dataclass(slots=True)
class _Held:
    """What the threads of this process share for one key."""

    lock: Any = field(default_factory=RLock)
    num_users: int = 0
    depth: int = 0


class KeyLocks:
    """Locks by key; who holds one may take it again.

    Args:
        folder: For the lock files, made when needed; None locks out only threads.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[str, _Held] = {}
        self._guard = Lock()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Wait until nobody else holds a key, and hold it."""
        with self._thread(key, wait=True) as held:
            assert held is not None
            with self._process(key, held, wait=True):
                yield

    @contextmanager
    def try_hold(self, key: str) -> Iterator[bool]:
        """Hold a key if nobody else does; yields whether it worked."""
        with self._thread(key, wait=False) as held:
            if held is None:
                yield False
                return
            with self._process(key, held, wait=False) as free:
                yield free

    @contextmanager
    def _thread(self, key: str, *, wait: bool) -> Iterator[_Held | None]:
        with self._guard:
            held = self._held.setdefault(key, _Held())
            held.num_users += 1
        try:
            if not held.lock.acquire(blocking=wait):
                yield None
                return
            held.depth += 1
            try:
                yield held
            finally:
                held.depth -= 1
                held.lock.release()
        finally:
            with self._guard:
                held.num_users -= 1
                if not held.num_users:
                    del self._held[key]

    @contextmanager
    def _process(self, key: str, held: _Held, *, wait: bool) -> Iterator[bool]:
        if self.folder is None or held.depth > 1:
            yield True
            return
        lock: BaseFileLock | None = None
        try:
            make_folder(self.folder)
            lock = FileLock(self.folder / f"{key}.lock")
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            yield False
            return
        except (StorageError, OSError, NotImplementedError):  # read-only, full, or no locks here
            lock = None
        try:
            yield True
        finally:
            if lock is not None:
                lock.release()

"""What a store has done in this process, and what it refused."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Literal

from kvnotes.errors import KVNotesError

MAX_FAULTS = 100
"""Refusals whose text is remembered; all are counted."""


@dataclass(slots=True)
class Counters:
    """What a store has done for one tenant.

    Attributes:
        memory_hits: Found in memory.
        disk_hits: Found on the disk.
        remote_hits: Downloaded.
        misses: Found nowhere.
        compiled: Compiled because nobody had it.
        stored: Files written.
        pulled: Files downloaded.
        pushed: Files uploaded.
        retries: Attempts to reach the remote tier that failed and were repeated.
        evicted: Files and segments that made room.
        refused: Files that were refused, by the class of the error.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0
    misses: int = 0
    compiled: int = 0
    stored: int = 0
    pulled: int = 0
    pushed: int = 0
    retries: int = 0
    evicted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


Event = Literal[
    "memory_hits",
    "disk_hits",
    "remote_hits",
    "misses",
    "compiled",
    "stored",
    "pulled",
    "pushed",
    "retries",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that was refused, or could not be written."""

    key: str
    reason: str


class Tally:
    """Counters and faults of one tenant; shared by threads."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._faults: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self._lock = Lock()

    def count(self, event: Event, num: int = 1) -> None:
        """Count something."""
        with self._lock:
            setattr(self._counters, event, getattr(self._counters, event) + num)

    def refuse(self, key: str, error: KVNotesError) -> None:
        """Count and note a fault."""
        with self._lock:
            self._counters.refused[type(error).__name__] += 1
            self._faults.append(Fault(key, error.message))

    def counters(self, evicted: int) -> Counters:
        """Return a copy of the counters.

        Args:
            evicted: What the tiers have evicted.
        """
        with self._lock:
            refused = Counter(self._counters.refused)
            return replace(self._counters, evicted=evicted, refused=refused)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The latest faults."""
        with self._lock:
            return tuple(self._faults)

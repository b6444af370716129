"""Which files a process has verified already; needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What changes when a file is written again."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> FileVersion:
        """Return the version of a file from its stat."""
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


class VerifiedFiles:
    """Which versions of which files this process has verified; shared by threads."""

    def __init__(self) -> None:
        self._seen: dict[FileVersion, str] = {}
        self._lock = Lock()

    def knows(self, version: FileVersion, header_digest: str) -> bool:
        """Whether this version, with this header, was verified."""
        with self._lock:
            return self._seen.get(version) == header_digest

    def add(self, version: FileVersion, header_digest: str) -> None:
        """Remember a verified version."""
        with self._lock:
            self._seen[version] = header_digest

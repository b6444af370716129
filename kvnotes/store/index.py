"""What a folder of segments holds, as a table: fast to list, shared by processes.

Owns an SQLite file that can always be made again from the segment files, which are the
truth: an index that is damaged is put aside and made again. Every
call opens its own connection, so that threads and forked processes share nothing but the
file. Needs no torch: listing is fast in a new process too.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal, TypeVar

from filelock import FileLock

from kvnotes.errors import StorageError
from kvnotes.store.atomic import FILE_MODE, make_folder, storage_errors

BUSY_SECONDS = 60.0
"""How long a process waits for another one that writes the index."""

INDEX_NAME = "index-2.sqlite"
"""Its name holds the version of its tables: other versions of kvnotes keep one of their own."""

DAMAGED_SUFFIX = ".damaged-"
MAX_REPAIRS = 3

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored segment.

    Args:
        key: Content key, the name of its file.
        kind: `segment`, or `run` for a part of a session.
        tenant: Whose it is; "" is shared.
        fingerprint: The model it was computed with.
        name: Name of the skill, "" for none.
        version: Version of the skill, 0 for none.
        family: What is evicted together: the key of a family of variants, or its own.
        variant: The values of the preamble's fields, in words.
        text: SHA-256 of its text where a family keeps that once, beside the files; else "".
        num_tokens: Tokens.
        nbytes: Bytes of the file.
        altered: "" if exact.
        created_at: When its file was written, in seconds since 1970.
        used_at: When it was last used, as far as processes have said it.
    """

    key: str
    kind: Literal["segment", "run"]
    tenant: str
    fingerprint: str
    name: str
    version: int
    family: str
    variant: str
    text: str
    num_tokens: int
    nbytes: int
    altered: str
    created_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class Family:
    """Segments that are counted, pinned and evicted as one.

    Args:
        name: What `Entry.family` says.
        keys: Their content keys.
        nbytes: Bytes of their files.
    """

    name: str
    keys: tuple[str, ...]
    nbytes: int


_COLUMNS = tuple(field.name for field in fields(Entry))
_TYPES = {"version": "INTEGER", "num_tokens": "INTEGER", "nbytes": "INTEGER"}
_TYPES |= {"created_at": "REAL", "used_at": "REAL"}
_DEFINITIONS = ", ".join(f"{name} {_TYPES.get(name, 'TEXT')} NOT NULL" for name in _COLUMNS)
# `turn` counts uses, so that the order of eviction does not depend on anybody's clock
_ENTRIES = (
    f"CREATE TABLE entries ({_DEFINITIONS}, turn INTEGER NOT NULL, PRIMARY KEY (key)) WITHOUT ROWID"
)
_SCHEMA = {
    "entries": _ENTRIES,
    "by_turn": "CREATE INDEX by_turn ON entries (turn)",
    "complete": "CREATE TABLE complete (since REAL NOT NULL)",
}
_INSERT = (
    f"INSERT OR REPLACE INTO entries ({', '.join(_COLUMNS)}, turn) "
    f"VALUES ({', '.join('?' * len(_COLUMNS))}, ?)"
)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM entries"


class Table:
    """The rows of an index within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection

    @property
    def complete(self) -> bool:
        """Whether every file had a row at some time since the table was made."""
        return self._rows.execute("SELECT 1 FROM complete").fetchone() is not None

    def mark_complete(self) -> None:
        """Note that every file has a row."""
        if not self.complete:
            self._rows.execute("INSERT INTO complete VALUES (?)", (time.time(),))

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace that of its key; it is the most recently used one then."""
        self._rows.execute(_INSERT, (*astuple(entry), self._next_turn()))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove entries; those that are not there are no fault."""
        self._rows.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def touch(self, used: Iterable[tuple[str, float]]) -> None:
        """Note when entries were used, in the order of their use."""
        turn = self._next_turn()
        rows = [(at, turn + i, key) for i, (key, at) in enumerate(used)]
        self._rows.executemany("UPDATE entries SET used_at = ?, turn = ? WHERE key = ?", rows)

    def entries(self) -> list[Entry]:
        """Return all entries, by name, version, variant and key."""
        rows = self._rows.execute(f"{_SELECT} ORDER BY name, version, variant, key")
        return [Entry(*row) for row in rows]

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        row = self._rows.execute(f"{_SELECT} WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(*row)

    def keys(self) -> set[str]:
        """Return the keys of all entries."""
        return {key for (key,) in self._rows.execute("SELECT key FROM entries")}

    def nbytes(self) -> int:
        """Return the bytes of all files."""
        query = "SELECT coalesce(sum(nbytes), 0) FROM entries"
        return int(self._rows.execute(query).fetchone()[0])

    def members(self, family: str) -> list[str]:
        """Return the keys of a family."""
        rows = self._rows.execute("SELECT key FROM entries WHERE family = ?", (family,))
        return [key for (key,) in rows]

    def families(self, kind: Literal["segment", "run"] = "segment") -> list[Family]:
        """Return the families of a kind, the least recently used first."""
        query = "SELECT family, key, nbytes FROM entries WHERE kind = ? ORDER BY turn"
        members: dict[str, list[tuple[str, int]]] = {}
        for family, key, nbytes in self._rows.execute(query, (kind,)):
            # of two uses the later one counts: a family stands where its last member does
            members[family] = [*members.pop(family, []), (key, nbytes)]
        return [
            Family(name, tuple(key for key, _ in held), sum(size for _, size in held))
            for name, held in members.items()
        ]

    def _next_turn(self) -> int:
        return int(
            self._rows.execute("SELECT coalesce(max(turn), 0) + 1 FROM entries").fetchone()[0]
        )


class Index:
    """The table of one folder.

    Args:
        path: Its file; made when something is first written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, action: Callable[[Table], Result]) -> Result:
        """Call a function with the table; where there is no file, with an empty one.

        Raises:
            StorageError: It cannot be read, or another process writes for too long.
        """
        return self._run(action, writes=False, wait=BUSY_SECONDS)

    def write(self, action: Callable[[Table], Result], *, wait: float = BUSY_SECONDS) -> Result:
        """Call a function with the table, while nobody else writes; all is kept, or nothing.

        Args:
            action: What it did outside of the table must be harmless if it is called again.
            wait: Seconds for which other processes may write before this one.

        Raises:
            StorageError: The disk is full, the folder cannot be written, or it was not its turn.
        """
        return self._run(action, writes=True, wait=wait)

    # -- connections -----------------------------------------------------------------------

    def _run(self, action: Callable[[Table], Result], *, writes: bool, wait: float) -> Result:
        try:
            for _ in range(MAX_REPAIRS):
                version = self._version()
                try:
                    return self._once(action, writes, wait)
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:  # no database, damaged, or not ours
                    self._put_aside(version)
            return self._once(action, writes, wait)
        except sqlite3.Error as error:  # full, read-only, busy for too long
            raise StorageError(
                f"cannot use the index {self._path}: {error}",
                hint="free some space and check the folder's permissions",
            ) from error

    def _once(self, action: Callable[[Table], Result], writes: bool, wait: float) -> Result:
        with closing(self._connect(writes, wait)) as connection:
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if not _has_schema(connection):
                if not writes:
                    with closing(_empty()) as nothing:
                        return action(Table(nothing))
                _make_schema(connection)
            result = action(Table(connection))
            connection.execute("COMMIT")
            return result

    def _connect(self, writes: bool, wait: float) -> sqlite3.Connection:
        if not self._path.exists():
            if not writes:
                return _empty()
            make_folder(self._path.parent)
            with storage_errors(self._path):  # before SQLite makes it for everybody to read
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, FILE_MODE))
        connection = sqlite3.connect(self._path, timeout=wait, isolation_level=None)
        # no fsync: processes that die leave it whole, and after a power cut it is made again
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def _version(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0

    def _put_aside(self, version: int) -> None:
        """Move the file away, unless another process did and made a new one."""
        folder = self._path.parent
        with storage_errors(self._path), FileLock(folder / f"{self._path.name}.lock"):
            if self._version() == version:
                with suppress(FileNotFoundError):
                    self._path.replace(
                        folder / f"{self._path.name}{DAMAGED_SUFFIX}{time.time_ns()}"
                    )
                self._path.with_name(self._path.name + "-journal").unlink(missing_ok=True)


def _has_schema(connection: sqlite3.Connection) -> bool:
    """Whether the tables are there; not in a new file.

    Raises:
        sqlite3.DatabaseError: There are others.
    """
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    found = dict(connection.execute(query).fetchall())
    if found not in ({}, _SCHEMA):
        raise sqlite3.DatabaseError("it has other tables")
    return bool(found)


def _make_schema(connection: sqlite3.Connection) -> None:
    for definition in _SCHEMA.values():
        connection.execute(definition)


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _make_schema(connection)
    return connection

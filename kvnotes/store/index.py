"""What a disk tier holds, as a table: fast to list, shared by processes.

Owns an SQLite file that can always be made again from the segment files, which are the
truth: a damaged index is put aside and rebuilt. Every call opens its own connection, so
that threads and forked processes share nothing but the file.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from kvnotes.errors import StorageError
from kvnotes.store.atomic import FILE_MODE, make_folder, storage_errors
from kvnotes.store.header import SegmentHeader, SegmentKind

BUSY_SECONDS = 60.0
"""How long a process waits for another one that writes the index."""
SCHEMA_VERSION = 1


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
        num_tokens: Tokens.
        nbytes: Bytes of the file.
        altered: "" if exact.
        created_at: When its file was written, in seconds since 1970.
        used_at: When it was last read from the disk.
    """

    key: str
    kind: SegmentKind
    tenant: str
    fingerprint: str
    name: str
    version: int
    family: str
    variant: str
    num_tokens: int
    nbytes: int
    altered: str
    created_at: float
    used_at: float

    @classmethod
    def of(cls, header: SegmentHeader, nbytes: int, written_at: float) -> Entry:
        """Return the entry of a file."""
        source = header.provenance
        return cls(
            key=header.key,
            kind=header.kind,
            tenant=header.tenant,
            fingerprint=header.fingerprint,
            name=source.name,
            version=source.version,
            family=source.family or header.key,
            variant=", ".join(f"{name}={value}" for name, value in source.variant),
            num_tokens=len(header.token_ids),
            nbytes=nbytes,
            altered=header.altered,
            created_at=written_at,
            used_at=written_at,
        )


_COLUMNS = tuple(field.name for field in fields(Entry))
_TYPES = {"version": "INTEGER", "num_tokens": "INTEGER", "nbytes": "INTEGER"}
_TYPES |= {"created_at": "REAL", "used_at": "REAL"}
_DEFINITIONS = ", ".join(f"{name} {_TYPES.get(name, 'TEXT')} NOT NULL" for name in _COLUMNS)
_CREATE = f"CREATE TABLE entries ({_DEFINITIONS}, PRIMARY KEY (key)) WITHOUT ROWID"
_INSERT = (
    f"INSERT OR REPLACE INTO entries ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join('?' * len(_COLUMNS))})"
)


class Index:
    """The table of one disk tier.

    Args:
        path: Its file; made on first use.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent)

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries, or replace those with the same key."""
        with self._writing() as table:
            table.executemany(_INSERT, [astuple(entry) for entry in entries])

    def remove(self, keys: Iterable[str]) -> None:
        """Remove entries; those that are not there are no fault."""
        with self._writing() as table:
            table.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def touch(self, used: Iterable[tuple[str, float]]) -> None:
        """Note when entries were used."""
        rows = [(at, key) for key, at in used]
        if rows:
            with self._writing() as table:
                table.executemany(
                    "UPDATE entries SET used_at = max(used_at, ?) WHERE key = ?", rows
                )

    def entries(self) -> list[Entry]:
        """Return all entries, by name, version and key."""
        with self._reading() as table:
            rows = table.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM entries ORDER BY name, version, variant, key"
            )
            return [Entry(*row) for row in rows]

    def keys(self) -> set[str]:
        """Return the keys of all entries."""
        with self._reading() as table:
            return {key for (key,) in table.execute("SELECT key FROM entries")}

    def nbytes(self, tenant: str | None = None) -> int:
        """Return the bytes of a tenant's files, or of all."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        with self._reading() as table:
            row = table.execute(f"SELECT coalesce(sum(nbytes), 0) FROM entries{where}", values)
            return int(row.fetchone()[0])

    def families(self, tenant: str | None = None) -> list[tuple[str, int]]:
        """Return (family, bytes) of a tenant or of all, the least recently used first."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        query = (
            f"SELECT family, sum(nbytes) FROM entries{where} GROUP BY tenant, family "
            "ORDER BY max(used_at), family"
        )
        with self._reading() as table:
            return [(str(name), int(size)) for name, size in table.execute(query, values)]

    def members(self, family: str) -> list[str]:
        """Return the keys of a family."""
        with self._reading() as table:
            rows = table.execute("SELECT key FROM entries WHERE family = ?", (family,))
            return [str(key) for (key,) in rows]

    def get(self, keys: Sequence[str]) -> list[Entry]:
        """Return the entries of keys that are there."""
        query = f"SELECT {', '.join(_COLUMNS)} FROM entries WHERE key = ?"
        with self._reading() as table:
            found = [table.execute(query, (key,)).fetchone() for key in keys]
        return [Entry(*row) for row in found if row is not None]

    # -- connections -----------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as table:
            table.execute("BEGIN IMMEDIATE")
            yield table
            table.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(self._connect()) as table:
                yield table
        except sqlite3.OperationalError as error:  # full, read-only, busy for too long
            raise StorageError(
                f"cannot use the index {self._path}: {error}",
                hint="free some space and check the folder's permissions",
            ) from error

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._opened()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # not a database, or damaged: the files are the truth
            self._put_aside()
            return self._opened()

    def _opened(self) -> sqlite3.Connection:
        new = not self._path.exists()
        table = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            if new:
                with storage_errors(self._path):
                    self._path.chmod(FILE_MODE)
                table.execute("PRAGMA journal_mode = WAL")
            table.execute("PRAGMA synchronous = NORMAL")
            if _version(table) != SCHEMA_VERSION:
                table.execute("BEGIN IMMEDIATE")
                if _version(table) != SCHEMA_VERSION:  # another process may have been first
                    table.execute("DROP TABLE IF EXISTS entries")
                    table.execute(_CREATE)
                    table.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                table.execute("COMMIT")
            return table
        except BaseException:
            table.close()
            raise

    def _put_aside(self) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{int(time.time())}")
        with storage_errors(self._path):
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _version(table: sqlite3.Connection) -> int:
    return int(table.execute("PRAGMA user_version").fetchone()[0])

"""The segment files of one tenant: a folder that many processes share.

    segments/ab/<key>.kv.safetensors   the files, named by their content key
    pins/<family>                      what is never evicted: empty files
    texts/<sha256>                     texts that families of variants have in common
    partial/<key>                      downloads on their way
    damaged/                           files that were refused, put aside
    locks/<key>.lock                   one process at a time for each key
    index-2.sqlite                     a table of all this, made again from the files if lost
    tenants/<digest>/                  the same for each other tenant

Owns places, pins, quotas and eviction. Tenants share nothing but the disk: none can
evict, count or time what another one has. Files come and go only while the index is being
written, so that table and files change together; a process that dies in between leaves a
difference that the next listing repairs. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvnotes.errors import KVNotesError, SegmentFormatError, StorageError, TrustError
from kvnotes.store.atomic import make_folder, storage_errors, sync_folder, write_file
from kvnotes.store.checked import read_entry
from kvnotes.store.container import SUFFIX
from kvnotes.store.index import INDEX_NAME, Entry, Family, Index, Table
from kvnotes.store.locks import KeyLocks
from kvnotes.store.trust import NO_TRUST, Trust

SHARED = ""
"""The tenant whose segments everybody may read."""

Refused = Callable[[str, KVNotesError], None]
"""Told the key of a file that was refused, and why."""

_KEY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the disk tier may hold of each tenant.

    Args:
        max_nbytes: Bytes of each tenant that `quotas` does not name, the shared one included;
            None has no limit. It is no limit for all together: who is near that one could
            count what others have.
        quotas: Bytes by tenant.
    """

    max_nbytes: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int | None:
        """Return the quota of a tenant."""
        return self.quotas.get(tenant, self.max_nbytes)


class StoreFolder:
    """Segment files of one tenant.

    Args:
        base: The folder of the store; made, private to the user, when something is written.
        tenant: Whose files.
        max_nbytes: Bytes they may have; None has no limit.
        trust: Keys for signatures and encryption.
    """

    def __init__(
        self,
        base: Path,
        tenant: str = SHARED,
        *,
        max_nbytes: int | None = None,
        trust: Trust = NO_TRUST,
    ) -> None:
        self.tenant = tenant
        self.trust = trust
        self.max_nbytes = max_nbytes
        self.root = base if tenant == SHARED else base / "tenants" / tenant_folder(tenant)
        self.index = Index(self.root / INDEX_NAME)
        self.locks = KeyLocks(self.root / "locks")
        self.num_evicted = 0
        self._counted = False

    def path(self, key: str) -> Path:
        """Return the place of a segment's file.

        Raises:
            SegmentFormatError: Not a key: nothing else may name a file here.
        """
        if not is_key(key):
            raise SegmentFormatError(
                f"{key[:80]!r} is no key of a segment", hint="a key has 64 hex digits"
            )
        return self.root / "segments" / key[:2] / f"{key}{SUFFIX}"

    def has(self, key: str) -> bool:
        """Whether there is a file for a key."""
        return os.path.lexists(self.path(key))

    # -- what is there ---------------------------------------------------------------------

    def entries(self, refused: Refused = lambda key, error: None) -> list[Entry]:
        """Return the entries of all files, by name, version, variant and key.

        Files without an entry are read and entered, entries without a file removed; in a
        folder that cannot be written, only in what is returned.

        Args:
            refused: Told about each file that has no entry and gets none.
        """
        try:
            known = self.index.read(lambda table: table.entries())
        except StorageError:  # the files are the truth
            known = []
        files = self._keys_of_files()
        gone = {entry.key for entry in known} - files
        new = self._read_entries(files - {entry.key for entry in known}, refused)
        if not (gone or new):
            return known
        try:
            return self.index.write(lambda table: self._repair(table, gone, new))
        except StorageError:  # only the table lags behind
            left = [entry for entry in known if entry.key not in gone]
            return sorted([*left, *new], key=lambda e: (e.name, e.version, e.variant, e.key))

    def entry(self, key: str) -> Entry | None:
        """Return the entry of a file, None where there is none.

        Raises:
            SegmentFormatError: It has no entry yet, and is damaged.
            TrustError: It has no entry yet, and no trusted key signed it.
        """
        if not self.has(key):
            return None
        known = self.index.read(lambda table: table.get(key))
        if known is None:
            known = self._read_entry(key)
            if known is not None:
                self.index.write(lambda table: table.put(known))
        return known

    def touch(self, used: Mapping[str, float], *, wait: float) -> None:
        """Note when files were used, in the order of their use.

        Raises:
            StorageError: The index cannot be written, or it was not this one's turn.
        """
        if used:
            self.index.write(lambda table: table.touch(used.items()), wait=wait)

    # -- files that come and go ------------------------------------------------------------

    def make_room(self, key: str, nbytes: int, family: str) -> None:
        """Evict until a new file fits.

        Args:
            key: Its key; what the table says of a file that is gone is forgotten.
            nbytes: Its size, about.
            family: Stays.

        Raises:
            StorageError: It does not fit, whatever goes.
        """
        limit = self.max_nbytes
        if limit is None:
            return
        self._count_once()

        def evict(table: Table) -> int | None:
            if not self.has(key):
                table.delete([key])
            return self._fit(table, limit - nbytes, family)

        held = self.index.write(evict)
        if held is not None:
            raise self._too_small(nbytes, held)

    def enter(self, entry: Entry) -> None:
        """Enter a new file, after others came meanwhile: what is too much goes.

        Raises:
            StorageError: The others stay, and it goes itself.
        """

        def add(table: Table) -> int | None:
            table.put(entry)
            if self.max_nbytes is None:
                return None
            held = self._fit(table, self.max_nbytes, entry.family)
            if held is not None:
                self._unlink(table, [entry.key])
            return held

        held = self.index.write(add)
        if held is not None:
            raise self._too_small(entry.nbytes, held - entry.nbytes)

    def remove(self, keys: Collection[str]) -> int:
        """Remove files, and the pins of families that are gone then; return the bytes freed."""

        def remove(table: Table) -> int:
            families = {entry.family for key in keys if (entry := table.get(key)) is not None}
            freed = self._unlink(table, keys)
            left = {family.name for family in table.families()}
            for family in families - left:
                self.pin(family, False)
            return freed

        return self.index.write(remove)

    def put_aside(self, key: str, version: int) -> None:
        """Move a file out of the way, for a person to look at.

        Args:
            key: Its key.
            version: What `inode` said before it was opened. If it is another one by now,
                somebody else has put it aside and made a new one, which stays.
        """
        path, folder = self.path(key), self.root / "damaged"
        with self.locks.try_hold(key) as free:
            if not free or inode(path) != version:
                return
            make_folder(folder)
            with storage_errors(path), suppress(FileNotFoundError):
                path.replace(folder / f"{time.time_ns()}-{path.name}")
            self.index.write(lambda table: table.delete([key]))

    # -- pins and eviction -----------------------------------------------------------------

    def pin(self, family: str, pinned: bool) -> None:
        """Keep a family from being evicted, or no longer."""
        if not is_key(family):
            raise SegmentFormatError(
                f"{family[:80]!r} is no family of segments", hint="a family has 64 hex digits"
            )
        path = self.root / "pins" / family
        with storage_errors(path):
            if not pinned:
                path.unlink(missing_ok=True)
            elif not path.exists():
                write_file(path, b"")

    def pinned(self) -> set[str]:
        """Return the pinned families."""
        try:
            names = os.listdir(self.root / "pins")
        except FileNotFoundError:
            return set()
        return {name for name in names if is_key(name)}

    def evict_to(self, max_nbytes: int) -> list[str]:
        """Remove the least recently used families until no more than some bytes are left.

        Parts of sessions and what is pinned stay. Returns the keys that went.
        """
        self._count_once()

        def evict(table: Table) -> list[str]:
            families, _ = self._least_needed(table, max_nbytes)
            return self._evict(table, families)

        return self.index.write(evict)

    # -- inside ----------------------------------------------------------------------------

    def _fit(self, table: Table, max_nbytes: int, keep: str) -> int | None:
        """Evict until some bytes are left; if that cannot be, nothing, and return what stays."""
        families, left = self._least_needed(table, max_nbytes, keep)
        if left > max_nbytes:
            return left
        self._evict(table, families)
        return None

    def _least_needed(
        self, table: Table, max_nbytes: int, keep: str = ""
    ) -> tuple[list[Family], int]:
        """Which families go, the least recently used first, and how many bytes stay then."""
        left = table.nbytes()
        chosen: list[Family] = []
        if left > max_nbytes:
            stay = {*self.pinned(), keep}
            for family in table.families():
                if left <= max_nbytes:
                    break
                if family.name not in stay:
                    chosen.append(family)
                    left -= family.nbytes
        return chosen, left

    def _evict(self, table: Table, families: Collection[Family]) -> list[str]:
        gone = [key for family in families for key in family.keys]
        self._unlink(table, gone)
        self.num_evicted += len(gone)
        return gone

    def _unlink(self, table: Table, keys: Collection[str]) -> int:
        """Remove files, then their rows: whoever dies in between leaves rows, which age."""
        freed, folders = 0, set()
        for key in keys:
            path = self.path(key)
            with storage_errors(path), suppress(FileNotFoundError):
                size = path.lstat().st_size
                path.unlink()
                freed += size
                folders.add(path.parent)
        table.delete(keys)
        for folder in folders:
            with storage_errors(folder):
                sync_folder(folder)
        return freed

    def _count_once(self) -> None:
        """Before the first decision by size: enter what other processes left uncounted."""
        if not (self._counted and self.index.read(lambda table: table.complete)):
            files = self._keys_of_files()
            known = self.index.read(lambda table: table.keys())
            new = self._read_entries(files - known)
            self.index.write(lambda table: self._repair(table, known - files, new))
            self._counted = True

    def _repair(self, table: Table, gone: Collection[str], new: Collection[Entry]) -> list[Entry]:
        # a file may have come since the folder was read
        table.delete([key for key in gone if not self.has(key)])
        for entry in sorted(new, key=lambda e: e.used_at):
            if table.get(entry.key) is None and self.has(entry.key):
                table.put(entry)
        table.mark_complete()
        return table.entries()

    def _read_entries(
        self, keys: Collection[str], refused: Refused = lambda key, error: None
    ) -> list[Entry]:
        """Read the headers of files."""
        found = []
        for key in keys:
            try:
                entry = self._read_entry(key)
            except (SegmentFormatError, TrustError, StorageError) as error:
                refused(key, error)
            else:
                found += [] if entry is None else [entry]
        return found

    def _read_entry(self, key: str) -> Entry | None:
        path = self.path(key)
        version = inode(path)
        try:
            return read_entry(path, key, self.tenant, self.trust)
        except SegmentFormatError:
            with suppress(StorageError):
                self.put_aside(key, version)
            raise

    def _keys_of_files(self) -> set[str]:
        keys: set[str] = set()
        with suppress(FileNotFoundError), os.scandir(self.root / "segments") as folders:
            for folder in folders:
                if folder.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError), os.scandir(folder.path) as files:
                        names = (file.name for file in files if file.name.endswith(SUFFIX))
                        keys |= {name.removesuffix(SUFFIX) for name in names}
        return {key for key in keys if is_key(key)}

    def _too_small(self, nbytes: int, held: int) -> StorageError:
        return StorageError(
            f"{nbytes} more bytes do not fit into the {self.max_nbytes} that are allowed here; "
            f"{held} are pinned, in the same family, or parts of sessions",
            hint="raise the limit, unpin something, or store it as int8",
        )


def is_key(name: str) -> bool:
    """Whether a text is a digest in hex, as keys and families are."""
    return _KEY.fullmatch(name) is not None


def tenant_folder(tenant: str) -> str:
    """Return the name of a tenant's folder."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def inode(path: Path) -> int:
    """Return what tells a file from another one of its name; 0 where there is none."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0

"""The disk tier: one folder of segment files that many processes share.

    segments/ab/<key>.kv.safetensors   the files, named by their content key
    pins/<family>                      what is never evicted: empty files
    texts/<sha256>                     texts that families of variants have in common
    partial/<key>                      downloads on their way
    damaged/                           files that were refused, put aside
    locks/<3 digits>.lock              one process at a time for each group of keys
    index.sqlite                       a table of all this, made again from the files if lost

Owns places, eviction, pins and quotas. A file that is mapped by somebody stays readable
after it was evicted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from kvnotes.errors import SegmentFormatError, StorageError, TrustError
from kvnotes.segment import KVSegment
from kvnotes.store.atomic import make_folder, remove_stale, storage_errors, sync_folder, write_file
from kvnotes.store.header import Provenance, SegmentKind, digest_text
from kvnotes.store.index import Entry, Index
from kvnotes.store.opening import OpenFile, VerifiedFiles, open_segment
from kvnotes.store.saving import SUFFIX, save_segment
from kvnotes.store.trust import NO_TRUST, Trust

_KEY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a disk tier may hold.

    Args:
        max_nbytes: Bytes of all files; None has no limit.
        tenant_nbytes: Bytes of each tenant that `quotas` does not name; None has no limit.
        quotas: Bytes by tenant.
    """

    max_nbytes: int | None = None
    tenant_nbytes: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int | None:
        """Return the quota of a tenant."""
        return self.quotas.get(tenant, self.tenant_nbytes)


class DiskTier:
    """Segment files below one folder.

    Args:
        root: The folder; made on first use, private to the user.
        limits: What it may hold.
        trust: Keys for signatures and encryption.
        versions: Names and versions of what computes, for the headers of new files.
    """

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits | None = None,
        trust: Trust = NO_TRUST,
        versions: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.root = root
        self.limits = limits or Limits()
        self.trust = trust
        self._versions = versions
        self._seen = VerifiedFiles()
        make_folder(root)
        self.index = Index(root / "index.sqlite")
        self.num_evicted = 0

    def path(self, key: str) -> Path:
        """Return the place of a segment's file.

        Raises:
            SegmentFormatError: Not a key: nothing else may name a file here.
        """
        if not _KEY.fullmatch(key):
            raise SegmentFormatError(
                f"{key[:80]!r} is no key of a segment", hint="a key has 64 hex digits"
            )
        return self.root / "segments" / key[:2] / f"{key}{SUFFIX}"

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process and thread at a time make the segments of a group of keys."""
        folder = self.root / "locks"
        make_folder(folder)
        with storage_errors(folder), FileLock(folder / f"{key[:3]}.lock"):
            yield

    # -- files -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether there is a file for a key."""
        return self.path(key).exists()

    def open(self, key: str, *, verify: bool = True) -> OpenFile | None:
        """Open and verify a file; None where there is none.

        Raises:
            SegmentFormatError: It is damaged, or holds another segment; it was put aside.
            TrustError: No trusted key signed it, or its encryption key is not there.
        """
        path = self.path(key)
        if not os.path.lexists(path):
            return None
        try:
            opened = open_segment(path, trust=self.trust)
            if opened.header.key != key:
                raise SegmentFormatError(
                    f"{path} holds the segment {opened.header.key[:12]}, not that of its name",
                    hint="the file was renamed or swapped; compile the segment again",
                )
            if verify:
                opened.verify(self._seen)
        except SegmentFormatError:
            if not os.path.lexists(path):  # evicted by another process meanwhile
                return None
            self.put_aside(key)
            raise
        return opened

    def save(
        self,
        key: str,
        segment: KVSegment,
        *,
        kind: SegmentKind,
        tenant: str,
        provenance: Provenance,
        int8: bool,
    ) -> Entry:
        """Write a file and make room for it.

        Raises:
            StorageError: The disk is full, or the file alone is larger than the quota.
        """
        path = self.path(key)
        nbytes = segment.num_tokens * segment.identity.spec.nbytes_per_token(1)
        if not int8:
            nbytes = segment.nbytes
        self._make_room(tenant, nbytes, provenance.family or key)
        header = save_segment(
            path,
            segment,
            kind=kind,
            tenant=tenant,
            provenance=provenance,
            int8=int8,
            versions=self._versions,
            trust=self.trust,
        )
        assert header.key == key, "the name of a file is its content key"
        entry = Entry.of(header, path.stat().st_size, time.time())
        self.index.add([entry])
        return entry

    def adopt(self, key: str, *, verify: bool) -> Entry | None:
        """Enter a file that came by other ways: a download, or a process that died.

        Args:
            key: Its name.
            verify: Check its digests now, and not when it is used.
        """
        opened = self.open(key, verify=verify)
        if opened is None:
            return None
        facts = opened.path.stat()
        entry = Entry.of(opened.header, facts.st_size, facts.st_mtime)
        self._make_room(entry.tenant, entry.nbytes, entry.family)
        self.index.add([entry])
        return entry

    def remove(self, keys: list[str]) -> int:
        """Remove files; return the number of bytes set free."""
        freed, folders = 0, set()
        self.index.remove(keys)
        for key in keys:
            path = self.path(key)
            with storage_errors(path), suppress(FileNotFoundError):
                size = path.lstat().st_size
                path.unlink()
                freed += size
                folders.add(path.parent)
        for folder in folders:
            sync_folder(folder)
        return freed

    def put_aside(self, key: str) -> None:
        """Move a file out of the way, for a person to look at."""
        path, folder = self.path(key), self.root / "damaged"
        make_folder(folder)
        with storage_errors(path), suppress(FileNotFoundError):
            path.replace(folder / f"{time.time_ns()}-{path.name}")
        self.index.remove([key])

    # -- what is there ---------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return all entries; files without one are entered, entries without a file removed."""
        self.reconcile()
        return self.index.entries()

    def reconcile(self, refused: Callable[[str], None] = lambda reason: None) -> None:
        """Bring the index in line with the files.

        Args:
            refused: Told the reason of every file that was not entered.
        """
        files, known = self._file_keys(), self.index.keys()
        if known - files:
            # a file may have been written since the folder was read
            self.index.remove([key for key in known - files if not self.has(key)])
        for key in files - known:
            try:
                self.adopt(key, verify=False)
            except (SegmentFormatError, TrustError) as error:
                refused(error.message)

    def _file_keys(self) -> set[str]:
        keys = set()
        with suppress(FileNotFoundError):
            for folder in os.scandir(self.root / "segments"):
                if folder.is_dir(follow_symlinks=False):
                    names = (entry.name for entry in os.scandir(folder.path))
                    keys |= {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        return {key for key in keys if _KEY.fullmatch(key)}

    # -- pins and eviction -----------------------------------------------------------------

    def pin(self, family: str, pinned: bool) -> None:
        """Keep a family from being evicted, or no longer."""
        path = self.root / "pins" / family
        if pinned:
            write_file(path, b"")
        else:
            with storage_errors(path):
                path.unlink(missing_ok=True)

    def pinned(self) -> set[str]:
        """Return the pinned families."""
        try:
            names = os.listdir(self.root / "pins")
        except FileNotFoundError:
            return set()
        return {name for name in names if _KEY.fullmatch(name)}

    def evict_to(self, max_nbytes: int, tenant: str | None, keep: str = "") -> list[str]:
        """Remove the least recently used families until no more than some bytes are left.

        Args:
            max_nbytes: Bytes that may stay.
            tenant: Whose files count, and may go; None counts all.
            keep: A family that stays.

        Returns:
            The keys that went.
        """
        total, gone = self.index.nbytes(tenant), []
        pinned = self.pinned() | {keep}
        for family, nbytes in self.index.families(tenant):
            if total <= max_nbytes:
                break
            if family not in pinned:
                members = self.index.members(family)
                self.remove(members)
                gone += members
                total -= nbytes
        self.num_evicted += len(gone)
        return gone

    def _make_room(self, tenant: str, nbytes: int, family: str) -> None:
        """Evict until some more bytes fit; only files of the same tenant go.

        No tenant can push another one's files out, and learn from it what those are.

        Raises:
            StorageError: They do not fit, whatever goes.
        """
        quota, most = self.limits.of(tenant), self.limits.max_nbytes
        own = self.index.nbytes(tenant)
        allowed = quota
        if most is not None:
            left = most - (self.index.nbytes() - own)
            allowed = left if quota is None else min(quota, left)
        if allowed is None or own + nbytes <= allowed:
            return
        if nbytes <= allowed:
            self.evict_to(allowed - nbytes, tenant, keep=family)
            own = self.index.nbytes(tenant)
        if own + nbytes > allowed:
            raise StorageError(
                f"{nbytes} more bytes do not fit into the {max(allowed, 0)} that tenant "
                f"{tenant!r} may have here; {own} of them are pinned or in the same family",
                hint="raise the limit, unpin something, or store it as int8",
            )

    # -- texts and tidying -----------------------------------------------------------------

    def keep_text(self, text: str) -> str:
        """Store a text once; return its digest."""
        digest = digest_text(text)
        path = self.root / "texts" / digest
        if not path.exists():
            write_file(path, text.encode("utf-8", "surrogatepass"))
        return digest

    def text(self, digest: str) -> str | None:
        """Return a stored text whose digest still fits."""
        path = self.root / "texts" / digest
        if not _KEY.fullmatch(digest) or not path.is_file():
            return None
        text = path.read_bytes().decode("utf-8", "surrogatepass")
        return text if digest_text(text) == digest else None

    def tidy(self) -> int:
        """Remove what dead processes left and what was put aside; return the bytes set free."""
        folders = [self.root, *(self.root / name for name in ("pins", "texts", "partial"))]
        with suppress(FileNotFoundError):
            folders += [Path(entry.path) for entry in os.scandir(self.root / "segments")]
        freed = sum(remove_stale(folder) for folder in folders)
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.root / "damaged"):
                freed += entry.stat(follow_symlinks=False).st_size
                os.unlink(entry.path)
        return freed

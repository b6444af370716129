"""The disk tier of one tenant: segments to files and back.

Owns opening and verifying, saving, taking in what was downloaded, and the texts that
families have in common; `folder` owns the places. A file that is mapped by somebody stays
readable after it was evicted.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.store.atomic import make_folder, storage_errors, sync_folder
from kvnotes.store.checked import entry_of, open_checked
from kvnotes.store.folder import SHARED, StoreFolder, inode, is_key
from kvnotes.store.header import Provenance, SegmentKind, digest_text
from kvnotes.store.index import Entry
from kvnotes.store.trust import NO_TRUST, Trust
from kvnotes.store.verified import VerifiedFiles

if TYPE_CHECKING:  # with torch: listing takes none
    from kvnotes.segment import KVSegment
    from kvnotes.store.opening import OpenFile
    from kvnotes.store.records import Records

FLUSH_SECONDS = 30.0
"""How often the index is told what was used; between, other processes may evict by older news."""


class DiskTier(StoreFolder):
    """Segment files of one tenant, and how to make and open them.

    Args:
        base: The folder of the store; made, private to the user, when something is written.
        tenant: Whose files.
        max_nbytes: Bytes they may have; None has no limit.
        trust: Keys for signatures and encryption.
        versions: Names and versions of what computes, for the headers of new files.
        seen: Which files this process has verified.
    """

    def __init__(
        self,
        base: Path,
        tenant: str = SHARED,
        *,
        max_nbytes: int | None = None,
        trust: Trust = NO_TRUST,
        versions: tuple[tuple[str, str], ...] = (),
        seen: VerifiedFiles | None = None,
    ) -> None:
        super().__init__(base, tenant, max_nbytes=max_nbytes, trust=trust)
        self._versions = versions
        self._seen = seen or VerifiedFiles()
        self._used: dict[str, float] = {}
        self._flushed_at = time.monotonic()

    # -- reading ---------------------------------------------------------------------------

    def open(self, key: str, *, verify: bool = True) -> OpenFile | None:
        """Open and verify a file; None where there is none.

        Raises:
            SegmentFormatError: It is damaged, or holds another segment; it was put aside.
            TrustError: No trusted key signed it, or its encryption key is not there.
            StorageError: The system cannot open it now.
        """
        path = self.path(key)
        version = inode(path)
        try:
            opened = open_checked(path, key, self.tenant, self.trust)
            if opened is not None and verify:
                opened.verify(self._seen)
        except SegmentFormatError:
            with suppress(StorageError):  # a folder that cannot be written keeps it
                self.put_aside(key, version)
            raise
        return opened

    def used(self, key: str) -> None:
        """Note that a segment was used; the index is told now and then, many uses at once."""
        self._used.pop(key, None)  # to the end
        self._used[key] = time.time()
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def flush(self, *, wait: float = 0.0) -> None:
        """Tell the index what was used; if it cannot be written now, later."""
        self._flushed_at = time.monotonic()
        used = dict(self._used)
        with suppress(StorageError):
            self.touch(used, wait=wait)
            for key, at in used.items():
                if self._used.get(key) == at:
                    self._used.pop(key, None)

    # -- writing ---------------------------------------------------------------------------

    def save(
        self,
        key: str,
        segment: KVSegment,
        *,
        kind: SegmentKind,
        provenance: Provenance,
        int8: bool,
        pinned: bool = False,
    ) -> tuple[Entry, bool]:
        """Write a file and make room for it, unless it is there.

        The text of a family of variants is not written into the file, but once beside it.

        Returns:
            Its entry, and whether it was written.

        Raises:
            SegmentFormatError: The segment cannot be stored.
            TrustError: A file is there that no trusted key signed; it stays.
            StorageError: The disk is full, or the file does not fit into the limit.
        """
        with self.locks.hold(key):
            with suppress(SegmentFormatError):  # it was put aside
                known = None if self.open(key) is None else self.entry(key)
                if known is not None:
                    self.used(key)
                    if pinned:
                        self.pin(known.family, True)
                    if kind == "run":  # a session is about to need it: it is no leftover
                        self.flush(wait=1.0)
                    return known, False
            family = provenance.family or key
            self.flush(wait=1.0)
            self.make_room(key, _file_nbytes(segment, int8=int8), family)
            if provenance.family and provenance.text:
                self.keep_text(provenance.text)
                provenance = provenance.model_copy(update={"text": ""})
            new_pin = pinned and family not in self.pinned()
            try:
                if pinned:  # before there is anything to evict
                    self.pin(family, True)
                entry = self._write(key, segment, kind, provenance, int8=int8)
            except BaseException:
                if new_pin:
                    with suppress(StorageError):
                        self.pin(family, False)
                raise
            return entry, True

    def receive(self, key: str, partial: Path) -> Entry:
        """Take in a downloaded file, verified before it gets its name.

        Args:
            key: What it must hold.
            partial: Where it is; gone afterwards, whatever happens.

        Raises:
            SegmentFormatError: It is damaged, or holds another segment.
            TrustError: No trusted key signed it.
            StorageError: It does not fit into the limit.
        """
        path = self.path(key)
        try:
            opened = open_checked(partial, key, self.tenant, self.trust)
            if opened is None:
                raise StorageError(f"{partial} is gone", hint="pull it again")
            opened.verify()
            entry = entry_of(opened.header, opened.version.nbytes, time.time())
            self.make_room(key, entry.nbytes, entry.family)
            make_folder(path.parent)
            with storage_errors(path):
                os.replace(partial, path)
                sync_folder(path.parent)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self.enter(entry)
        return entry

    # -- texts -----------------------------------------------------------------------------

    def keep_text(self, text: str) -> str:
        """Store a text once; return its digest."""
        digest = digest_text(text)
        path = self._texts.path(digest)
        with storage_errors(path):
            try:
                os.utime(path)  # somebody needs it from now on: it is no leftover
            except FileNotFoundError:
                self._texts.write(digest, text.encode("utf-8", "surrogatepass"))
        return digest

    def text(self, digest: str) -> str | None:
        """Return a stored text; None if it is not there, or is another one.

        Raises:
            TrustError: It is encrypted, and its key is not here.
        """
        content = self._texts.read(digest) if is_key(digest) else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return None
        return content.decode("utf-8", "surrogatepass")

    @property
    def _texts(self) -> Records:
        from kvnotes.store.records import Records

        return Records(self.root / "texts", self.trust, "text", suffix="")

    def _write(
        self,
        key: str,
        segment: KVSegment,
        kind: SegmentKind,
        provenance: Provenance,
        *,
        int8: bool,
    ) -> Entry:
        from kvnotes.store.saving import save_segment

        path = self.path(key)
        header = save_segment(
            path,
            segment,
            kind=kind,
            tenant=self.tenant,
            provenance=provenance,
            int8=int8,
            versions=self._versions,
            trust=self.trust,
        )
        assert header.key == key, "the name of a file is its content key"
        with storage_errors(path):
            entry = entry_of(header, path.stat().st_size, time.time())
        self.enter(entry)
        return entry


def _file_nbytes(segment: KVSegment, *, int8: bool) -> int:
    if not int8:
        return segment.nbytes
    return segment.num_tokens * segment.identity.spec.nbytes_per_token(1)

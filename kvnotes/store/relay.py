"""Between the disk and the remote tier: what is fetched, when, and what is not asked for.

Owns the patience of a session that could compile instead: what was not there, or did not
work, is not tried again for a minute, and a server that does not answer is left alone.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvnotes.errors import SegmentFormatError, StorageError, TrustError
from kvnotes.store.container import SUFFIX
from kvnotes.store.disk import DiskTier
from kvnotes.store.folder import SHARED, Refused, tenant_folder
from kvnotes.store.patience import PATIENT, SERVING, Patience
from kvnotes.store.remote import Remote, RemoteFile

ABSENT_SECONDS = 60.0
"""How long a session does not ask again for what was not there, or could not be had."""

MAX_ABSENT = 10_000
"""Keys that are remembered as absent before the old ones are forgotten."""


def remote_path(key: str, tenant: str = SHARED) -> str:
    """Return where a segment lies below the URL of a remote tier."""
    return f"{remote_folder(tenant)}segments/{key[:2]}/{key}{SUFFIX}"


def remote_folder(tenant: str) -> str:
    """Return what the paths of a tenant's files begin with below that URL."""
    return "" if tenant == SHARED else f"tenants/{tenant_folder(tenant)}/"


class Relay:
    """Carries files between the disk tiers of a store and its remote tier.

    Args:
        remote: The remote tier.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._absent: dict[str, float] = {}
        self._down_since = -ABSENT_SECONDS

    def push(self, disk: DiskTier, key: str) -> bool:
        """Upload a file; False if it was there already.

        Raises:
            StorageError: The remote tier takes no files, or the connection broke for good.
        """
        return self.remote.upload(disk.path(key), remote_path(key, disk.tenant))

    def pull(self, disk: DiskTier, key: str) -> bool:
        """Download a file, verify and keep it; False if the remote tier does not have it.

        Raises:
            StorageError: The connection broke for good, or it does not fit.
            SegmentFormatError: What came is damaged, or another segment; nothing of it stays.
            TrustError: No trusted key signed it; nothing of it stays.
        """
        if disk.has(key):
            return True
        file = self.remote.find(remote_path(key, disk.tenant))
        if file is None:
            return False
        with disk.locks.hold(key):
            if not disk.has(key):
                disk.receive(key, self._download(disk, key, file, PATIENT))
        return True

    def try_pull(self, disk: DiskTier, key: str, refused: Refused) -> bool:
        """Download a file for a session: once a minute at most, and never for long.

        Args:
            disk: Where it is kept.
            key: What is wanted.
            refused: Told what could not be had, and why.

        Returns:
            Whether it is on the disk now. Not if somebody else is just fetching or making it.
        """
        now = time.monotonic()
        if now - self._down_since < ABSENT_SECONDS:
            return False
        if now - self._absent.get(key, -ABSENT_SECONDS) < ABSENT_SECONDS:
            return False
        self._note_absent(key, now)
        try:
            file = self.remote.find(remote_path(key, disk.tenant), SERVING)
            if file is None:
                return False
            with disk.locks.try_hold(key) as free:
                if not free or disk.has(key):
                    return disk.has(key)
                partial = self._download(disk, key, file, SERVING)
                return self._receive(disk, key, partial, refused)
        except StorageError as error:
            self._down_since = time.monotonic()
            refused(key, error)
            return False

    def _download(self, disk: DiskTier, key: str, file: RemoteFile, patience: Patience) -> Path:
        partial = disk.root / "partial" / key
        self.remote.download(file, partial, patience)
        return partial

    def _receive(self, disk: DiskTier, key: str, partial: Path, refused: Refused) -> bool:
        try:
            disk.receive(key, partial)
        except (SegmentFormatError, TrustError, StorageError) as error:
            refused(key, error)
            return False
        return True

    def _note_absent(self, key: str, now: float) -> None:
        if len(self._absent) >= MAX_ABSENT:
            fresh = {k: at for k, at in self._absent.items() if now - at < ABSENT_SECONDS}
            self._absent = fresh
        self._absent[key] = now

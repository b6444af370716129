"""The tiers of a store, as one tenant sees them.

Owns `Stock`, what all views of a store share, and `Tiers`: memory, disk and remote in the
order in which they are asked, for a tenant and the shared one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.plan import Run
from kvnotes.spec import ModelIdentity
from kvnotes.store.disk import DiskTier
from kvnotes.store.folder import SHARED, Limits
from kvnotes.store.header import DTYPE_CODES, SegmentHeader, content_key
from kvnotes.store.index import Entry
from kvnotes.store.locks import KeyLocks
from kvnotes.store.memory import MemoryTier
from kvnotes.store.relay import Relay
from kvnotes.store.remote import Remote
from kvnotes.store.tally import Tally
from kvnotes.store.trust import Trust
from kvnotes.store.verified import VerifiedFiles

if TYPE_CHECKING:
    from kvnotes.segment import KVSegment

Place = tuple[str, str]
"""A tenant, and a content key: where a segment may be."""


class Stock:
    """What all views of one store share.

    Args:
        memory: The memory tier.
        remote: The remote tier, if there is one.
        root: Folder of the disk tiers; None has none.
        limits: What they may hold.
        trust: Keys for signatures and encryption.
        versions: Names and versions of what computes, for the headers of new files.
        accept_inexact: K/V that were rounded are found as well.
    """

    def __init__(
        self,
        memory: MemoryTier,
        remote: Remote | None,
        root: Path | None,
        limits: Limits,
        trust: Trust,
        versions: tuple[tuple[str, str], ...],
        accept_inexact: bool,
    ) -> None:
        self.memory = memory
        self.relay = None if remote is None else Relay(remote)
        self.accept_inexact = accept_inexact
        self._root = None if root is None else Path(root)
        self._limits = limits
        self._trust = trust
        self._versions = versions
        self._seen = VerifiedFiles()
        self._disks: dict[str, DiskTier] = {}
        self._tallies: dict[str, Tally] = {}
        self._lock = Lock()
        self._locks = KeyLocks()

    def disk(self, tenant: str) -> DiskTier | None:
        """Return the disk tier of a tenant."""
        if self._root is None:
            return None
        found = self._disks.get(tenant)
        if found is None:
            new = DiskTier(
                self._root,
                tenant,
                max_nbytes=self._limits.of(tenant),
                trust=self._trust,
                versions=self._versions,
                seen=self._seen,
            )
            with self._lock:
                found = self._disks.setdefault(tenant, new)
        return found

    def tally(self, tenant: str) -> Tally:
        """Return the counters and faults of a tenant."""
        with self._lock:
            return self._tallies.setdefault(tenant, Tally())

    def locks(self, tenant: str) -> KeyLocks:
        """Return the locks for making a tenant's segments."""
        disk = self.disk(tenant)
        return self._locks if disk is None else disk.locks


class Tiers:
    """Where one tenant's segments, and the shared ones, are looked for.

    Args:
        stock: What all views of the store share.
        tenant: Whose view this is.
    """

    def __init__(self, stock: Stock, tenant: str) -> None:
        self.tenant = tenant
        self.readers = (tenant, SHARED) if tenant != SHARED else (SHARED,)
        """Tenants whose segments may be read, the own one first."""
        self.tally = stock.tally(tenant)
        self.disk = stock.disk(tenant)
        self.locks = stock.locks(tenant)
        self._stock = stock
        self._memory = stock.memory
        self._relay = stock.relay

    def places(self, identity: ModelIdentity, run: Run) -> Iterator[list[Place]]:
        """Yield where K/V of a run may be found; the exact ones first, others if accepted."""
        forms = [run.digest]
        if self._stock.accept_inexact:
            dtype = identity.spec.dtype
            others = [f"from:{name}" for name in DTYPE_CODES if name != dtype]
            for altered in (*others, f"int8:{dtype}"):
                forms.append(Run(run.token_ids, run.start, run.context, altered).digest)
        for digest in forms:
            yield [
                (tenant, content_key("segment", tenant, identity.fingerprint, digest))
                for tenant in self.readers
            ]

    def find(self, places: Sequence[Place]) -> KVSegment | None:
        """Return the first segment that is at one of some places, the nearest tier first."""
        return self.local(places) or self._distant(places)

    def local(self, places: Sequence[Place]) -> KVSegment | None:
        """Return the first segment that is in memory or on the disk."""
        for tenant, key in places:
            found = self._memory.get(key, (tenant,))
            if found is not None:
                self.tally.count("memory_hits")
                disk = self._stock.disk(tenant)
                if disk is not None:
                    disk.used(key)
                return found
        for tenant, key in places:
            found = self._from_disk(tenant, key)
            if found is not None:
                self.tally.count("disk_hits")
                return found
        return None

    def has(self, place: Place) -> bool:
        """Whether a segment is in memory or on the disk; it is not read."""
        tenant, key = place
        disk = self._stock.disk(tenant)
        return self._memory.has(key, tenant) or (disk is not None and disk.has(key))

    def holder(self, key: str) -> DiskTier | None:
        """Return the disk tier that has a file which this tenant may read."""
        return next((disk for disk in self.disks if disk.has(key)), None)

    @property
    def disks(self) -> list[DiskTier]:
        """The disk tiers that this tenant may read, the own one first."""
        found = (self._stock.disk(tenant) for tenant in self.readers)
        return [disk for disk in found if disk is not None]

    # -- what a tenant does with its own ---------------------------------------------------

    def own(self, key: str) -> Entry:
        """Return the entry of a file of this tenant.

        Raises:
            StorageError: It is not there; one that is somebody else's is as good as missing.
        """
        entry = None if self.disk is None else self.disk.entry(key)
        if entry is None:
            raise missing(key)
        return entry

    def pin(self, key: str, pinned: bool) -> None:
        """Keep a segment and its family from being evicted, or no longer."""
        members = [key]
        if self.disk is not None:
            family = self.own(key).family
            self.disk.pin(family, pinned)
            members = self.disk.index.read(lambda table: table.members(family))
        elif not self._memory.has(key, self.tenant):
            raise missing(key)
        for member in members:
            self._memory.pin(member, pinned)

    def remove(self, keys: Sequence[str]) -> int:
        """Remove segments, all or none; return the bytes set free on the disk."""
        for key in keys:
            if self.disk is not None:
                self.own(key)
            elif not self._memory.has(key, self.tenant):
                raise missing(key)
        for key in keys:
            self._memory.remove(key, self.tenant)
        return 0 if self.disk is None else self.disk.remove(keys)

    # -- the remote tier -------------------------------------------------------------------

    def push(self, keys: Iterable[str], told: Callable[[str], None]) -> int:
        """Upload files that the remote tier does not have; return how many."""
        num_pushed = 0
        for key in keys:
            disk = self.holder(key)
            if disk is None or self._relay is None:
                raise missing(key)
            told(key)
            num_pushed += self._relay.push(disk, key)
        self.tally.count("pushed", num_pushed)
        return num_pushed

    def pull(self, key: str) -> bool:
        """Download a file, verify and keep it; False if the remote tier does not have it."""
        if self.holder(key) is not None:
            return True
        relay = self._relay
        found = relay is not None and any(relay.pull(disk, key) for disk in self.disks)
        self.tally.count("pulled", found)
        return found

    # -- inside ----------------------------------------------------------------------------

    def _distant(self, places: Sequence[Place]) -> KVSegment | None:
        for tenant, key in places:
            disk = self._stock.disk(tenant)
            if self._relay is None or disk is None:
                return None
            if self._relay.try_pull(disk, key, self.tally.refuse):
                self.tally.count("pulled")
                found = self._from_disk(tenant, key)
                if found is not None:
                    self.tally.count("remote_hits")
                    return found
        return None

    def _from_disk(self, tenant: str, key: str) -> KVSegment | None:
        disk = self._stock.disk(tenant)
        if disk is None:
            return None
        try:
            opened = disk.open(key)
        except (SegmentFormatError, StorageError) as error:
            self.tally.refuse(key, error)
            return None
        if opened is None or not self._may_splice(opened.header):
            return None
        segment = opened.segment()
        family = opened.header.provenance.family or key
        self._memory.put(key, tenant, segment, pinned=family in disk.pinned())
        disk.used(key)
        return segment

    def _may_splice(self, header: SegmentHeader) -> bool:
        return header.kind == "segment" and (self._stock.accept_inexact or not header.altered)


def missing(key: str) -> StorageError:
    """Return the error for a segment that is not there, or not for the one who asks."""
    return StorageError(f"no segment {key[:12]} is in the store", hint="kvnotes library ls")

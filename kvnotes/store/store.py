"""The store: compiled segments in memory, on a disk, and anywhere else.

Owns `KVStore`: the order of the tiers, one compile for many askers, and who may see what.
Knows no model: what is not there is compiled by a function that is given.

    find ->  memory  ->  disk (verified, mapped)  ->  remote (downloaded, verified)  -> compile
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.plan import Run, check_compiled
from kvnotes.spec import ModelIdentity
from kvnotes.store.disk import DiskTier
from kvnotes.store.folder import SHARED, Limits
from kvnotes.store.header import (
    Provenance,
    SegmentHeader,
    SegmentKind,
    content_key,
)
from kvnotes.store.index import Entry
from kvnotes.store.memory import MemoryTier
from kvnotes.store.prune import Pruned, Rule, prune
from kvnotes.store.remote import Remote
from kvnotes.store.tally import Counters, Fault
from kvnotes.store.tiers import Stock, Tiers
from kvnotes.store.trust import NO_TRUST, Trust

if TYPE_CHECKING:
    from kvnotes.segment import KVSegment
    from kvnotes.store.records import Records

ProvenanceSource = Provenance | Callable[[], Provenance] | None
"""The text something is made from, or how to find out where that takes time."""


class KVStore:
    """Compiled segments, by content key.

    Args:
        root: Folder of the disk tier; None keeps everything in memory.
        memory_nbytes: Bytes of K/V kept in memory for each tenant; None keeps all.
        limits: What the disk tier may hold.
        remote: URL of a tier that is asked when the disk has nothing; see `push`.
        trust: Keys for signatures and encryption.
        tenant: Whose segments are made and found; "" makes shared ones. Others see their own
            and the shared ones, and learn nothing about the rest.
        versions: Names and versions of what computes, for the headers of new files.
        accept_inexact: `find` may return K/V that were rounded, where no exact ones are.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        memory_nbytes: int | None = None,
        limits: Limits | None = None,
        remote: str | Remote | None = None,
        trust: Trust = NO_TRUST,
        tenant: str = SHARED,
        versions: tuple[tuple[str, str], ...] = (),
        accept_inexact: bool = False,
    ) -> None:
        self.memory = MemoryTier(memory_nbytes)
        self.remote = Remote(remote) if isinstance(remote, str) else remote
        parts = self.memory, self.remote, root, limits or Limits(), trust, versions
        self._stock = Stock(*parts, accept_inexact)
        self._tiers = Tiers(self._stock, tenant)

    def for_tenant(self, tenant: str) -> KVStore:
        """Return the same store as another tenant sees it."""
        other = copy(self)
        other._tiers = Tiers(self._stock, tenant)
        return other

    @property
    def tenant(self) -> str:
        """Whose segments are made here."""
        return self._tiers.tenant

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier of this tenant."""
        return self._tiers.disk

    @property
    def readers(self) -> tuple[str, ...]:
        """Tenants whose segments are found here, the own one first."""
        return self._tiers.readers

    # -- finding ---------------------------------------------------------------------------

    def find(self, identity: ModelIdentity, run: Run) -> KVSegment | None:
        """Return the compiled segment of a run: this tenant's own, or a shared one.

        The exact one is looked for first; others only if the store accepts inexact ones.

        Raises:
            TrustError: A file is there and no trusted key signed it, or its key is not there.
        """
        for places in self._tiers.places(identity, run):
            found = self._tiers.find(places)
            if found is not None:
                return found
        self._tiers.tally.count("misses")
        return None

    def has(self, identity: ModelIdentity, run: Run) -> str | None:
        """Return the key under which `find` would return a run, without reading it."""
        for places in self._tiers.places(identity, run):
            for place in places:
                if self._tiers.has(place):
                    return place[1]
        return None

    def get(self, key: str) -> KVSegment | None:
        """Return a compiled segment by its key; None if it is not there, or not for you.

        A damaged file is put aside and noted in `faults`; it is as good as missing.

        Raises:
            TrustError: No trusted key signed it, or its encryption key is not there.
        """
        return self._tiers.find([(tenant, key) for tenant in self._tiers.readers])

    def get_or_compile(
        self,
        identity: ModelIdentity,
        run: Run,
        compile: Callable[[], KVSegment],
        provenance: ProvenanceSource = None,
        *,
        strict: bool = False,
    ) -> KVSegment:
        """Return a compiled segment; whoever asks at the same time waits for one compile.

        Args:
            identity: The model.
            run: What its K/V are the K/V of.
            compile: Called if nobody has it.
            provenance: The text it is made from, or a function that returns it.
            strict: Raise where it cannot be written to the disk. Else that is noted in `faults`,
                and it is in memory all the same.

        Raises:
            StorageError: With `strict`, it could not be written.
            SegmentFormatError: With `strict`, the format has no place for it.
        """
        found = self.find(identity, run)
        if found is not None:
            return found
        key = content_key("segment", self.tenant, identity.fingerprint, run.digest)
        with self._tiers.locks.hold(key):
            found = self._tiers.local([(self.tenant, key)])
            if found is not None:
                return found
            segment = compile()
            self._tiers.tally.count("compiled")
            try:
                self.put(segment, provenance() if callable(provenance) else provenance)
            except (StorageError, SegmentFormatError) as error:
                self._tiers.tally.refuse(key, error)
                if strict:
                    raise
            return segment

    # -- adding ----------------------------------------------------------------------------

    def put(
        self,
        segment: KVSegment,
        provenance: Provenance | None = None,
        *,
        int8: bool = False,
        pinned: bool = False,
    ) -> Entry | None:
        """Keep a compiled segment in memory and on the disk.

        Args:
            segment: It saw its own declared preamble and nothing else.
            provenance: The text it was made from; that of a family is stored once.
            int8: Store it in 8 bits: a file of its own, beside an exact one.
            pinned: Never evict it.

        Returns:
            The entry of its file; None without a disk tier.

        Raises:
            LineageError: It saw more than its preamble: a slice of a conversation.
            SegmentFormatError: The format has no place for it. It is in memory then.
            TrustError: A file is there that no trusted key signed; it stays.
            StorageError: The disk is full, or the limit too small. It is in memory then.
        """
        source = provenance or Provenance()
        check_compiled(source.name or "without a name", segment.run, segment.preamble_ids)
        key = self._key_of(segment, int8=int8)
        disk = self.disk
        if not int8:
            fixed = pinned or (disk is not None and (source.family or key) in disk.pinned())
            self.memory.put(key, self.tenant, segment, pinned=fixed)
        if disk is None:
            return None
        entry, written = disk.save(
            key, segment, kind="segment", provenance=source, int8=int8, pinned=pinned
        )
        self._tiers.tally.count("stored", written)
        return entry

    def keep_text(self, text: str) -> None:
        """Keep a text that several files stand for, once."""
        if self.disk is not None:
            self.disk.keep_text(text)

    def text(self, header: SegmentHeader) -> str | None:
        """Return the text of a segment; None where it is not here."""
        source = header.provenance
        own = (disk for disk in self._tiers.disks if disk.tenant == header.tenant)
        disk = None if source.text else next(own, None)
        return source.text or (disk.text(source.text_sha256) if disk is not None else None)

    def put_run(self, segment: KVSegment) -> str:
        """Keep a part of a session on the disk; return its key. It is never spliced elsewhere.

        Raises:
            StorageError: There is no disk tier, or it is full.
        """
        key = self._key_of(segment, "run")
        disk = self._disk("save a session")
        _, written = disk.save(key, segment, kind="run", provenance=Provenance(), int8=False)
        self._tiers.tally.count("stored", written)
        return key

    def get_run(self, key: str, run: Run) -> KVSegment:
        """Return a part of a session.

        Args:
            key: What `put_run` returned.
            run: The run with its whole lineage, which the file must hold.

        Raises:
            StorageError: It is not there.
            SegmentFormatError: It is damaged, or another one.
        """
        opened = self._disk("load a session").open(key)
        if opened is None:
            raise StorageError(
                f"part {key[:12]} of the session, {len(run)} tokens, is not in the store",
                hint="it was removed: start the conversation again, or restore the folder",
            )
        return opened.segment(run)

    @property
    def sessions(self) -> Records:
        """The records of saved sessions of this tenant, by name.

        Raises:
            StorageError: There is no disk tier.
        """
        from kvnotes.store.records import Records

        disk = self._disk("keep sessions")
        return Records(disk.root / "sessions", disk.trust, "saved session")

    # -- what is there ---------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return what this tenant may see on the disk, by name, version, variant and key."""
        found: list[Entry] = []
        for disk in self._tiers.disks:
            disk.flush(wait=1.0)
            found += disk.entries(self._stock.tally(disk.tenant).refuse)
        return sorted(found, key=lambda e: (e.name, e.version, e.variant, e.key))

    def path(self, key: str) -> Path | None:
        """Return the file of a segment; None if it is not there, or not for you."""
        disk = self._tiers.holder(key)
        return None if disk is None else disk.path(key)

    def header(self, key: str) -> SegmentHeader | None:
        """Return the header of a file; None if it is not there, or not for you.

        Raises:
            SegmentFormatError: It is damaged; it was put aside.
            TrustError: No trusted key signed it, or its encryption key is not there.
        """
        disk = self._tiers.holder(key)
        opened = None if disk is None else disk.open(key, verify=False)
        return None if opened is None else opened.header

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a segment and its family from being evicted, or no longer.

        Raises:
            StorageError: It is not there, or not this tenant's.
        """
        self._tiers.pin(key, pinned)

    def pinned(self) -> set[str]:
        """Return the families that are never evicted, of those that this tenant may see."""
        return {family for disk in self._tiers.disks for family in disk.pinned()}

    def remove(self, keys: Iterable[str]) -> int:
        """Remove segments of this tenant; return the number of bytes set free on the disk.

        Raises:
            StorageError: One is not there, or not this tenant's; then all stay.
        """
        return self._tiers.remove(list(keys))

    def prune(self, rule: Rule | None = None, *, dry_run: bool = False) -> tuple[Pruned, ...]:
        """Take away this tenant's leftovers, and segments by a rule; return what went, or would.

        Args:
            rule: Which segments; by default none.
            dry_run: Only say what would go.

        Raises:
            StorageError: There is no disk tier, or it cannot be written.
        """
        disk = self._disk("prune")
        disk.flush(wait=1.0)
        gone = prune(disk, rule or Rule(), dry_run=dry_run)
        for item in gone if not dry_run else ():
            self.memory.remove(item.name, self.tenant)
        return gone

    @property
    def counters(self) -> Counters:
        """What was done for this tenant so far, as a copy."""
        evicted = self.memory.num_evicted(self.tenant)
        if self.disk is not None:
            evicted += self.disk.num_evicted
        counters = self._tiers.tally.counters(evicted)
        return replace(counters, retries=self.remote.num_retries if self.remote else 0)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The latest files of this tenant that were refused, and why."""
        return self._tiers.tally.faults

    # -- the remote tier -------------------------------------------------------------------

    def push(self, keys: Iterable[str], told: Callable[[str], None] = lambda key: None) -> int:
        """Upload files that the remote tier does not have; return how many.

        Raises:
            StorageError: No remote tier, a file is not there, or the connection broke for good.
        """
        self.remote_tier("push")
        return self._tiers.push(keys, told)

    def pull(self, key: str) -> bool:
        """Download a file, verify and keep it; False if the remote tier does not have it.

        Raises:
            StorageError: No remote tier, or the connection broke for good.
            SegmentFormatError: What came is damaged, or another segment.
            TrustError: No trusted key signed it.
        """
        self.remote_tier("pull")
        self._disk("pull")
        return self._tiers.pull(key)

    def remote_tier(self, what: str = "reach another machine") -> Remote:
        """Return the remote tier.

        Raises:
            StorageError: There is none.
        """
        if self.remote is None:
            raise StorageError(
                f"cannot {what}: the store has no remote tier", hint="give it a URL: --remote URL"
            )
        return self.remote

    # -- inside ----------------------------------------------------------------------------

    def _key_of(
        self, segment: KVSegment, kind: SegmentKind = "segment", *, int8: bool = False
    ) -> str:
        run = segment.run
        if int8:
            altered = f"int8:{segment.identity.spec.dtype}"
            run = Run(run.token_ids, run.start, run.context, altered)
        return content_key(kind, self.tenant, segment.identity.fingerprint, run.digest)

    def _disk(self, what: str) -> DiskTier:
        disk = self.disk
        if disk is None:
            raise StorageError(
                f"cannot {what}: the store has no folder", hint="give KVStore a root folder"
            )
        return disk

"""The store: compiled segments in memory, on a disk, and anywhere else.

Owns `KVStore`: the order of the tiers, one compile for many askers, who may see what, and
the counters. Knows no model: what is not there is compiled by a function that is given.

    find ->  memory  ->  disk (verified, mapped)  ->  remote (downloaded, verified)  -> compile
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.plan import Run, check_compiled
from kvnotes.segment import KVSegment
from kvnotes.spec import ModelIdentity
from kvnotes.store.disk import DiskTier, Limits
from kvnotes.store.header import (
    DTYPE_CODES,
    Provenance,
    SegmentHeader,
    SegmentKind,
    content_key,
)
from kvnotes.store.index import Entry
from kvnotes.store.memory import MemoryTier
from kvnotes.store.remote import Remote
from kvnotes.store.saving import SUFFIX
from kvnotes.store.trust import NO_TRUST, Trust

MAX_FAULTS = 100
"""Refusals whose text is remembered; all are counted."""
ABSENT_SECONDS = 60.0
"""How long a remote tier is not asked again for what it did not have."""
SHARED = ""
"""The tenant whose segments everybody may read."""


@dataclass(slots=True)
class Counters:
    """What a store has done in this process.

    Attributes:
        memory_hits: Found in memory.
        disk_hits: Found on the disk.
        remote_hits: Downloaded.
        misses: Found nowhere.
        compiled: Compiled because nobody had it.
        stored: Files written.
        pushed: Files uploaded.
        evicted: Files and segments that made room.
        refused: Files that were refused, by the class of the error.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0
    misses: int = 0
    compiled: int = 0
    stored: int = 0
    pushed: int = 0
    evicted: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that was refused, or could not be written."""

    key: str
    reason: str


class KVStore:
    """Compiled segments, by content key.

    Args:
        root: Folder of the disk tier; None keeps everything in memory.
        memory_nbytes: Bytes of K/V kept in memory; None keeps all.
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
        self.disk = (
            None
            if root is None
            else DiskTier(Path(root), limits=limits, trust=trust, versions=versions)
        )
        self.remote = Remote(remote) if isinstance(remote, str) else remote
        self.tenant = tenant
        self.accept_inexact = accept_inexact
        self._counters = Counters()
        self._faults: deque[Fault] = deque(maxlen=MAX_FAULTS)
        self._used: dict[str, float] = {}
        self._absent: dict[str, float] = {}
        self._lock = Lock()

    def for_tenant(self, tenant: str) -> KVStore:
        """Return the same store as another tenant sees it."""
        other = copy(self)
        other.tenant = tenant
        return other

    # -- finding ---------------------------------------------------------------------------

    def key(self, fingerprint: str, run_digest: str, kind: SegmentKind = "segment") -> str:
        """Return the key that this tenant's segment of a run has."""
        return content_key(kind, self.tenant, fingerprint, run_digest)

    def find(self, identity: ModelIdentity, run: Run) -> KVSegment | None:
        """Return the compiled segment of a run: this tenant's own, or a shared one.

        The exact one is looked for first; others only if the store accepts inexact ones.
        """
        for digest in self._forms(identity.spec.dtype, run):
            for tenant in self._readers:
                found = self.get(content_key("segment", tenant, identity.fingerprint, digest))
                if found is not None:
                    return found
        self._counters.misses += 1
        return None

    def has(self, identity: ModelIdentity, run: Run) -> str | None:
        """Return the key under which `find` would return a run, without reading it."""
        for digest in self._forms(identity.spec.dtype, run):
            for tenant in self._readers:
                key = content_key("segment", tenant, identity.fingerprint, digest)
                held = self.memory.get(key, self._readers) is not None
                if held or (self.disk is not None and self.disk.has(key)):
                    return key
        return None

    def get(self, key: str) -> KVSegment | None:
        """Return a compiled segment by its key; None if it is not there, or not for you.

        A damaged file is put aside, counted and noted in `faults`; it is as good as missing.

        Raises:
            TrustError: No trusted key signed it, or its encryption key is not there.
        """
        found = self.memory.get(key, self._readers)
        if found is not None:
            self._counters.memory_hits += 1
            self._used[key] = time.time()
            return found
        if self.disk is None:
            return None
        return self._from_disk(key) or self._from_remote(key)

    def get_or_compile(
        self,
        identity: ModelIdentity,
        run: Run,
        compile: Callable[[], KVSegment],
        provenance: Provenance | None = None,
        *,
        strict: bool = False,
    ) -> KVSegment:
        """Return a compiled segment; whoever asks at the same time waits for one compile.

        Args:
            identity: The model.
            run: What its K/V are the K/V of.
            compile: Called if nobody has it.
            provenance: The text it is made from.
            strict: Raise where it cannot be written to the disk. Else that is noted in `faults`,
                and it is in memory all the same.

        Raises:
            StorageError: With `strict`, it could not be written.
        """
        found = self.find(identity, run)
        if found is not None:
            return found
        key = self.key(identity.fingerprint, run.digest)
        if self.disk is None:
            with self._lock:
                found = self.memory.get(key, self._readers)
                return found if found is not None else self._compiled(compile, provenance, strict)
        with self.disk.lock(key):
            found = self.get(key)
            return found if found is not None else self._compiled(compile, provenance, strict)

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
            provenance: The text it was made from.
            int8: Store it in 8 bits: a file of its own, beside an exact one.
            pinned: Never evict it.

        Returns:
            The entry of its file; None without a disk tier.

        Raises:
            LineageError: It saw more than its preamble: a slice of a conversation.
            StorageError: The disk is full, or the quota too small. It is in memory then.
        """
        source = provenance or Provenance()
        check_compiled(source.name or "without a name", segment.run, segment.preamble_ids)
        if not int8:
            self.memory.put(self._key_of(segment), self.tenant, segment, pinned=pinned)
        if self.disk is None:
            return None
        return self._write(segment, "segment", source, int8=int8, pinned=pinned)

    def keep_text(self, text: str) -> None:
        """Keep a text that several files stand for, once."""
        if self.disk is not None:
            self.disk.keep_text(text)

    def text(self, header: SegmentHeader) -> str | None:
        """Return the text of a segment; None where it is not here."""
        source = header.provenance
        if source.text or self.disk is None:
            return source.text or None
        return self.disk.text(source.text_sha256)

    def put_run(self, segment: KVSegment) -> str:
        """Keep a part of a session on the disk; return its key. It is never spliced elsewhere.

        Raises:
            StorageError: There is no disk tier, or it is full.
        """
        key = self.key(segment.identity.fingerprint, segment.run.digest, "run")
        disk = self._disk("save a session")
        if not disk.has(key):
            self._write(segment, "run", Provenance(), int8=False, pinned=False)
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
        if opened is None or opened.header.tenant not in self._readers:
            raise StorageError(
                f"part {key[:12]} of the session, {len(run)} tokens, is not in the store",
                hint="it was removed: start the conversation again, or restore the folder",
            )
        return opened.segment(run)

    # -- what is there ---------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return what this tenant may see on the disk."""
        if self.disk is None:
            return []
        self._flush()
        return [entry for entry in self.disk.entries() if entry.tenant in self._readers]

    def header(self, key: str) -> SegmentHeader | None:
        """Return the header of a file; None if it is not there, or not for you."""
        opened = None if self.disk is None else self.disk.open(key, verify=False)
        if opened is None or opened.header.tenant not in self._readers:
            return None
        return opened.header

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a segment and its family from being evicted, or no longer.

        Raises:
            StorageError: It is not there, or not this tenant's.
        """
        entry = self._own(key)
        self._disk("pin").pin(entry.family, pinned)
        for member in self._disk("pin").index.members(entry.family):
            self.memory.pin(member, pinned)

    def pinned(self) -> set[str]:
        """Return the families that are never evicted."""
        return set() if self.disk is None else self.disk.pinned()

    def remove(self, keys: Iterable[str]) -> int:
        """Remove segments of this tenant; return the number of bytes set free on the disk.

        Raises:
            StorageError: One is not there, or not this tenant's.
        """
        own = [self._own(key).key for key in keys]
        for key in own:
            self.memory.remove(key)
        return self._disk("remove").remove(own)

    @property
    def counters(self) -> Counters:
        """What was done so far, as a copy."""
        evicted = self.memory.num_evicted + (self.disk.num_evicted if self.disk else 0)
        facts = {**asdict(self._counters), "evicted": evicted}
        return Counters(**{**facts, "refused": Counter(self._counters.refused)})

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The latest files that were refused, and why."""
        return tuple(self._faults)

    # -- the remote tier -------------------------------------------------------------------

    def push(self, keys: Iterable[str], told: Callable[[str], None] = lambda key: None) -> int:
        """Upload files that the remote tier does not have; return how many.

        Raises:
            StorageError: No remote tier, a file is not there, or the connection broke for good.
        """
        remote, disk, num_pushed = self.remote_tier("push"), self._disk("push"), 0
        for key in keys:
            self._own(key, shared=True)
            told(key)
            num_pushed += remote.upload(disk.path(key), remote_path(key))
        self._counters.pushed += num_pushed
        return num_pushed

    def pull(self, key: str) -> bool:
        """Download a file, verify and keep it; False if the remote tier does not have it.

        Raises:
            StorageError: No remote tier, or the connection broke for good.
            SegmentFormatError: What came is damaged, or another segment.
            TrustError: No trusted key signed it.
        """
        disk, remote = self._disk("pull"), self.remote_tier("pull")
        with disk.lock(key):
            if disk.has(key):
                return True
            file = remote.find(remote_path(key))
            if file is None:
                return False
            remote.download(file, disk.path(key), disk.root / "partial" / key)
            disk.adopt(key, verify=True)
            return True

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

    @property
    def _readers(self) -> tuple[str, ...]:
        """Tenants whose segments may be read here, the own one first."""
        return (self.tenant, SHARED) if self.tenant != SHARED else (SHARED,)

    def _forms(self, dtype: str, run: Run) -> Iterator[str]:
        """Digests under which K/V of a run may be found, the exact one first."""
        yield run.digest
        if self.accept_inexact:
            others = [f"from:{name}" for name in DTYPE_CODES if name != dtype]
            for altered in (*others, f"int8:{dtype}"):
                yield Run(run.token_ids, run.start, run.context, altered).digest

    def _from_disk(self, key: str) -> KVSegment | None:
        assert self.disk is not None
        try:
            opened = self.disk.open(key)
        except SegmentFormatError as error:
            self._refuse(key, error)
            return None
        if opened is None or not self._may_splice(opened.header):
            return None
        segment = opened.segment()
        self._counters.disk_hits += 1
        self._used[key] = time.time()
        self.memory.put(key, opened.header.tenant, segment)
        self._flush()
        return segment

    def _from_remote(self, key: str) -> KVSegment | None:
        if self.remote is None or self.disk is None:
            return None
        if time.monotonic() - self._absent.get(key, -ABSENT_SECONDS) < ABSENT_SECONDS:
            return None
        try:
            if not self.pull(key):
                self._absent[key] = time.monotonic()
                return None
        except (SegmentFormatError, StorageError) as error:
            self._refuse(key, error)
            return None
        found = self._from_disk(key)
        if found is not None:
            self._counters.disk_hits -= 1
            self._counters.remote_hits += 1
        return found

    def _may_splice(self, header: SegmentHeader) -> bool:
        return header.tenant in self._readers and (
            header.kind == "segment" and (self.accept_inexact or not header.altered)
        )

    def _compiled(
        self, compile: Callable[[], KVSegment], provenance: Provenance | None, strict: bool
    ) -> KVSegment:
        segment = compile()
        self._counters.compiled += 1
        try:
            self.put(segment, provenance)
        except StorageError as error:
            self._refuse(self._key_of(segment), error)
            if strict:
                raise
        return segment

    def _write(
        self,
        segment: KVSegment,
        kind: SegmentKind,
        provenance: Provenance,
        *,
        int8: bool,
        pinned: bool,
    ) -> Entry:
        disk = self._disk("store")
        key = self._key_of(segment, kind, int8=int8)
        known = disk.index.get([key]) if disk.has(key) else []
        entry = (
            known[0]
            if known
            else disk.save(
                key, segment, kind=kind, tenant=self.tenant, provenance=provenance, int8=int8
            )
        )
        self._counters.stored += not known
        if pinned:
            disk.pin(entry.family, True)
        return entry

    def _key_of(
        self, segment: KVSegment, kind: SegmentKind = "segment", *, int8: bool = False
    ) -> str:
        run = segment.run
        if int8:
            altered = f"int8:{segment.identity.spec.dtype}"
            run = Run(run.token_ids, run.start, run.context, altered)
        return self.key(segment.identity.fingerprint, run.digest, kind)

    def _own(self, key: str, *, shared: bool = False) -> Entry:
        """The entry of a key; one that is somebody else's is as good as missing."""
        disk = self._disk("find a segment")
        found = disk.index.get([key]) if disk.has(key) else []
        if disk.has(key) and not found:
            adopted = disk.adopt(key, verify=False)
            found = [] if adopted is None else [adopted]
        mine = self._readers if shared else (self.tenant,)
        if not found or found[0].tenant not in mine:
            raise StorageError(f"no segment {key[:12]} is in the store", hint="kvnotes library ls")
        return found[0]

    def _refuse(self, key: str, error: SegmentFormatError | StorageError) -> None:
        self._counters.refused[type(error).__name__] += 1
        self._faults.append(Fault(key, error.message))

    def _flush(self) -> None:
        """Tell the index what was used; many uses cost one write."""
        used = list(self._used.items())
        self._used.clear()
        if self.disk is not None:
            self.disk.index.touch(used)

    def _disk(self, what: str) -> DiskTier:
        if self.disk is None:
            raise StorageError(
                f"cannot {what}: the store has no folder", hint="give KVStore a root folder"
            )
        return self.disk


def remote_path(key: str) -> str:
    """Return where a segment lies below the URL of a remote tier."""
    return f"segments/{key[:2]}/{key}{SUFFIX}"

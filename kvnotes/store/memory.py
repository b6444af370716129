"""The memory tier: segments that are ready to splice, the least recently used ones first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvnotes.segment import KVSegment


@dataclass(slots=True)
class _Part:
    """What one tenant holds."""

    held: OrderedDict[str, KVSegment] = field(default_factory=OrderedDict)
    nbytes: int = 0
    num_evicted: int = 0


class MemoryTier:
    """Segments by key, up to a number of bytes for each tenant; shared by threads.

    No tenant can push out another one's segments, and learn from it what those are. Whoever
    uses an evicted segment keeps it alive; this tier only forgets it. Segments of mapped
    files count with their full size, although the system may drop their pages.

    Args:
        max_nbytes: Bytes of K/V kept for each tenant; None keeps all. The newest segment is
            kept whatever its size.
    """

    def __init__(self, max_nbytes: int | None = None) -> None:
        self._max_nbytes = max_nbytes
        self._parts: dict[str, _Part] = {}
        self._pinned: set[str] = set()
        self._lock = Lock()

    def get(self, key: str, tenants: Iterable[str]) -> KVSegment | None:
        """Return a segment, which is then the most recently used one of its tenant.

        Args:
            key: Its content key.
            tenants: Whose segments may be returned; others are as good as missing.
        """
        with self._lock:
            for tenant in tenants:
                part = self._parts.get(tenant)
                if part is not None and key in part.held:
                    part.held.move_to_end(key)
                    return part.held[key]
        return None

    def has(self, key: str, tenant: str) -> bool:
        """Whether a tenant's segment is here; it counts as no use."""
        with self._lock:
            return key in self._parts.get(tenant, _Part()).held

    def put(self, key: str, tenant: str, segment: KVSegment, *, pinned: bool = False) -> None:
        """Keep a segment; its tenant's others go if there are too many bytes, no pinned ones."""
        with self._lock:
            part = self._parts.setdefault(tenant, _Part())
            self._forget(part, key)
            part.held[key] = segment
            part.nbytes += segment.nbytes
            if pinned:
                self._pinned.add(key)
            self._evict(part, key)

    def remove(self, key: str, tenant: str) -> bool:
        """Forget a tenant's segment; return whether it was here."""
        with self._lock:
            part = self._parts.get(tenant, _Part())
            found = key in part.held
            if found:
                self._pinned.discard(key)
                self._forget(part, key)
            return found

    def pin(self, key: str, pinned: bool) -> None:
        """Keep a segment from being evicted, or no longer."""
        with self._lock:
            (self._pinned.add if pinned else self._pinned.discard)(key)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments held, of all tenants."""
        return self.nbytes_of(list(self._parts))

    def nbytes_of(self, tenants: Iterable[str]) -> int:
        """Return the bytes that some tenants hold."""
        with self._lock:
            return sum(self._parts.get(tenant, _Part()).nbytes for tenant in tenants)

    def num_evicted(self, tenant: str) -> int:
        """Return how many segments of a tenant made room for others of it."""
        with self._lock:
            return self._parts.get(tenant, _Part()).num_evicted

    def keys(self, tenants: Iterable[str] | None = None) -> list[str]:
        """Return the keys held by some tenants, or all; of each the least recently used first."""
        with self._lock:
            names = list(self._parts) if tenants is None else tenants
            return [key for name in names for key in self._parts.get(name, _Part()).held]

    def _forget(self, part: _Part, key: str) -> None:
        found = part.held.pop(key, None)
        if found is not None:
            part.nbytes -= found.nbytes

    def _evict(self, part: _Part, newest: str) -> None:
        if self._max_nbytes is None:
            return
        for key in list(part.held):
            if part.nbytes <= self._max_nbytes:
                return
            if key != newest and key not in self._pinned:
                self._forget(part, key)
                part.num_evicted += 1

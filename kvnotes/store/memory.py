"""The memory tier: segments that are ready to splice, the least recently used ones last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from threading import Lock

from kvnotes.segment import KVSegment


class MemoryTier:
    """Segments by key, up to a number of bytes; shared by threads.

    Whoever uses an evicted segment keeps it alive; this tier only forgets it. Segments of
    mapped files count with their full size, although the system may drop their pages.

    Args:
        max_nbytes: Bytes of K/V that are kept; None keeps all.
    """

    def __init__(self, max_nbytes: int | None = None) -> None:
        self._max_nbytes = max_nbytes
        self._held: OrderedDict[str, tuple[str, KVSegment]] = OrderedDict()
        self._nbytes = 0
        self._pinned: set[str] = set()
        self._lock = Lock()
        self.num_evicted = 0

    def get(self, key: str, readers: Container[str]) -> KVSegment | None:
        """Return a segment, which is then the most recently used one.

        Args:
            key: Its content key.
            readers: Tenants whose segments may be returned; others are as good as missing.
        """
        with self._lock:
            found = self._held.get(key)
            if found is None or found[0] not in readers:
                return None
            self._held.move_to_end(key)
            return found[1]

    def put(self, key: str, tenant: str, segment: KVSegment, *, pinned: bool = False) -> None:
        """Keep a tenant's segment; others go if there are too many bytes, but no pinned ones."""
        with self._lock:
            self._forget(key)
            self._held[key] = tenant, segment
            self._nbytes += segment.nbytes
            if pinned:
                self._pinned.add(key)
            self._evict(key)

    def remove(self, key: str) -> None:
        """Forget a segment; one that is not there is no fault."""
        with self._lock:
            self._pinned.discard(key)
            self._forget(key)

    def pin(self, key: str, pinned: bool) -> None:
        """Keep a segment from being evicted, or no longer."""
        with self._lock:
            (self._pinned.add if pinned else self._pinned.discard)(key)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments held."""
        return self._nbytes

    def keys(self) -> list[str]:
        """Return the keys held, the least recently used first."""
        with self._lock:
            return list(self._held)

    def _forget(self, key: str) -> None:
        found = self._held.pop(key, None)
        if found is not None:
            self._nbytes -= found[1].nbytes

    def _evict(self, newest: str) -> None:
        if self._max_nbytes is None:
            return
        for key in list(self._held):
            if self._nbytes <= self._max_nbytes:
                return
            if key != newest and key not in self._pinned:
                self._forget(key)
                self.num_evicted += 1

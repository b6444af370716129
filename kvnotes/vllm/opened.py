"""Which segments the workers have open: asked for before they are promised to vLLM.

A worker opens a file, verifies every digest and maps it, beside its steps. Only when all workers
have it, requests are told that its K/V can be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvnotes.vllm.messages import WorkerNews

MAX_OPEN = 512
"""Segments that workers keep open: a mapped file each."""


class OpenSegments:
    """Follows what the workers have open.

    Args:
        num_workers: All of them have to have a segment.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._opening: dict[str, int] = {}
        self._to_open: dict[str, None] = {}

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the segments that are not open; the others count as used."""
        for key in keys:
            if key in self._ready:
                self._ready.move_to_end(key)
        return [key for key in keys if key not in self._ready]

    def want(self, keys: Sequence[str]) -> None:
        """Have segments opened, unless they are being opened."""
        for key in keys:
            if key not in self._opening:
                self._opening[key] = self._num_workers
                self._to_open[key] = None

    def update(self, news: WorkerNews) -> int:
        """Take in what the workers have said; return how many segments are open since."""
        before = len(self._ready)
        for key, number in news.opened.items():
            if key in self._opening:
                self._opening[key] -= number
                if self._opening[key] <= 0:
                    del self._opening[key]
                    self._ready[key] = None
        opened = len(self._ready) - before
        for key in news.failed:
            self._opening.pop(key, None)
            self._ready.pop(key, None)
        return opened

    def take(self, wanted: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what the workers have to open, and to close: beyond the limit, and not wanted."""
        opening = tuple(self._to_open)
        self._to_open.clear()
        over = max(0, len(self._ready) - MAX_OPEN)
        closing = tuple(key for key in self._ready if key not in wanted)[:over]
        for key in closing:
            del self._ready[key]
        return opening, closing

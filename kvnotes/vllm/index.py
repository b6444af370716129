"""Which compiled segments stand in a prompt: by their tokens, without a word from the client.

Owns `SegmentIndex`, which follows a store. Equal texts give equal tokens where delimiters keep
them apart, as chat templates do; what tokenizes otherwise in its context is not found, and
computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvnotes.errors import KVNotesError
from kvnotes.plan import Run, Splice
from kvnotes.store import KVStore
from kvnotes.vllm.requests import Wish

NUM_KEY_TOKENS = 16
"""Tokens by which candidates are looked up; shorter segments are never found."""

REFRESH_SECONDS = 2.0
"""How often the store is asked what is new."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A segment of the store.

    Args:
        key: Its content key.
        run: Its tokens and their lineage.
        name: Name of the skill, "" for none.
        version: Its version.
        variant: Values of the fields in its preamble.
    """

    key: str
    run: Run
    name: str
    version: int
    variant: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """Name, version and variant, for people."""
        name = f"{self.name}@{self.version}" if self.version else self.name or self.key[:12]
        return " ".join([name, *(f"{field}={value}" for field, value in self.variant)])


@dataclass(frozen=True, slots=True)
class Found:
    """A segment that stands in a prompt.

    Args:
        compiled: The segment.
        start: Position of its first token.
    """

    compiled: Compiled
    start: int

    @property
    def splice(self) -> Splice:
        """It, as plans are made of it."""
        run = self.compiled.run
        return Splice(self.compiled.title, run, 0, len(run), self.start)


class SegmentIndex:
    """The segments of one model in a store.

    Args:
        store: The store; what other processes add is seen after `REFRESH_SECONDS`.
        fingerprint: The model.
        min_tokens: Shorter segments are not spliced.
    """

    def __init__(self, store: KVStore, fingerprint: str, *, min_tokens: int) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._min_tokens = max(min_tokens, NUM_KEY_TOKENS)
        self._known: dict[str, Compiled] = {}
        self._by_start: dict[tuple[int, ...], list[Compiled]] = {}
        self._firsts: frozenset[int] = frozenset()
        self._asked_at = -float("inf")

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._known)

    def refresh(self, *, now: bool = False) -> None:
        """Take in what was added and removed; a file that cannot be read is left out."""
        if not now and time.monotonic() - self._asked_at < REFRESH_SECONDS:
            return
        self._asked_at = time.monotonic()
        there: set[str] = set()
        for entry in self._store.entries():
            if entry.kind != "segment" or entry.fingerprint != self._fingerprint or entry.altered:
                continue
            there.add(entry.key)
            if entry.key not in self._known:
                with suppress(KVNotesError):
                    self._read(entry.key)
        if there != self._known.keys() or len(there) != sum(map(len, self._by_start.values())):
            self._known = {key: c for key, c in self._known.items() if key in there}
            self._rebuild()

    def forget(self, key: str) -> None:
        """Leave a segment out until its file is another one."""
        if self._known.pop(key, None) is not None:
            self._rebuild()

    def _read(self, key: str) -> None:
        header = self._store.header(key)
        if header is None:
            return
        source = header.provenance
        self._known[key] = Compiled(key, header.run(), source.name, source.version, source.variant)

    def _rebuild(self) -> None:
        by_start: dict[tuple[int, ...], list[Compiled]] = {}
        for compiled in self._known.values():
            ids = compiled.run.token_ids
            if len(ids) >= self._min_tokens:
                by_start.setdefault(ids[:NUM_KEY_TOKENS], []).append(compiled)
        for found in by_start.values():
            found.sort(key=lambda c: (-len(c.run), c.key))
        self._by_start = by_start
        self._firsts = frozenset(start[0] for start in by_start)

    def find(self, token_ids: Sequence[int], wish: Wish) -> list[Found]:
        """Return the segments that stand in a prompt, from left to right, the longest first."""
        ids, found, position = tuple(token_ids), [], 0
        last = len(ids) - self._min_tokens
        while position <= last:
            if ids[position] in self._firsts:
                here = self._by_start.get(ids[position : position + NUM_KEY_TOKENS], ())
                chosen = self._choose(ids, position, here, wish)
                if chosen is not None:
                    found.append(Found(chosen, position))
                    position += len(chosen.run)
                    continue
            position += 1
        return found

    def _choose(
        self, ids: tuple[int, ...], position: int, candidates: Iterable[Compiled], wish: Wish
    ) -> Compiled | None:
        """Return the longest segment here; of its variants the one for the request's values.

        Where a text has variants and no value chooses one, nothing is spliced: K/V without notes
        about the field decide wrongly.
        """
        length, same = 0, []
        for compiled in candidates:
            ids_of = compiled.run.token_ids
            if len(ids_of) < length or not wish.allows(compiled.name, compiled.version):
                continue
            if ids[position : position + len(ids_of)] == ids_of:
                length = len(ids_of)
                same.append(compiled)
        fitting = [
            c for c in same if all(wish.values.get(field) == value for field, value in c.variant)
        ]
        best = max((len(c.variant) for c in same), default=0)
        chosen = [c for c in fitting if len(c.variant) == best]
        in_place = [c for c in chosen if c.run.start == position]
        return next(iter(in_place or chosen), None)

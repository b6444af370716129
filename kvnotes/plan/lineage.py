"""Lineage: which tokens a run of K/V was computed from.

Owns `Run`, `Reuse` and layouts (tuples of `Reuse`). Integers and digests only: nothing
here knows tensors or text.

A *run* is a stretch of tokens whose keys and values were computed together: every token
sees `context` and the tokens of the run before it. A *layout* says what a cache holds:
views of runs, at target positions, in order. Both have one canonical form, so that a
prompt prefilled at once and the same prompt prefilled in pieces are the same layout:

    cut anywhere        [A: 0..60 | context -]  [B: 60..90 | context A]
    canonical           [AB: 0..90 | context -]

A layout is exact if and only if its canonical form is one run at position 0 that saw
nothing else: that is what a cold prefill leaves behind.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile


def digest_tokens(token_ids: Sequence[int]) -> str:
    """Return the full SHA-256 of token ids, as 64 hex digits."""
    return hashlib.sha256(_int64(token_ids)).hexdigest()


def digest_run(attended: str, start: int, token_ids: Sequence[int], altered: str = "") -> str:
    """Return the content key of a run of which only the digest of its context is known."""
    state = hashlib.sha256(attended.encode())
    state.update(_int64((start, *token_ids)))
    if altered:
        state.update(b"altered " + altered.encode())
    return state.hexdigest()


def _int64(numbers: Iterable[int]) -> bytes:
    """Return numbers as 8 bytes each, little endian on every machine: digests are shared."""
    packed = array("q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """Tokens whose K/V were computed one after the other behind one context.

    Args:
        token_ids: The run's tokens.
        start: Position of the first token when it was computed.
        context: What all tokens of the run could see before it, canonical.
        altered: How its K/V differ from what was computed, "" if they do not: rounded,
            `int8:float32`, or of another dtype, `from:float32`. Altered K/V have a key of
            their own and are never exact.
    """

    token_ids: tuple[int, ...]
    start: int = 0
    context: tuple[Reuse, ...] = ()
    altered: str = ""

    @cached_property
    def attended(self) -> str:
        """Digest of all tokens and places the run could see before itself."""
        state = hashlib.sha256(b"context")
        for view in self.context:
            place = _int64((view.source_start, view.source_stop, view.target_start))
            state.update(view.run.digest.encode() + place)
        return state.hexdigest()

    @cached_property
    def digest(self) -> str:
        """Content key of the run including its lineage, 64 hex digits."""
        return digest_run(self.attended, self.start, self.token_ids, self.altered)

    @cached_property
    def after(self) -> tuple[Reuse, ...]:
        """Canonical context of a token computed right after this run."""
        return extend(self.context, self.whole())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Run) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        # contexts hold runs that hold contexts: written out they grow exponentially
        return f"Run({len(self)} tokens at {self.start}, {self.digest[:12]})"

    def whole(self, at: int | None = None) -> Reuse:
        """Return a view of the whole run, at `at` or where it was computed."""
        return Reuse(self, 0, len(self.token_ids), self.start if at is None else at)

    def cut(self, start: int, stop: int) -> Run:
        """Return the run that holds tokens `[start, stop)` of this one.

        Tokens before `start` become context: causal attention makes both the same K/V.
        """
        if start == 0:
            if stop == len(self.token_ids):
                return self
            return Run(self.token_ids[:stop], self.start, self.context, self.altered)
        head = Run(self.token_ids[:start], self.start, self.context, self.altered)
        return Run(self.token_ids[start:stop], self.start + start, head.after, self.altered)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Put tokens `[source_start, source_stop)` of a run at `target_start`.

    It is a step of a plan, and an entry of a layout: what is reused is what is held.
    """

    run: Run
    source_start: int
    source_stop: int
    target_start: int

    @property
    def source_id(self) -> str:
        """Content key of the run, including its lineage."""
        return self.run.digest

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The reused tokens."""
        return self.run.token_ids[self.source_start : self.source_stop]

    @property
    def token_digest(self) -> str:
        """SHA-256 of the reused tokens."""
        return digest_tokens(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of reused tokens."""
        return self.source_stop - self.source_start

    @property
    def target_stop(self) -> int:
        """Position after the last reused token."""
        return self.target_start + self.num_tokens

    @property
    def shift(self) -> int:
        """How far the keys move, in tokens; 0 stays where it was computed."""
        return self.target_start - self.run.start - self.source_start

    @property
    def moved(self) -> bool:
        """Whether the keys change position."""
        return self.shift != 0

    def clip(self, start: int, stop: int) -> Reuse:
        """Return the part of this view that lies in target positions `[start, stop)`."""
        low, high = max(start, self.target_start), min(stop, self.target_stop)
        offset = self.source_start - self.target_start
        return Reuse(self.run, low + offset, high + offset, low)


Layout = tuple[Reuse, ...]


def extend(layout: Layout, view: Reuse) -> Layout:
    """Append a view to a canonical layout and keep it canonical.

    The view merges into the last entry when its run was computed exactly there: behind
    the last entry's context and tokens, and both have moved by the same distance.
    """
    run = view.run.cut(view.source_start, view.source_stop)
    if not run.token_ids:
        return layout
    last = layout[-1] if layout else None
    if (
        last is not None
        and last.shift == view.shift
        and run.start == last.run.start + len(last.run)
        and run.altered == last.run.altered
        and _same_context(run.context, last.run.after)
    ):
        ids = last.run.token_ids + run.token_ids
        merged = Run(ids, last.run.start, last.run.context, run.altered)
        return (*layout[:-1], merged.whole(last.target_start))
    return (*layout, run.whole(view.target_start))


def canonical(layout: Iterable[Reuse]) -> Layout:
    """Return the canonical form of a layout: whole runs, merged where they continue."""
    result: Layout = ()
    for view in layout:
        result = extend(result, view)
    return result


def is_exact(layout: Iterable[Reuse]) -> bool:
    """Whether a cache with this layout equals a cold prefill of its tokens."""
    views = canonical(layout)
    if not views:
        return True
    view, run = views[0], views[0].run
    cold = not (run.context or run.altered)
    return len(views) == 1 and view.target_start == run.start == 0 and cold


def common_prefix(left: Layout, right: Layout) -> int:
    """Return how many leading tokens two canonical layouts hold with the same lineage."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a.target_start != b.target_start or a.run.start != b.run.start:
            break
        if a.run.altered != b.run.altered or not _same_context(a.run.context, b.run.context):
            break
        if a.run.token_ids == b.run.token_ids:
            length = a.target_stop
            continue
        length = a.target_start + num_equal(a.run.token_ids, b.run.token_ids)
        break
    return length


def clip(layout: Iterable[Reuse], start: int, stop: int) -> Layout:
    """Return the parts of a layout that lie in target positions `[start, stop)`."""
    return tuple(
        view.clip(start, stop)
        for view in layout
        if view.target_start < stop and view.target_stop > start
    )


def holds(layout: Layout, view: Reuse) -> bool:
    """Whether a layout has exactly this view at its target positions already."""
    position = view.target_start
    for held in layout:
        if held.target_start <= position < held.target_stop:
            if held.shift != view.shift or held.run != view.run:
                return False
            position = held.target_stop
            if position >= view.target_stop:
                return True
    return False


def layout_token_ids(layout: Iterable[Reuse]) -> tuple[int, ...]:
    """Return the token ids a layout holds, in order."""
    return tuple(token for view in layout for token in view.token_ids)


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    size = min(len(left), len(right))
    if tuple(left[:size]) == tuple(right[:size]):
        return size
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def _same_context(left: Layout, right: Layout) -> bool:
    """Compare two canonical contexts; identity first, digests only where needed."""
    return left is right or left == right

"""K/V of token runs, and caches made of them.

Owns `KVSegment` (immutable K/V of one run), `Buffer` (memory that grows at its end) and
`KVCache` (views of segments, and where each stands in memory). No model calls here.

    sources   segment "policy" at 0..1540      (compiled; shared by everybody)
    layout    R policy[1:1540] at 34  +  runs computed in place
    pieces    [ header seam ][ policy, keys 33 too low ][ order turn 1 ....free.... ]
              own buffer      the segment's own memory   own buffer, goes on there

A piece whose keys stand elsewhere than in the prompt is attended from there, or copied and
moved into the buffer. A buffer grows at its end only. A cache may write a slot when no other
live cache reads that slot or a later one; otherwise it goes on in a buffer of its own. So a
fork costs nothing until it writes, two forks never see each other, and a segment that many
conversations use stands in memory once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary, finalize

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.errors import UnknownSegmentError
from kvnotes.plan.lineage import Layout, Reuse, Run, canonical, clip, is_exact, layout_token_ids
from kvnotes.spec import ModelIdentity, ModelSpec, TensorName

SPARE_TOKENS = 32
"""Free slots a new buffer gets, at least: an erratum fits, and sixteen conversations over one
policy of 6,000 tokens leave less than a tenth of it unused."""

GROWTH = 1.25
"""A new buffer is this much larger than what it must hold: appends are amortised O(1)."""

MAX_SLACK = 2
"""A free buffer is taken for a sequence if it is at most this many times too large."""

LayerTensors = tuple[Float[Tensor, "_ tokens _"], ...]
"""One tensor for each layer; one without heads where a layer caches none of its kind."""

Tensors = dict[TensorName, LayerTensors]
"""Everything that is cached, by name."""


class Holder:
    """Whatever holds tensors of every layer, side by side."""

    tensors: Tensors

    @property
    def keys(self) -> LayerTensors:
        """Each layer's keys."""
        return self.tensors["keys"]

    @property
    def values(self) -> LayerTensors:
        """Each layer's values."""
        return self.tensors["values"]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for ts in self.tensors.values() for t in ts)

    def part(self, start: int, stop: int) -> Tensors:
        """Return slots `[start, stop)` of all tensors, as views."""
        return {
            name: tuple(layer[:, start:stop] for layer in layers)
            for name, layers in self.tensors.items()
        }


class Buffer(Holder):
    """Preallocated K/V memory, `[kv_heads, capacity, dim]` for each layer and tensor.

    Args:
        tensors: The memory.
    """

    @classmethod
    def allocate(
        cls, spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: str = "cpu"
    ) -> Buffer:
        """Return a new buffer with exactly `num_tokens` slots."""
        return cls(empty_tensors(spec, num_tokens, dtype, device))

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._extent: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    @property
    def capacity(self) -> int:
        """Number of token slots."""
        return self.keys[0].shape[1]

    def read_until(self, reader: object, stop: int) -> None:
        """Record that `reader` reads slots below `stop`, and no others, as long as it lives."""
        self._extent[reader] = stop

    def writable(self, start: int, *, except_for: object = None) -> bool:
        """Whether slots from `start` on may be written: nobody else reads them."""
        return all(stop <= start or reader is except_for for reader, stop in self._extent.items())

    def segment(self, run: Run, slot: int, identity: ModelIdentity) -> KVSegment:
        """Return the K/V of `run` that stands at `slot`, as a view."""
        return KVSegment(run, identity, self.part(slot, slot + len(run)), self, slot)


class BufferPool:
    """Growing buffers whose memory comes back when nothing uses it any more.

    Memory that is new to a process is expensive: touching a fresh 6k-token buffer of SmolLM2
    costs six times the copy itself. A buffer goes back when the last cache and segment that
    stand in it are gone; whoever keeps a bare tensor of a segment must keep the segment.

    Args:
        spec: Shapes of the layers.
        dtype: Element type.
        max_free: Buffers kept while nobody uses them.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, max_free: int = 2) -> None:
        self._spec = spec
        self._dtype = dtype
        self._max_free = max_free
        self._free: list[Tensors] = []

    def take(self, num_tokens: int) -> Buffer:
        """Return a buffer for `num_tokens`, with room to append."""
        for index, tensors in enumerate(self._free):
            if num_tokens <= tensors["keys"][0].shape[1] <= MAX_SLACK * num_tokens + SPARE_TOKENS:
                del self._free[index]
                return self._lend(Buffer(tensors))
        wanted = max(int(num_tokens * GROWTH), num_tokens + SPARE_TOKENS)
        wanted = max(min(wanted, self._spec.max_positions), num_tokens)
        return self._lend(Buffer.allocate(self._spec, wanted, self._dtype))

    def _lend(self, buffer: Buffer) -> Buffer:
        finalize(buffer, self._give, buffer.tensors)
        return buffer

    def _give(self, tensors: Tensors) -> None:
        self._free.append(tensors)
        del self._free[: -self._max_free]


@dataclass(frozen=True, eq=False)
class KVSegment(Holder):
    """K/V of one run of tokens, immutable, at the positions where it was computed.

    Args:
        run: The tokens and their lineage.
        identity: The model that computed it.
        tensors: Keys (post-RoPE), values and what else the model caches, per layer
            `[kv_heads, tokens, dim]`.
        buffer: The buffer these tensors are views of, if any.
        slot: First slot in that buffer.
        preamble_ids: The declared preamble of a compiled segment.
    """

    run: Run
    identity: ModelIdentity
    tensors: Tensors
    buffer: Buffer | None = None
    slot: int = 0
    preamble_ids: tuple[int, ...] = ()

    @property
    def source_id(self) -> str:
        """Content key of the run, including its lineage."""
        return self.run.digest

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.run)

    @property
    def slot_stop(self) -> int:
        """Slot after its last token, in its buffer."""
        return self.slot + self.num_tokens

    def piece(self, view: Reuse) -> Piece:
        """Return a view of it as a piece of a cache, read where it stands."""
        memory = self if self.buffer is None else self.buffer
        slot = self.slot + view.source_start
        return Piece(memory, slot, view.target_start, view.num_tokens, view.shift)

    def checksum(self) -> float:
        """Sum over all elements in float64: changes when anything is overwritten."""
        return checksum(self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of a cache that stand side by side in one memory.

    Args:
        memory: A buffer, or a compiled segment.
        slot: Where its first token stands there.
        start: Position of that token in the cache.
        num_tokens: Number of tokens.
        shift: How far its keys have still to move: they stand at `start - shift`.
    """

    memory: Holder
    slot: int
    start: int
    num_tokens: int
    shift: int = 0

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    @property
    def slot_stop(self) -> int:
        """Slot after its last token."""
        return self.slot + self.num_tokens

    def clip(self, start: int, stop: int) -> Piece:
        """Return the part at positions `[start, stop)`."""
        low, high = max(start, self.start), min(stop, self.stop)
        return Piece(self.memory, self.slot + low - self.start, low, high - low, self.shift)

    def joined(self, other: Piece) -> Piece | None:
        """Return both as one, if `other` goes on where this one ends; else None."""
        goes_on = self.memory is other.memory and self.slot_stop == other.slot
        if not goes_on or self.stop != other.start or self.shift != other.shift:
            return None
        num_tokens = self.num_tokens + other.num_tokens
        return Piece(self.memory, self.slot, self.start, num_tokens, self.shift)


Pieces = tuple[Piece, ...]


def clip_pieces(pieces: Iterable[Piece], start: int, stop: int) -> Pieces:
    """Return the parts of pieces that lie at positions `[start, stop)`."""
    return tuple(p.clip(start, stop) for p in pieces if p.start < stop and p.stop > start)


def join_pieces(pieces: Iterable[Piece]) -> Pieces:
    """Return the same pieces, those as one that go on in memory where another ends."""
    result: list[Piece] = []
    for piece in pieces:
        joined = result[-1].joined(piece) if result else None
        if joined is not None:
            result[-1] = joined
        elif piece.num_tokens:
            result.append(piece)
    return tuple(result)


def side_by_side(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return the stretches of memory that pieces make, by the first token of each.

    What stands side by side, keys as far from their place, is one stretch in whatever order its
    tokens are. The order of stretches depends on tokens, never on addresses.
    """
    found: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (id(p.memory), p.shift, p.slot)):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and last.memory is piece.memory
            and (last.slot_stop, last.shift) == (piece.slot, piece.shift)
        ):
            found[-1].append(piece)
        else:
            found.append([piece])
    return sorted(found, key=lambda stretch: min(piece.start for piece in stretch))


class KVCache:
    """The K/V of one token sequence: a layout over segments, and where its tokens stand.

    Immutable for its users: engines return new caches. What it holds stays as it is while
    the cache lives.

    Args:
        layout: What stands where, by target position from 0.
        sources: The segments the layout's runs come from.
        pieces: Where its tokens stand in memory, by position from 0.
        buffer: Memory that it grows in.
        identity: The model.
    """

    def __init__(
        self,
        layout: Layout,
        sources: Iterable[KVSegment],
        pieces: Iterable[Piece],
        buffer: Buffer,
        identity: ModelIdentity,
    ) -> None:
        self.layout = layout
        self.pieces = join_pieces(pieces)
        self.identity = identity
        self.buffer = buffer
        held = {id(view.run) for view in layout}
        by_run = {id(segment.run): segment for segment in sources}
        self._sources = {run: by_run[run] for run in held if run in by_run}
        self._stops = {buffer: 0}
        read = [(segment.buffer, segment.slot_stop) for segment in self._sources.values()]
        read += [(p.memory, p.slot_stop) for p in self.pieces if isinstance(p.memory, Buffer)]
        for memory, stop in read:
            if memory is not None:
                self._stops[memory] = max(stop, self._stops.get(memory, 0))
        for memory, stop in self._stops.items():
            memory.read_until(self, stop)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.layout[-1].target_stop if self.layout else 0

    @property
    def end(self) -> int:
        """The slot of its buffer from which on it reads nothing."""
        return self._stops[self.buffer]

    @property
    def sources(self) -> tuple[KVSegment, ...]:
        """The segments this cache is made of."""
        return tuple(self._sources.values())

    @property
    def in_place(self) -> bool:
        """Whether every token stands in its buffer, at the slot of its position."""
        if not self.pieces:
            return True
        first = self.pieces[0]
        alone = len(self.pieces) == 1 and first.memory is self.buffer
        return alone and first.slot == first.start == first.shift == 0

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens, in order."""
        return layout_token_ids(self.layout)

    @cached_property
    def canonical_layout(self) -> Layout:
        """The layout in its one canonical form."""
        return canonical(self.layout)

    @property
    def exact(self) -> bool:
        """Whether this equals a cold prefill of its tokens, by lineage."""
        return is_exact(self.canonical_layout)

    def source(self, run: Run) -> KVSegment:
        """Return the segment that holds `run`.

        Raises:
            UnknownSegmentError: This cache holds no such run.
        """
        found = self._sources.get(id(run))
        if found is None:
            found = next((s for s in self._sources.values() if s.run == run), None)
        if found is None:
            raise UnknownSegmentError(
                f"no segment holds the run {run.digest[:12]} of {len(run)} tokens; the cache has "
                f"{len(self._sources)} others",
                hint="compile the segment, or plan again from the cache that is given",
            )
        return found

    def fork(self) -> KVCache:
        """Return a cache that shares everything and goes its own way from here."""
        return KVCache(self.layout, self.sources, self.pieces, self.buffer, self.identity)

    def truncated(self, length: int) -> KVCache:
        """Return the cache of the first `length` tokens; shares all memory."""
        views: list[Reuse] = []
        sources: list[KVSegment] = []
        for view in clip(self.layout, 0, length):
            view, segment = narrowed(view, self.source(view.run))
            views.append(view)
            sources.append(segment)
        pieces = clip_pieces(self.pieces, 0, length)
        return KVCache(tuple(views), sources, pieces, self.buffer, self.identity)

    def appended(self, run: Run, slot: int) -> KVCache:
        """Return this cache followed by a run that was computed at `slot` of its buffer."""
        piece = Piece(self.buffer, slot, self.length, len(run))
        segment = self.buffer.segment(run, slot, self.identity)
        return KVCache(
            (*self.layout, run.whole()),
            (*self.sources, segment),
            (*self.pieces, piece),
            self.buffer,
            self.identity,
        )

    def growing_in(self, buffer: Buffer, pieces: Iterable[Piece]) -> KVCache:
        """Return the same cache where it grows in another buffer, and some tokens stand there."""
        return KVCache(self.layout, self.sources, pieces, buffer, self.identity)

    def close(self) -> None:
        """Give the memory up: an engine is about to overwrite it."""
        self.layout, self.pieces = (), ()
        self._sources = {}
        self._stops = dict.fromkeys(self._stops, 0)
        for memory in self._stops:
            memory.read_until(self, 0)
        self.__dict__.pop("token_ids", None)
        self.__dict__.pop("canonical_layout", None)

    def checksum(self) -> float:
        """Sum over all held elements in float64: changes when anything is overwritten."""
        return sum(checksum(p.memory.part(p.slot, p.slot_stop)) for p in self.pieces)


def narrowed(view: Reuse, segment: KVSegment) -> tuple[Reuse, KVSegment]:
    """Cut a run and its segment to the tokens that a view takes.

    For memory that may change: what a cache does not read may be overwritten, and a segment
    that still claimed it would hand out the K/V of other tokens.
    """
    if view.num_tokens == segment.num_tokens or segment.buffer is None:
        return view, segment
    run = view.run.cut(view.source_start, view.source_stop)
    slot = segment.slot + view.source_start
    return run.whole(view.target_start), segment.buffer.segment(run, slot, segment.identity)


def empty_tensors(
    spec: ModelSpec, num_tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> Tensors:
    """Return memory for everything that a model caches of some tokens."""
    return {
        name: tuple(
            torch.empty(layer.shape(name, num_tokens), dtype=dtype, device=device)
            for layer in spec.layers
        )
        for name in spec.tensor_names
    }


def checksum(tensors: Tensors) -> float:
    """Return the sum over all elements in float64."""
    return float(sum(float(t.double().abs().sum()) for ts in tensors.values() for t in ts))

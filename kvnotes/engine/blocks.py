"""What one pass of a model reads of its caches, where it stands in memory.

Owns blocks (stretches of memory that attention reads at once) and reads (which part of a block
is seen, and by whom). Pieces of a cache that stand side by side in memory are one block, in
whatever order their tokens are; sequences that share a segment read it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvnotes.errors import EngineError
from kvnotes.rope import Rotary
from kvnotes.segment import Holder, Piece, Pieces, side_by_side

SPLIT_QUERIES = 64
"""From this many new tokens on, what they see of each other is read apart from what stood
before them: half of it is hidden, and a causal kernel leaves that out."""

Turns = tuple[Tensor | None, ...]
"""For each rotary embedding a matrix `[rotary_dim, rotary_dim]`, one for each query, or none."""

Rows = slice | Int[Tensor, " _"]
"""Queries of a pass: a stretch of them, which costs no copy, or any."""

ALL = slice(None)


def are_all(rows: Rows) -> bool:
    """Whether rows are all queries of a pass."""
    return isinstance(rows, slice) and rows == ALL


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Batch, head, position of the query, position of the key -> whether it is seen."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the new tokens of one sequence may read.

    Args:
        queries: Positions of its new tokens.
        pieces: All tokens they may see, their own included.
        own: Which of the last tokens each may see at most, where masks do not say it; these
            are new themselves.
    """

    queries: Int[Tensor, " queries"]
    pieces: Pieces
    own: Bool[Tensor, "queries last"] | None = None

    @property
    def num_keys(self) -> int:
        """How many tokens that are."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that stand side by side in one memory.

    Args:
        memory: That memory.
        slot: Where the first of them stands.
        places: Where each belongs; a row for each query where sequences differ.
        moves: Where the first of them belongs and how far it stands from there; one for all
            queries, or one for each.
        rows: The queries whose sequence holds it.
    """

    memory: Holder
    slot: int
    places: Int[Tensor, "rows keys"]
    moves: tuple[tuple[int, int], ...]
    rows: Rows

    @property
    def num_keys(self) -> int:
        """How many tokens it has."""
        return self.places.shape[1]


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a block, and who sees it.

    Args:
        memory: Where it stands.
        start: Its first slot.
        stop: The slot after its last.
        rows: The queries that see it: a stretch of them, or any.
        turns: How these are turned first, for each rotary embedding: a matrix for all of them,
            or one for each; None: they are not.
        causal: It is the queries' own tokens, and each sees those before it.
        seen: Which of it each query sees; None: all.
    """

    memory: Holder
    start: int
    stop: int
    rows: Rows
    turns: Turns
    causal: bool = False
    seen: Bool[Tensor, "rows keys"] | None = None
    _masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values, with a batch of one."""
        tensors, size = self.memory.tensors, self.stop - self.start
        keys = tensors["keys"][index].narrow(1, self.start, size)
        return keys[None], tensors["values"][index].narrow(1, self.start, size)[None]

    def mask(self, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Return an additive mask for packed queries, `[1, 1, groups x rows, keys]`.

        Hidden keys get the lowest number, not infinity: a query that sees nothing here has
        then no weight, where infinities would make it no number.
        """
        if self.seen is None:
            return None
        key = (groups, dtype)
        if key not in self._masks:
            hidden = ~self.seen.repeat(groups, 1)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
        return self._masks[key]


class Reads:
    """What the queries of one pass read, and what the pass says of it to its layers.

    A model hands masks and keys to its attention as tensors; in such a pass these are tokens
    by which attention finds what it is to read. Whatever a model does to them on the way makes
    them unknown, and the pass is refused.

    Args:
        readings: One for each sequence; their queries follow each other.
        rotaries: The model's rotary embeddings.
        ropes: For each layer, which of them its keys carry; None: none.
    """

    def __init__(
        self,
        readings: Sequence[Reading],
        rotaries: Sequence[Rotary],
        ropes: Sequence[int | None],
    ) -> None:
        self._readings = readings
        self._rotaries = rotaries
        self._ropes = ropes
        self._masks: dict[int, tuple[Tensor, tuple[Read, ...]]] = {}
        self._keys: dict[int, tuple[Tensor, int]] = {}
        self.queries = torch.cat([reading.queries for reading in readings])

    @property
    def num_keys(self) -> int:
        """The most tokens that a sequence sees."""
        return max(reading.num_keys for reading in self._readings)

    def seen(self, mask_function: MaskFunction) -> tuple[Read, ...]:
        """Return what is read where a mask of the model hides some of it."""
        return tuple(read for block in self._blocks for read in self._read(block, mask_function))

    def mask(self, mask_function: MaskFunction, dtype: torch.dtype) -> Tensor:
        """Return a token that stands for a mask, of its shape; it takes no memory."""
        token = torch.zeros((), dtype=dtype).expand(1, 1, len(self.queries), self.num_keys)
        self._masks[id(token)] = token, self.seen(mask_function)
        return token

    def of_mask(self, token: Tensor | None) -> tuple[Read, ...]:
        """Return what is read under a mask.

        Raises:
            EngineError: The model made the mask by itself.
        """
        found = self._masks.get(id(token))
        if found is None:
            raise _unknown("a mask")
        return found[1]

    def written(self, keys: Tensor, layer: int) -> None:
        """Say that these are the new keys of a layer, and stand in memory now."""
        self._keys[id(keys)] = keys, layer

    def layer_of(self, keys: Tensor) -> int:
        """Return the layer whose new keys these are.

        Raises:
            EngineError: The model made them from what is cached.
        """
        found = self._keys.get(id(keys))
        if found is None:
            raise _unknown("keys")
        return found[1]

    def turned(self, query: Tensor, read: Read, layer: int) -> Tensor:
        """Return the queries that read as they see keys where these stand, `[1, heads, rows, dim]`.

        In float32, rounded once.
        """
        rope, chosen = self._ropes[layer], query[:, :, read.rows]
        matrix = None if rope is None else read.turns[rope]
        if rope is None or matrix is None:
            return chosen
        spec = self._rotaries[rope].spec
        part = chosen[..., spec.start : spec.start + spec.rotary_dim].float()
        if matrix.dim() == 2:
            turned = (part @ matrix).to(query.dtype)
        else:
            turned = (part.transpose(1, 2) @ matrix).transpose(1, 2).to(query.dtype)
        if spec.rotary_dim == query.shape[-1]:
            return turned
        whole = chosen.clone()
        whole[..., spec.start : spec.start + spec.rotary_dim] = turned
        return whole

    @cached_property
    def _blocks(self) -> list[Block]:
        if len(self._readings) == 1:
            return blocks_of(self._readings[0].pieces)
        shared: dict[tuple[int, int, int], list[tuple[Block, Tensor]]] = {}
        first = 0
        for reading in self._readings:
            rows = torch.arange(first, first + len(reading.queries))
            first += len(reading.queries)
            for block in blocks_of(reading.pieces):
                key = (id(block.memory), block.slot, block.num_keys)
                shared.setdefault(key, []).append((block, rows))
        return [_together(found) for found in shared.values()]

    def _read(self, block: Block, mask_function: MaskFunction) -> list[Read]:
        queries = self.queries[block.rows]
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long)
        seen = mask_function(zero, zero, queries[None, None, :, None], block.places[None, None])
        seen = seen[0, 0].expand(len(queries), block.num_keys)
        turns = self._turns(block)
        own = self._readings[0].own
        if own is not None:
            seen = self._limited(block, seen, own)
        size = _in_order_at_end(block, queries, seen)
        reads = _cut(block, turns, seen[:, : block.num_keys - size])
        if size:
            stop = block.slot + block.num_keys
            reads.append(Read(block.memory, stop - size, stop, block.rows, turns, causal=True))
        return reads

    def _limited(self, block: Block, seen: Tensor, own: Tensor) -> Tensor:
        """Hide new tokens of a sequence from those that do not follow them."""
        last = self._readings[0].pieces[-1]
        here = last.memory is block.memory and last.slot_stop == block.slot + block.num_keys
        if not here:
            return seen
        before = seen.new_ones(seen.shape[0], seen.shape[1] - own.shape[1])
        return seen & torch.cat([before, own], 1)

    def _turns(self, block: Block) -> Turns:
        if not any(shift for _, shift in block.moves):
            return (None,) * len(self._rotaries)
        matrices = [[rotary.back(*move) for move in block.moves] for rotary in self._rotaries]
        return tuple(m[0] if len(m) == 1 else torch.stack(m) for m in matrices)


def _unknown(what: str) -> EngineError:
    return EngineError(
        f"the model gives its attention {what} that no pass of ours has made",
        hint="its K/V have to be copied into one piece",
    )


def blocks_of(pieces: Iterable[Piece]) -> list[Block]:
    """Return the blocks that pieces of one sequence make.

    Their order decides in which order results are merged, and so their last bits.
    """
    return [
        Block(
            found[0].memory,
            found[0].slot,
            torch.cat([torch.arange(piece.start, piece.stop) for piece in found])[None],
            ((found[0].start, found[0].shift),),
            ALL,
        )
        for found in side_by_side(pieces)
    ]


def _together(found: Sequence[tuple[Block, Tensor]]) -> Block:
    """Return one block for the queries of all sequences that hold it."""
    first = found[0][0]
    rows = torch.cat([rows for _, rows in found])
    moves = tuple(block.moves[0] for block, rows in found for _ in rows)
    places = torch.cat([block.places.expand(len(rows), -1) for block, rows in found])
    if len(set(moves)) == 1:
        moves, places = moves[:1], first.places
    return Block(first.memory, first.slot, places, moves, _as_rows(rows))


def _in_order_at_end(block: Block, queries: Tensor, seen: Tensor) -> int:
    """Return how many of a block's last tokens are the queries themselves, in order."""
    size = len(queries)
    if not SPLIT_QUERIES <= size <= block.num_keys or not are_all(block.rows):
        return 0
    own = seen[:, -size:]
    if not torch.equal(block.places[0, -size:], queries):
        return 0
    return size if torch.equal(own, own.new_ones(size, size).tril()) else 0


def _cut(block: Block, turns: Turns, seen: Tensor) -> list[Read]:
    """Return the read of a block's first tokens, without queries and ends that see nothing."""
    if not seen.numel():
        return []
    if bool(seen.all()):
        return [Read(block.memory, block.slot, block.slot + seen.shape[1], block.rows, turns)]
    queries, keys = seen.any(1).nonzero()[:, 0], seen.any(0).nonzero()[:, 0]
    if not len(queries):
        return []
    first, last = int(keys[0]), int(keys[-1]) + 1
    rows = block.rows
    if len(queries) < len(seen):
        chosen = _as_rows(queries)
        rows = _as_rows(queries + (rows.start or 0)) if isinstance(rows, slice) else rows[chosen]
        turns = tuple(m[chosen] if m is not None and m.dim() > 2 else m for m in turns)
        seen = seen[chosen]
    seen = seen[:, first:last]
    mask = None if bool(seen.all()) else seen
    return [Read(block.memory, block.slot + first, block.slot + last, rows, turns, seen=mask)]


def _as_rows(rows: Tensor) -> Rows:
    """Return sorted rows as a stretch, if they are one."""
    first, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(first, stop) if stop - first == len(rows) else rows

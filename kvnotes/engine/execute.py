"""Where a plan's result stands: what is read where it is, what is copied, what is computed.

Owns the memory side of executing a plan; the model side is in `hf`. There are two ways to
arrange a plan. *In place*: one buffer holds every token at the slot of its position, so what
moves is copied there. *Over views*: everything stays where it is, and a buffer takes what is
computed and what is too short to be read on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvnotes.errors import UnknownSegmentError
from kvnotes.plan import Compute, Layout, Plan, Reuse, Run, Step
from kvnotes.plan.lineage import extend, holds
from kvnotes.rope import Rotary, turn_keys
from kvnotes.segment import (
    Buffer,
    KVCache,
    KVSegment,
    Piece,
    Pieces,
    clip_pieces,
    join_pieces,
    narrowed,
    side_by_side,
)
from kvnotes.spec import ModelIdentity

MIN_PIECE_TOKENS = 64
"""Fewer tokens than this are copied rather than read where they stand: one more piece costs
each layer two small operations in every pass (SmolLM2: 0.06 ms), their copy as much once."""

MAX_PIECES = 8
"""More pieces than this are copied into one: every pass reads them all."""

Turns = Callable[[Reuse], tuple[Tensor, Tensor] | None]
"""Positions of a view's tokens at its source and at its target; None where slots say them."""

TakeBuffer = Callable[[int], Buffer]
"""Returns a buffer with room for so many tokens."""


def slots_say(view: Reuse) -> tuple[Tensor, Tensor] | None:
    """Positions of prompts without images."""
    return None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the tokens of a plan stand.

    Args:
        buffer: Takes what is computed and copied.
        pieces: Those of each step.
        copies: Views that are copied into the buffer first, each with its slot.
    """

    buffer: Buffer
    pieces: tuple[Pieces, ...]
    copies: tuple[tuple[Reuse, int], ...]

    @property
    def all_pieces(self) -> Pieces:
        """The pieces of the whole prompt."""
        return join_pieces(piece for pieces in self.pieces for piece in pieces)


@dataclass(frozen=True, slots=True)
class Start:
    """What a plan can start from, and write to.

    Args:
        take: Gives a new buffer.
        base: The cache it starts from.
        sources: Where its views come from.
        consume: `base` is not used again.
        reserve: Room that is wanted behind the result, in tokens.
    """

    take: TakeBuffer
    base: KVCache | None = None
    sources: Sequence[KVSegment] = ()
    consume: bool = False
    reserve: int = 0

    def may_write(self, buffer: Buffer, first: int) -> bool:
        """Whether slots of a buffer from `first` on are read by nobody who goes on."""
        return buffer.writable(first, except_for=self.base if self.consume else None)


def arrange_in_place(
    plan: Plan, start: Start, *, stays: Callable[[Reuse], bool] = lambda view: True
) -> Arrangement:
    """Put every token at the slot of its position in one buffer: that of the base, if it may be.

    It may if every slot to be written is read by no other live cache, and nothing that must
    be copied comes from that memory itself. Otherwise everything goes to a new buffer, from
    the source copies.

    Args:
        plan: The plan.
        start: What it starts from.
        stays: Whether a view that the base holds has the same positions there.
    """
    views = [step for step in plan.steps if isinstance(step, Reuse)]
    size, base = len(plan.token_ids) + start.reserve, start.base
    if base is not None and base.in_place and base.buffer.capacity >= size:
        missing = [v for v in views if not holds(base.layout, v) or not stays(v)]
        first = _first_written(plan, missing)
        mixed = any(find_source(v.run, start.sources).buffer is base.buffer for v in missing)
        if not mixed and start.may_write(base.buffer, first):
            if first < base.length:
                base.close()
            return _in_place(plan, base.buffer, missing)
    return _in_place(plan, start.take(size), views)


def _in_place(plan: Plan, buffer: Buffer, missing: Sequence[Reuse]) -> Arrangement:
    pieces = tuple(
        (Piece(buffer, step.target_start, step.target_start, step.num_tokens),)
        for step in plan.steps
    )
    return Arrangement(buffer, pieces, tuple((view, view.target_start) for view in missing))


def _first_written(plan: Plan, missing: Sequence[Reuse]) -> int:
    written = [view.target_start for view in missing]
    written += [step.target_start for step in plan.steps if isinstance(step, Compute)]
    return min(written, default=len(plan.token_ids))


def arrange_over_views(
    plan: Plan, start: Start, *, turns: Turns = slots_say, always: bool = False
) -> Arrangement | None:
    """Read what a plan reuses where it stands; None if that makes too many pieces.

    What is computed goes behind everything that is read in the buffer of the base, if nobody
    else reads that, or to a new one. Pieces that are too short to be read go there as well.

    Args:
        plan: The plan.
        start: What it starts from.
        turns: See `place`; what turns about several axes is copied.
        always: However short and however many the pieces are.
    """
    least, base = 1 if always else MIN_PIECE_TOKENS, start.base
    standing = [_standing(step, base, start.sources, turns) for step in plan.steps]
    buffer, first = None, 0
    if base is not None:
        first = (
            _last_read(plan, base.buffer, standing, start.sources) if start.consume else base.end
        )
        found = _without_short(standing, base.buffer, least)
        room = base.buffer.capacity - first >= _num_missing(plan, found) + start.reserve
        if room and start.may_write(base.buffer, first):
            buffer = base.buffer
    if buffer is None:
        found = _without_short(standing, None, least)
        found = _without_tail(found, _num_missing(plan, found))
        first = 0
    kept = [piece for held in found for piece in held or ()]
    if len(side_by_side(kept)) >= MAX_PIECES and not always:
        return None
    if buffer is None:
        buffer = start.take(_num_missing(plan, found) + start.reserve)
    elif base is not None and first < base.end:
        base.close()
    slot, pieces, copies = first, [], []
    for step, held in zip(plan.steps, found, strict=True):
        if held is None:
            held = (Piece(buffer, slot, step.target_start, step.num_tokens),)
            if isinstance(step, Reuse):
                copies.append((step, slot))
            slot += step.num_tokens
        pieces.append(held)
    return Arrangement(buffer, tuple(pieces), tuple(copies))


def _standing(
    step: Step, base: KVCache | None, sources: Sequence[KVSegment], turns: Turns
) -> Pieces | None:
    """Return where a step's tokens can be read; None if they have to be written."""
    if isinstance(step, Compute):
        return None
    axes = turns(step)
    if axes is not None and not torch.equal(*axes):
        return None
    if base is not None and holds(base.layout, step):
        return clip_pieces(base.pieces, step.target_start, step.target_stop)
    return (find_source(step.run, sources).piece(step),)


def _last_read(
    plan: Plan, buffer: Buffer, standing: Sequence[Pieces | None], sources: Sequence[KVSegment]
) -> int:
    """Return the slot of a buffer behind everything in it that a plan needs."""
    stops = [p.slot_stop for held in standing for p in held or () if p.memory is buffer]
    for step in plan.steps:
        if isinstance(step, Reuse):
            segment = find_source(step.run, sources)
            if segment.buffer is buffer:
                stops.append(segment.slot + step.source_stop)
    return max(stops, default=0)


def _without_short(
    standing: Sequence[Pieces | None], buffer: Buffer | None, least: int
) -> list[Pieces | None]:
    """Have pieces of fewer tokens written, but for those in a buffer that is read anyway."""
    short = [
        p
        for p in join_pieces(p for held in standing for p in held or ())
        if p.num_tokens < least and p.memory is not buffer
    ]

    def is_short(piece: Piece) -> bool:
        return any(p.start <= piece.start and piece.stop <= p.stop for p in short)

    return [None if held and all(map(is_short, held)) else held for held in standing]


def _without_tail(standing: Sequence[Pieces | None], num_new: int) -> list[Pieces | None]:
    """Have the last pieces written that are no longer than all behind them together.

    A token is copied again only when what follows it has doubled, and the number of pieces
    grows with the logarithm of what was appended. Compiled segments stay where they are.
    """
    result = list(standing)
    for index in range(len(result) - 1, -1, -1):
        held = result[index]
        if held is None:
            continue
        size = sum(p.num_tokens for p in held)
        if size > num_new or not all(isinstance(p.memory, Buffer) for p in held):
            break
        result[index] = None
        num_new += size
    return result


def _num_missing(plan: Plan, standing: Sequence[Pieces | None]) -> int:
    return sum(s.num_tokens for s, held in zip(plan.steps, standing, strict=True) if held is None)


def find_source(run: Run, sources: Sequence[KVSegment]) -> KVSegment:
    """Return the segment that holds a run.

    Raises:
        UnknownSegmentError: None of the sources does.
    """
    for segment in sources:
        if segment.run is run:
            return segment
    for segment in sources:
        if segment.run == run:
            return segment
    raise UnknownSegmentError(
        f"the plan reuses run {run.digest[:12]} of {len(run)} tokens, {len(sources)} other "
        "segments were given",
        hint="pass the compiled segment, or plan again from the cache that is given",
    )


def place(
    view: Reuse,
    sources: Sequence[KVSegment],
    buffer: Buffer,
    rotaries: Sequence[Rotary],
    *,
    slot: int | None = None,
    turns: Turns = slots_say,
) -> None:
    """Copy a view into a buffer, moved to its target positions, from the source copy."""
    segment = find_source(view.run, sources)
    first = view.target_start if slot is None else slot
    goal = buffer.part(first, first + view.num_tokens)
    part = slice(view.source_start, view.source_stop)
    moving: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for name, layers in segment.tensors.items():
        for spec, layer, target in zip(
            segment.identity.spec.layers, layers, goal[name], strict=True
        ):
            rope = spec.rope_of(name) if view.moved else None
            if rope is None:
                target.copy_(layer[:, part])
            else:
                originals, targets = moving.setdefault(rope, ([], []))
                originals.append(layer[:, part])
                targets.append(target)
    source = view.run.start + view.source_start
    axes = turns(view) if moving else None
    for rope, (originals, targets) in moving.items():
        if axes is None:
            turn = rotaries[rope].shift(source, view.target_start, view.num_tokens)
        else:
            turn = rotaries[rope].turn(*axes)
        turn_keys(originals, turn, rotaries[rope].spec, targets)


def settle(
    plan: Plan, sources: Sequence[KVSegment], arrangement: Arrangement, identity: ModelIdentity
) -> KVCache:
    """Return the cache a plan leaves; runs that continue each other are joined."""
    layout: Layout = ()
    held: list[KVSegment] = []
    for step, view, pieces in zip(plan.steps, plan.layout, arrangement.pieces, strict=True):
        for piece in pieces:
            if isinstance(step, Compute):
                part, segment = view, arrangement.buffer.segment(view.run, piece.slot, identity)
            else:
                part = view.clip(piece.start, piece.stop)
                part, segment = _source_of(part, find_source(view.run, sources), piece)
            layout, held = _append(layout, held, part, segment)
    return KVCache(layout, held, arrangement.all_pieces, arrangement.buffer, identity)


def _source_of(view: Reuse, segment: KVSegment, piece: Piece) -> tuple[Reuse, KVSegment]:
    """Return a view of a cache and its source, no longer than the view where memory may change.

    A copy that has not moved is as good as its source; what has moved keeps the source copy,
    to be moved from there again.
    """
    view = replace(view, run=segment.run)
    if segment.buffer is None or view.moved or not isinstance(piece.memory, Buffer):
        return narrowed(view, segment)
    run = view.run.cut(view.source_start, view.source_stop)
    return run.whole(), piece.memory.segment(run, piece.slot, segment.identity)


def _append(
    layout: Layout, held: list[KVSegment], view: Reuse, segment: KVSegment
) -> tuple[Layout, list[KVSegment]]:
    """Add a view; if it continues the one before in the same memory, make one run of both."""
    if layout and not layout[-1].moved and not view.moved:
        last, before = layout[-1], held[-1]
        buffer = before.buffer
        ends_at, begins_at = before.slot + last.source_stop, segment.slot + view.source_start
        if buffer is not None and buffer is segment.buffer and ends_at == begins_at:
            joined = extend(extend((), last), view)
            if len(joined) == 1:
                slot = before.slot + last.source_start
                whole = buffer.segment(joined[0].run, slot, segment.identity)
                return (*layout[:-1], joined[0]), [*held[:-1], whole]
    return (*layout, view), [*held, segment]

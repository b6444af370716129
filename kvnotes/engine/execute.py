"""Where a plan's result goes: the buffer it may use, what is copied, what it leaves.

Owns the memory side of executing a plan; the model side is in `hf`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvnotes.errors import UnknownSegmentError
from kvnotes.plan import Compute, Layout, Plan, Reuse, Run
from kvnotes.plan.lineage import extend, holds
from kvnotes.rope import Rotary, turn_keys
from kvnotes.segment import Buffer, KVCache, KVSegment
from kvnotes.spec import ModelIdentity


@dataclass(frozen=True, slots=True)
class Target:
    """Buffer to write into (None: allocate) and the views it does not hold yet."""

    buffer: Buffer | None
    missing: tuple[Reuse, ...]


Turns = Callable[[Reuse], tuple[Tensor, Tensor] | None]
"""Positions of a view's tokens at its source and at its target; None where slots say them."""


def slots_say(view: Reuse) -> tuple[Tensor, Tensor] | None:
    """Positions of prompts without images."""
    return None


def target_buffer(
    plan: Plan,
    base: KVCache | None,
    sources: Sequence[KVSegment],
    *,
    consume: bool,
    stays: Callable[[Reuse], bool] = lambda view: True,
) -> Target:
    """Decide whether a plan may run in the memory of `base`.

    It may if every slot to be written is read by no other live cache, and nothing that must
    be copied comes from that memory itself. Otherwise everything goes to a new buffer, from
    the source copies.

    Args:
        plan: The plan.
        base: The cache it starts from.
        sources: Where its views come from.
        consume: `base` is not used again.
        stays: Whether a view that `base` holds has the same positions there.
    """
    views = tuple(step for step in plan.steps if isinstance(step, Reuse))
    if base is None or base.buffer.capacity < len(plan.token_ids):
        return Target(None, views)
    missing = tuple(v for v in views if not holds(base.layout, v) or not stays(v))
    if any(find_source(view.run, sources).buffer is base.buffer for view in missing):
        return Target(None, views)
    written = [view.target_start for view in missing]
    written += [step.target_start for step in plan.steps if isinstance(step, Compute)]
    first = min(written, default=len(plan.token_ids))
    if not base.buffer.writable(first, except_for=base if consume else None):
        return Target(None, views)
    if first < base.length:
        base.close()
    return Target(base.buffer, missing)


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
    plan: Plan, sources: Sequence[KVSegment], buffer: Buffer, identity: ModelIdentity
) -> KVCache:
    """Return the cache a plan leaves in `buffer`; runs that continue each other are joined."""
    layout: Layout = ()
    held: list[KVSegment] = []
    for step, view in zip(plan.steps, plan.layout, strict=True):
        if isinstance(step, Compute):
            segment = buffer.segment(view.run, view.target_start, identity)
        else:
            segment = find_source(view.run, sources)
            view = replace(view, run=segment.run)
            if segment.buffer is not None and not view.moved:
                # an unmoved copy is as good as its source, whose memory may be written or freed
                view = view.run.cut(view.source_start, view.source_stop).whole()
                segment = buffer.segment(view.run, view.target_start, identity)
        layout, held = _append(layout, held, view, segment, buffer)
    return KVCache(layout, held, buffer, identity)


def _append(
    layout: Layout, held: list[KVSegment], view: Reuse, segment: KVSegment, buffer: Buffer
) -> tuple[Layout, list[KVSegment]]:
    """Add a view; if it continues the one before in the same memory, make one run of both."""
    if layout and not layout[-1].moved and not view.moved:
        previous = held[-1]
        if _stands_in(previous, layout[-1], buffer) and _stands_in(segment, view, buffer):
            joined = extend(extend((), layout[-1]), view)
            if len(joined) == 1:
                run = joined[0].run
                slot = joined[0].target_start
                return (*layout[:-1], joined[0]), [
                    *held[:-1],
                    buffer.segment(run, slot, segment.identity),
                ]
    return (*layout, view), [*held, segment]


def _stands_in(segment: KVSegment, view: Reuse, buffer: Buffer) -> bool:
    """Whether the view's source is this buffer, at the very slots of the view."""
    return segment.buffer is buffer and segment.slot + view.source_start == view.target_start

"""Plans that turn a live cache into the cache of another prompt.

Owns the strategies, the alignment of two token sequences, and the assembly of steps.
An edit, a deletion, a move and a new turn are the same thing here: the live layout, the
prompt wanted, and which live tokens may be kept.

    live     [header][policy............][order: pending][turn 1]
    wanted   [header][policy............][order: shipped to Oslo][turn 1][erratum][turn 2]
    suffix    R R R R R R R R R R R R R R R R C C C C C C C C C C C C C C C C C C C C C C
    refresh   R R R R R R R R R R R R R R R R C C C C C C C C R' R' R' C C C C C C C C C
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal, get_args

from kvnotes.errors import PlanError, nearest
from kvnotes.plan.lineage import Layout, Reuse, canonical, clip, common_prefix, num_equal
from kvnotes.plan.steps import Compute, Plan, Step

Strategy = Literal[
    "auto",
    "reprefill",
    "suffix",
    "refresh",
    "selective",
    "erratum",
    "refresh+erratum",
    "swap",
    "stale",
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
"""All strategy names; `stale` exists for measuring and no session offers it."""

MAX_DIFF_TOKENS = 512
"""Longest stretch that is compared token by token; beyond it the stretch is recomputed.
An edit touches a value and its neighbours; a longer difference is another text."""


def check_strategy(name: str, *, allow_stale: bool = False) -> Strategy:
    """Return `name` as a strategy.

    Raises:
        PlanError: No such strategy, or `stale` outside a measurement.
    """
    offered = [s for s in STRATEGIES if allow_stale or s != "stale"]
    if name not in offered:
        raise PlanError(f"unknown strategy {name!r}", hint=nearest(name, offered))
    return name  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a prompt with an identity that outlives edits: a message, in tokens.

    Args:
        key: The same in both prompts if it is the same part.
        start: First token.
        stop: Token after the last.
        anchors: Ranges inside it that are known to change, in order (field occurrences).
    """

    key: str
    start: int
    stop: int
    anchors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """Equal tokens: `[source_start, source_start + num_tokens)` live, at `target_start` wanted."""

    source_start: int
    target_start: int
    num_tokens: int


def align(
    live_ids: Sequence[int],
    live_blocks: Sequence[Block],
    wanted_ids: Sequence[int],
    wanted_blocks: Sequence[Block],
) -> tuple[Match, ...]:
    """Find which live tokens are which wanted tokens.

    Blocks are paired by key, also when they have moved; inside a pair the stretches
    between anchors are compared, so a value that occurs elsewhere is never confused.
    The result is sorted by target and never claims tokens that differ.
    """
    live = {block.key: block for block in live_blocks}
    matches: list[Match] = []
    for block in wanted_blocks:
        other = live.get(block.key)
        if other is not None:
            matches.extend(_align_block(live_ids, other, wanted_ids, block))
    return _join(matches)


def _align_block(
    live_ids: Sequence[int], live: Block, wanted_ids: Sequence[int], wanted: Block
) -> Iterable[Match]:
    live_cuts = [(live.start, live.start), *live.anchors, (live.stop, live.stop)]
    wanted_cuts = [(wanted.start, wanted.start), *wanted.anchors, (wanted.stop, wanted.stop)]
    if len(live_cuts) != len(wanted_cuts):
        live_cuts, wanted_cuts = (
            live_cuts[:: len(live_cuts) - 1],
            wanted_cuts[:: len(wanted_cuts) - 1],
        )
    for i, (a, b) in enumerate(zip(live_cuts, wanted_cuts, strict=True)):
        if i:  # the stretch before this anchor
            yield from _diff(
                live_ids, live_cuts[i - 1][1], a[0], wanted_ids, wanted_cuts[i - 1][1], b[0]
            )
        yield from _diff(live_ids, a[0], a[1], wanted_ids, b[0], b[1])


def _diff(
    live_ids: Sequence[int], a: int, a_stop: int, wanted_ids: Sequence[int], b: int, b_stop: int
) -> Iterable[Match]:
    """Match two stretches: common head, common tail, and what SequenceMatcher finds between."""
    head = num_equal(live_ids[a:a_stop], wanted_ids[b:b_stop])
    if head:
        yield Match(a, b, head)
    a, b = a + head, b + head
    tail = num_equal(live_ids[a:a_stop][::-1], wanted_ids[b:b_stop][::-1])
    middle_a, middle_b = live_ids[a : a_stop - tail], wanted_ids[b : b_stop - tail]
    if middle_a and middle_b and max(len(middle_a), len(middle_b)) <= MAX_DIFF_TOKENS:
        matcher = SequenceMatcher(None, middle_a, middle_b, autojunk=False)
        for found in matcher.get_matching_blocks():
            if found.size:
                yield Match(a + found.a, b + found.b, found.size)
    if tail:
        yield Match(a_stop - tail, b_stop - tail, tail)


def _join(matches: Iterable[Match]) -> tuple[Match, ...]:
    """Sort by target and merge neighbours that continue each other."""
    result: list[Match] = []
    for match in sorted(matches, key=lambda m: m.target_start):
        last = result[-1] if result else None
        if (
            last is not None
            and last.target_start + last.num_tokens == match.target_start
            and last.source_start + last.num_tokens == match.source_start
        ):
            result[-1] = Match(
                last.source_start, last.target_start, last.num_tokens + match.num_tokens
            )
        else:
            result.append(match)
    return tuple(result)


def plan_suffix(live: Layout, ideal: Plan) -> Plan:
    """Keep the longest live prefix that the ideal plan would have made, rebuild the rest.

    Exact whenever `ideal` is; with spliced segments it equals composing from nothing.
    """
    kept = common_prefix(canonical(live), ideal.canonical_layout)
    kept = min(kept, len(ideal.token_ids) - 1)
    steps = (*clip(live, 0, kept), *_slice_steps(ideal.steps, kept, len(ideal.token_ids)))
    return Plan(ideal.token_ids, _joined(steps), "suffix", ideal.notes, live)


def plan_keep(
    live: Layout,
    matches: Sequence[Match],
    ideal: Plan,
    *,
    strategy: str,
    recompute: Iterable[int] = (),
) -> Plan:
    """Keep every matched live token; build the rest as the ideal plan would.

    Used by `refresh`, `erratum`, `refresh+erratum`, `selective`, `swap`, by deletions and
    moves. What is kept still holds the notes it took before the change: the plan is
    approximate, and its lineage says so.

    Args:
        live: Layout of the cache now.
        matches: Live tokens that may be kept (see `align`).
        ideal: The plan that builds the wanted prompt from nothing.
        strategy: Name for the plan.
        recompute: Wanted positions that are computed although they match (chosen notes).
    """
    forced = set(recompute)
    steps: list[Step] = []
    position = 0
    for match in matches:
        steps.extend(_between(ideal, position, match.target_start))
        steps.extend(_keep(live, match, forced, ideal.token_ids))
        position = match.target_start + match.num_tokens
    steps.extend(_between(ideal, position, len(ideal.token_ids)))
    if steps and not isinstance(steps[-1], Compute):
        last = len(ideal.token_ids) - 1
        steps = [*_slice_steps(steps, 0, last), Compute(last, ideal.token_ids[last:])]
    return Plan(ideal.token_ids, _joined(steps), strategy, ideal.notes, live)


def _keep(live: Layout, match: Match, forced: set[int], ids: tuple[int, ...]) -> Iterable[Step]:
    """Views of the matched live tokens, moved to the target, with forced positions computed."""
    shift = match.target_start - match.source_start
    for view in clip(live, match.source_start, match.source_start + match.num_tokens):
        start, stop = view.target_start + shift, view.target_stop + shift
        moved = type(view)(view.run, view.source_start, view.source_stop, start)
        position = start
        while position < stop:
            end = position
            inside = position in forced
            while end < stop and (end in forced) == inside:
                end += 1
            if inside:
                yield Compute(position, ids[position:end])
            else:
                yield moved.clip(position, end)
            position = end


def _between(ideal: Plan, start: int, stop: int) -> Iterable[Step]:
    """Build what lies between kept tokens: whole splices, computation for everything else.

    A splice of which kept tokens hold a part is not cut to size: its rest would stand behind
    tokens it has never seen.
    """
    for step in ideal.steps:
        low, high = max(start, step.target_start), min(stop, step.target_stop)
        if low >= high:
            continue
        if isinstance(step, Compute) or (low, high) != (step.target_start, step.target_stop):
            yield Compute(low, ideal.token_ids[low:high])
        else:
            yield step


def _slice_steps(steps: Sequence[Step], start: int, stop: int) -> Iterable[Step]:
    """Return the parts of steps that lie in target positions `[start, stop)`."""
    for step in steps:
        low, high = max(start, step.target_start), min(stop, step.target_stop)
        if low >= high:
            continue
        if isinstance(step, Compute):
            offset = step.target_start
            yield Compute(low, step.token_ids[low - offset : high - offset])
        else:
            yield step.clip(low, high)


def plan_without(plan: Plan, unfit: Collection[Reuse], note: str) -> Plan:
    """Compute what may not be reused where a plan puts it, and say so.

    Args:
        plan: Any plan.
        unfit: Those of its steps that may not stand at their places.
        note: Added to the plan's notes if there is one.
    """
    if not unfit:
        return plan
    bad = set(map(id, unfit))
    steps = [Compute(s.target_start, s.token_ids) if id(s) in bad else s for s in plan.steps]
    return replace(plan, steps=_joined(steps), notes=(*plan.notes, note))


def _joined(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Merge neighbouring Compute steps, and views that continue the same run."""
    result: list[Step] = []
    for step in steps:
        last = result[-1] if result else None
        if isinstance(last, Compute) and isinstance(step, Compute):
            result[-1] = Compute(last.target_start, last.token_ids + step.token_ids)
        elif (
            last is not None
            and not isinstance(last, Compute)
            and not isinstance(step, Compute)
            and last.run is step.run
            and last.source_stop == step.source_start
            and last.shift == step.shift
        ):
            result[-1] = type(last)(
                last.run, last.source_start, step.source_stop, last.target_start
            )
        else:
            result.append(step)
    return tuple(result)

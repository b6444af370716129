"""Plans that build a prompt from nothing but compiled segments and computation.

Owns `Splice` and `plan_compose`: the *ideal* plan of a prompt. Edits are measured
against it: whatever the live cache holds that the ideal plan would not is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvnotes.errors import LineageError, PlanError
from kvnotes.plan.lineage import Layout, Reuse, Run
from kvnotes.plan.steps import Compute, Plan, Step

DEFAULT_NUM_SEAM_TOKENS = 1
"""Seam tokens recomputed at each splice: on SmolLM2 one takes the mean KL of the retail
policy from 0.0068 to 0.0011 nats (`docs/benchmarks.md`); a scorecard overrides it."""

FIELD_BEFORE_SEGMENT = "field_before_segment"
"""Note of a plan that splices a segment behind a field: its tokens hold no notes about it."""


@dataclass(frozen=True, slots=True)
class Splice:
    """A compiled run that stands in a prompt.

    Args:
        name: Name of the segment, for notes and reports.
        run: The compiled run, behind its declared preamble.
        source_start: First token of the run that is used.
        source_stop: Token after the last one used.
        target_start: Position of that first token in the prompt.
        field_before: A field stands before the segment and not in its preamble.
    """

    name: str
    run: Run
    source_start: int
    source_stop: int
    target_start: int
    field_before: bool = False


def check_compiled(name: str, run: Run, preamble_ids: Sequence[int]) -> None:
    """Refuse a run that was not computed behind its own declared preamble alone.

    Raises:
        LineageError: `run` saw other tokens, for example an earlier conversation.
    """
    allowed: Layout = Run(tuple(preamble_ids)).whole().run.after if preamble_ids else ()
    if run.start != len(preamble_ids) or run.context != allowed:
        raise LineageError(
            f"segment {name!r} was computed at position {run.start} behind "
            f"{_describe(run.context)}, its declared preamble has {len(preamble_ids)} tokens",
            hint="a slice of a conversation is no segment; compile the text on its own",
        )


def plan_compose(
    token_ids: Sequence[int],
    splices: Sequence[Splice],
    *,
    num_seam_tokens: int = DEFAULT_NUM_SEAM_TOKENS,
) -> Plan:
    """Plan a prompt from compiled segments; everything else is computed.

    The first `num_seam_tokens` of each moved segment are computed with the real prefix in
    view. A segment whose preamble is exactly the prompt before it stays in place and needs
    no seam. The last token is always computed, so that the plan yields logits.

    Raises:
        PlanError: Splices overlap or are out of order, or the seam is negative.
    """
    if num_seam_tokens < 0:
        raise PlanError(
            f"num_seam_tokens is {num_seam_tokens}, the least is 0", hint="use 0 or more"
        )
    ids = tuple(token_ids)
    steps: list[Step] = []
    notes: list[str] = []
    position = 0
    for splice in sorted(splices, key=lambda item: item.target_start):
        if splice.target_start < position:
            raise PlanError(
                f"segment {splice.name!r} starts at token {splice.target_start}, the one before "
                f"it ends at {position}",
                hint="segments may not overlap",
            )
        view = Reuse(splice.run, splice.source_start, splice.source_stop, splice.target_start)
        in_place = not view.moved and _continues(steps, view, ids)
        seam = 0 if in_place else num_seam_tokens
        start = min(view.target_start + seam, view.target_stop)
        stop = min(view.target_stop, len(ids) - 1)
        if start >= stop:
            continue
        if start > position:
            steps.append(Compute(position, ids[position:start]))
        steps.append(view.clip(start, stop))
        position = stop
        if splice.field_before:
            notes.append(f"{FIELD_BEFORE_SEGMENT}:{splice.name}")
    if position < len(ids):
        steps.append(Compute(position, ids[position:]))
    return Plan(ids, tuple(steps), "compose", tuple(notes))


def _continues(steps: Sequence[Step], view: Reuse, ids: tuple[int, ...]) -> bool:
    """Whether the run was computed behind exactly the tokens that stand before it."""
    run = view.run.cut(view.source_start, view.source_stop)
    if any(isinstance(step, Reuse) for step in steps) and run.context:
        return False
    before = ids[: view.target_start]
    return run.context == (Run(before).whole(),) if before else not run.context


def _describe(context: Layout) -> str:
    if not context:
        return "nothing"
    return f"{sum(view.num_tokens for view in context)} other tokens"

"""Which notes to recompute, given scores. Numbers in, positions out; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvnotes.errors import PlanError

DEFAULT_NOTE_SHARE = 0.15
"""Share of the tokens after an edit that `selective` recomputes, as CacheBlend does."""


def select_notes(
    scores: Sequence[float], positions: Sequence[int], num_notes: int
) -> tuple[int, ...]:
    """Return the `num_notes` positions with the highest scores, in order of position.

    Args:
        scores: One score per position; higher means that the note has changed more.
        positions: The positions scored.
        num_notes: How many to take; more than there are means all.

    Raises:
        PlanError: `scores` and `positions` differ in length, or `num_notes` is negative.
    """
    if len(scores) != len(positions):
        raise PlanError(
            f"{len(scores)} scores for {len(positions)} positions", hint="score each position once"
        )
    if num_notes < 0:
        raise PlanError(f"num_notes is {num_notes}, the least is 0", hint="use 0 or more")
    ranked = sorted(zip(scores, positions, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return tuple(sorted(position for _, position in ranked[:num_notes]))

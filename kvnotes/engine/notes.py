"""How much the notes of a cache deviate from those of a changed prompt."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from kvnotes.plan import Match

NOTE_DEPTH_SHARE = 0.1
"""Scoring notes runs this share of the layers: notes differ from the second layer on, and
the budget of a cheap check leaves no more."""


def deviations(
    fresh: Float[Tensor, "kv_heads new width"],
    held: Float[Tensor, "kv_heads slots width"],
    matches: Sequence[Match],
    start: int,
) -> list[tuple[int, float]]:
    """Return the squared distance of each kept token from what it would be now.

    Args:
        fresh: One layer of the changed prompt, from `start` on.
        held: The same layer of the cache, by position.
        matches: Which tokens of the cache stand where in the changed prompt.
        start: Tokens before it are the same in both.

    Source: CacheBlend (Yao et al. 2024), key deviation.
    """
    scores: list[tuple[int, float]] = []
    for match in matches:
        skip = max(0, start - match.target_start)
        low, size = match.target_start + skip, match.num_tokens - skip
        if size <= 0:
            continue
        source = held[:, match.source_start + skip : match.source_start + match.num_tokens]
        gap = (fresh[:, low - start : low - start + size].float() - source.float()).pow(2)
        scores.extend(zip(range(low, low + size), gap.sum((0, 2)).tolist(), strict=True))
    return scores

"""Does a file hold what its text says? Its K/V computed again, and compared.

A digest says that a file is the one that was written, a signature who wrote it; neither
says that its K/V are those of its tokens, and K/V can hold what a text does not say. Owns
the comparison; needs the model that the file claims.

    whole      everything is computed from nothing: proves the file, costs a prefill
    sampled    blocks of tokens are computed with the file's own K/V before them: a token whose
               K/V were changed is found if it is in a block
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvnotes.engine.base import Engine
from kvnotes.errors import PlanError
from kvnotes.plan import Compute, Plan, Reuse, Step
from kvnotes.prompt import PromptTokenizer
from kvnotes.segment import KVSegment, Tensors
from kvnotes.store import SegmentHeader

BLOCK = 16
"""Tokens of one sampled block."""
DEFAULT_SHARE = 0.1
"""Share of the tokens that `sampled` computes."""

KV_TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
"""Largest difference of keys or values, relative to the largest of their layer: sums in another
order, layer after layer. A value of another text is off by 0.5 and more."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Outcome of computing a segment again.

    Args:
        num_checked: Tokens that were computed.
        num_tokens: Tokens of the segment.
        max_gap: Largest difference, relative to the largest value of its layer.
        allowed: What rounding explains, with the error that the file states itself.
        layer: Where the largest difference is.
        position: Token of the segment where it is.
    """

    num_checked: int
    num_tokens: int
    max_gap: float
    allowed: float
    layer: int
    position: int

    @property
    def agreed(self) -> bool:
        """Whether the K/V are those of the tokens, as far as was checked."""
        return self.max_gap <= self.allowed


def recompute(
    engine: Engine,
    segment: KVSegment,
    *,
    share: float | None = None,
    stated_error: float = 0.0,
    seed: int | None = None,
) -> Recomputed:
    """Compute a segment's K/V again and compare.

    Args:
        engine: Of the model that the segment claims.
        segment: What a file holds.
        share: Share of the tokens to compute, in blocks at random places; None computes all.
        stated_error: Error that the file says its rounding has made.
        seed: Chooses the places; None cannot be foreseen by whoever made the file.

    Raises:
        SpecMismatchError: Another model; names what differs.
        PlanError: The share is not above 0 and at most 1.
    """
    engine.identity.check_same(segment.identity, "the segment")
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"a share of {share} is not above 0 and at most 1", hint="use 0.1")
    allowed = KV_TOLERANCE.get(engine.spec.dtype, 0.0) + stated_error
    ids, preamble = segment.run.token_ids, segment.preamble_ids
    if share is None:
        own = engine.compile(ids, preamble)
        places = list(range(len(ids)))
        return _compared(segment, own.tensors, places, len(ids), allowed)
    places = _sample(len(ids), share, random.Random(seed))
    plan = _scattered(segment, places)
    buffer = engine.gathered(engine.execute(plan, segments=[segment]).cache).buffer
    slots = torch.tensor([len(preamble) + place for place in places])
    computed: Tensors = {
        name: tuple(layer[:, slots] for layer in layers) for name, layers in buffer.tensors.items()
    }
    return _compared(segment, computed, places, len(ids), allowed)


def text_agrees(header: SegmentHeader, text: str | None, tokenizer: PromptTokenizer) -> bool | None:
    """Whether a file's text has the file's tokens; None where that cannot be said.

    Args:
        header: The file's header.
        text: The text, if it is here.
        tokenizer: The model's.
    """
    if text is None or header.provenance.tokenizer != tokenizer.identity:
        return None
    return tokenizer.encode(text) == header.token_ids


def _sample(size: int, share: float, chooser: random.Random) -> list[int]:
    """Choose blocks of tokens; the first token is always among them."""
    blocks = list(range(0, size, BLOCK))
    count = max(1, round(share * len(blocks)))
    chosen = {0, *chooser.sample(blocks, count)}
    return [place for start in sorted(chosen) for place in range(start, min(start + BLOCK, size))]


def _scattered(segment: KVSegment, places: Sequence[int]) -> Plan:
    """Compute the preamble and the chosen tokens; take everything else from the segment."""
    preamble, ids = segment.preamble_ids, segment.run.token_ids
    first = len(preamble)
    steps: list[Step] = [Compute(0, preamble)] if preamble else []
    chosen, start = set(places), 0
    while start < len(ids):
        stop = start
        while stop < len(ids) and (stop in chosen) == (start in chosen):
            stop += 1
        if start in chosen:
            steps.append(Compute(first + start, ids[start:stop]))
        else:
            steps.append(Reuse(segment.run, start, stop, first + start))
        start = stop
    return Plan((*preamble, *ids), tuple(steps), "recompute")


def _compared(
    segment: KVSegment,
    own: Tensors,
    places: Sequence[int],
    num_tokens: int,
    allowed: float,
) -> Recomputed:
    """Compare what was computed at some places with what the segment holds there."""
    index = torch.tensor(places)
    worst, layer, position = -1.0, 0, 0
    for name, layers in segment.tensors.items():
        for number, held in enumerate(layers):
            if not held.numel():
                continue
            scale = held.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            gaps = (own[name][number].float() - held[:, index].float()).abs().amax((0, 2)) / scale
            largest = float(gaps.max())
            if not largest <= worst:  # also what is no number
                worst, layer, position = largest, number, places[int(gaps.argmax())]
    return Recomputed(len(places), num_tokens, worst, allowed, layer, position)

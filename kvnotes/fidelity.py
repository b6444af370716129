"""How close a result is to a reference, and the references themselves.

Owns `compare`, `FidelityReport`, the three references and the floor. Chooses no strategy.

    mask_reference         the same visibility in one forward: is the code right?
    same_tokens_reference  a cold prefill of the live tokens: what does stale K/V cost?
    clean_reference        a cold prefill of the current values: what does an edit cost?

The first two are made from a layout here; the third needs the clean prompt and is made by
whoever renders prompts. A distance means little without its *floor*: the same distance
between two equally exact computations, here one-shot prefill against prefix hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.base import Engine, Execution
from kvnotes.plan import (
    Compute,
    Layout,
    Plan,
    Run,
    canonical,
)
from kvnotes.segment import KVCache

MECHANICAL_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest logit gap to `mask_reference`, relative to the largest |logit|, at distances up to
8k. float32: rounding of sums in another order is about 2e-6; half precisions: their unit
roundoff (4e-3, 5e-4) times the square root of the layers' depth, rounded up."""

LOAD_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-1, "float16": 2e-2}
"""The same for the few tokens of the gate, which tells right code from wrong: keys that are not
rotated are off by 0.06 or more. Rounding of few tokens in half precision varies: one tiny bf16
model in ten is above its mechanical tolerance, SmolLM2 at half of it."""

MIN_FLOOR_CUTS = 5
"""Fewer cuts than this make no floor (MEASURING.md)."""


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """Distance of a result's logits from a reference's.

    Args:
        top1_agree: The most likely token is the same.
        kl_nats: KL divergence, reference || ours.
        cosine: Cosine of the logit vectors.
        max_logit_gap: Largest |difference| over largest |reference logit|.
        floor_kl_nats: Median KL between exact computations, None where not measured.
        floor_max_kl_nats: Largest of those.
    """

    top1_agree: bool
    kl_nats: float
    cosine: float
    max_logit_gap: float
    floor_kl_nats: float | None = None
    floor_max_kl_nats: float | None = None


def compare(
    result: Float[Tensor, " vocab"],
    reference: Float[Tensor, " vocab"],
    floor: Sequence[float] = (),
) -> FidelityReport:
    """Compare logits with a reference's, in float64.

    Args:
        result: Logits of the path under test.
        reference: Logits of one of the three references; the caller says which.
        floor: KL divergences between exact computations of the reference.
    """
    ours, theirs = result.double(), reference.double()
    log_ours, log_theirs = torch.log_softmax(ours, -1), torch.log_softmax(theirs, -1)
    kl = float((log_theirs.exp() * (log_theirs - log_ours)).sum())
    return FidelityReport(
        top1_agree=int(ours.argmax()) == int(theirs.argmax()),
        kl_nats=max(kl, 0.0),
        cosine=float(torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)),
        max_logit_gap=float((ours - theirs).abs().max() / theirs.abs().max()),
        floor_kl_nats=median(floor) if floor else None,
        floor_max_kl_nats=max(floor) if floor else None,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A stretch of the unrolled sequence: tokens at positions, and the rows they see."""

    first: int
    token_ids: tuple[int, ...]
    position: int
    sees: tuple[tuple[int, int], ...]


class _Unroller:
    """Lays a layout's whole lineage out as one sequence without any cache.

    A run that was computed at p and stands at p + d stands, in the oracle, at p + d together
    with its own copies of everything it saw, shifted by d as well: rotary attention depends
    on distances only.
    """

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._known: dict[tuple[str, int, int], _Row] = {}
        self._length = 0

    def add(self, run: Run, shift: int) -> tuple[int, int]:
        """Add a run moved by `shift`; return its range of rows.

        A piece cut out of a run shares the rows of what it was cut from, and a run shares
        those of a longer one with the same beginning; the longest come first.
        """
        cut = 0
        while run.context and run.context == run.context[-1].run.after:
            head = run.context[-1].run
            cut += len(head)
            run = Run(head.token_ids + run.token_ids, head.start, head.context)
        key = (run.attended, run.start, shift)
        row = self._known.get(key)
        if row is None or row.token_ids[: len(run)] != run.token_ids:
            seen = [self.add(view.run, view.shift + shift) for view in reversed(run.context)]
            row = _Row(self._length, run.token_ids, run.start + shift, tuple(seen))
            self._length += len(run)
            self.rows.append(row)
            self._known[key] = row
        return row.first + cut, row.first + len(run)


def mask_reference(engine: Engine, layout: Layout) -> Float[Tensor, " vocab"]:
    """Return the logits after the last token of a layout, by one forward under a mask.

    Shares no cache, no rotation and no executor with the path it judges: every token's
    visibility is its lineage, written as a block mask.
    """
    unroller = _Unroller()
    last = canonical(layout)[-1]  # what it saw is its lineage: nothing else is needed
    target = unroller.add(last.run, last.shift)[1] - 1
    size = unroller.rows[-1].first + len(unroller.rows[-1].token_ids)
    visible = torch.zeros(size, size, dtype=torch.bool)
    positions = torch.zeros(size, dtype=torch.long)
    token_ids: list[int] = []
    for row in unroller.rows:
        stop = row.first + len(row.token_ids)
        token_ids.extend(row.token_ids)
        positions[row.first : stop] = torch.arange(len(row.token_ids)) + row.position
        for seen_start, seen_stop in row.sees:
            visible[row.first : stop, seen_start:seen_stop] = True
        visible[row.first : stop, row.first : stop] = torch.ones(
            len(row.token_ids), len(row.token_ids), dtype=torch.bool
        ).tril()
    engine.check_length(int(positions.max() - positions.min().clamp(max=0)) + 1, "the reference")
    return engine.masked_forward(token_ids, positions, visible, [target])[0]


def same_tokens_reference(engine: Engine, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
    """Return the logits of a cold prefill of the live tokens."""
    return engine.prefill(token_ids).last_logits()


def prefix_hit(
    engine: Engine, prefix: KVCache, token_ids: Sequence[int], *, consume: bool = False
) -> Execution:
    """Continue a cache whose tokens begin the prompt: the baseline that every splice has.

    Args:
        engine: The engine.
        prefix: An exact cache of the first tokens.
        token_ids: The whole prompt.
        consume: `prefix` will not be used again.
    """
    ids, cut = tuple(token_ids), prefix.length
    plan = Plan(ids, (*prefix.layout, Compute(cut, ids[cut:])))
    return engine.execute(plan, base=prefix, consume=consume)


def floor(engine: Engine, token_ids: Sequence[int], cuts: Iterable[int]) -> tuple[float, ...]:
    """Return KL divergences of exact prefix hits from a one-shot prefill.

    Args:
        engine: The engine.
        token_ids: The prompt, at least two tokens.
        cuts: Places where the plan under test cuts; filled up to `MIN_FLOOR_CUTS` evenly.
    """
    size = len(token_ids)
    places = {cut for cut in cuts if 0 < cut < size}
    for i in range(MIN_FLOOR_CUTS):
        if len(places) < MIN_FLOOR_CUTS:
            places.add(max(1, size * (i + 1) // (MIN_FLOOR_CUTS + 1)))
    return floor_of(engine, engine.prefill(token_ids), places)


def floor_of(engine: Engine, whole: Execution, cuts: Iterable[int]) -> tuple[float, ...]:
    """Return the same for a one-shot prefill that has already run, at exactly these cuts."""
    ids = whole.cache.token_ids
    result = []
    for cut in sorted(cuts):
        hit = prefix_hit(engine, whole.cache.truncated(cut), ids)
        result.append(compare(hit.last_logits(), whole.last_logits()).kl_nats)
    return tuple(result)

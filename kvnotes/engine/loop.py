"""The plain reference: steps left to right, over one cache that grows by concatenation.

Shares the model and the moving of keys with the other ways to run a plan, and nothing of how
these arrange memory, cut passes or make one of scattered tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvnotes.engine.execute import TakeBuffer, Turns, place
from kvnotes.engine.masks import see_before
from kvnotes.engine.runner import ModelRunner
from kvnotes.engine.slots import GrowingLayer, by_layer
from kvnotes.plan import Compute, Plan
from kvnotes.rope import Rotary
from kvnotes.segment import Buffer, KVSegment


def run_loop(
    runner: ModelRunner,
    plan: Plan,
    sources: Sequence[KVSegment],
    buffer: Buffer,
    take: TakeBuffer,
    rotaries: Sequence[Rotary],
    *,
    axes: Tensor | None,
    turns: Turns,
) -> Tensor:
    """Run a plan step by step; put its K/V into a buffer and return the last logits.

    Args:
        runner: The model.
        plan: The plan.
        sources: Where its views come from.
        buffer: Takes every token at the slot of its position.
        take: Gives memory for what a step moves.
        rotaries: The model's rotary embeddings.
        axes: Positions of the prompt, where images stand in it.
        turns: See `execute.place`.
    """
    layers = [GrowingLayer() for _ in runner.form]
    cache, logits = runner.form.cache(layers), torch.empty(0)
    for step in plan.steps:
        if isinstance(step, Compute):
            at = torch.arange(step.target_start, step.target_stop)
            seen = see_before(at, step.target_stop, axes)
            logits = runner.call(step.token_ids, seen, cache, 1)[-1]
            continue
        piece = take(step.num_tokens)
        place(step, sources, piece, rotaries, slot=0, turns=turns)
        for layer, part in zip(layers, by_layer(piece.tensors), strict=True):
            layer.fill(part)
    target = buffer.part(0, len(plan.token_ids))
    for layer, part in zip(layers, by_layer(target), strict=True):
        for name, tensor in layer.tensors.items():
            part[name].copy_(tensor)
    return logits

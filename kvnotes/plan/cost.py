"""What a plan costs, before it runs, and when a splice pays."""

from __future__ import annotations

from dataclasses import dataclass

from kvnotes.plan.steps import Compute, Plan, Step

MIN_SPLICE_TOKENS = 16
"""Fewer tokens than this are computed rather than spliced, whatever the model: the seam
and a second stretch of Compute cost more than they save (`kvnotes bench compose`)."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Linear cost of a plan on one machine and model.

    Args:
        ms_per_token: All but attention, for one more computed token.
        ms_per_pair: Attention of one computed token over one cached token, all layers.
        ms_per_moved_token: Copying and rotating the K/V of one token.
        ms_per_pass: Fixed cost of one forward pass: weights are read, or unpacked.
        tokens_per_pass: Most tokens of one pass; None has no limit.
    """

    ms_per_token: float
    ms_per_pair: float
    ms_per_moved_token: float
    ms_per_pass: float
    tokens_per_pass: int | None = None

    def predict_ms(self, plan: Plan) -> float:
        """Return the predicted time of a plan in milliseconds, from its integers alone."""
        return self.passes_ms(plan.tokens.computed) + sum(
            self.step_ms(plan, step) for step in plan.steps
        )

    def passes_ms(self, num_tokens: int) -> float:
        """Return the fixed cost of the passes that so many computed tokens take."""
        size = self.tokens_per_pass or max(1, num_tokens)
        return -(-num_tokens // size) * self.ms_per_pass

    def step_ms(self, plan: Plan, step: Step) -> float:
        """Return what one step of a plan adds to the fixed cost of its passes."""
        if isinstance(step, Compute):
            mean_seen = step.target_start + step.num_tokens / 2
            return step.num_tokens * (self.ms_per_token + mean_seen * self.ms_per_pair)
        if plan.step_name(step) == "R'":
            return step.num_tokens * self.ms_per_moved_token
        return 0.0

    def splice_pays(self, num_tokens: int, target_start: int, num_seam_tokens: int) -> bool:
        """Whether moving a segment of `num_tokens` is cheaper than computing it there."""
        if num_tokens < max(MIN_SPLICE_TOKENS, 2 * num_seam_tokens):
            return False
        spared = num_tokens - num_seam_tokens
        mean_seen = target_start + num_tokens / 2
        compute = spared * (self.ms_per_token + mean_seen * self.ms_per_pair)
        return spared * self.ms_per_moved_token < compute

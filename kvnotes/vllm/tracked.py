"""One request, as the half of the plug-in in vLLM's scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvnotes.vllm.planning import Load, SplicePlan
from kvnotes.vllm.requests import Wish


@dataclass
class Tracked:
    """What is known about one request.

    Args:
        request: The request.
        wish: What it asks for.
        plan: How it is made; None where it is computed.
        reason: Why it is computed, "" where that is not the question.
        waits_until: Deadline of its segments, once they are asked for.
        promised: What vLLM was told that can be loaded.
        due: What the next step has to load for it.
        num_loaded: Tokens loaded so far.
        counted: It is among the plans that were counted.
        held: Blocks that are copied for it.
    """

    request: Any
    wish: Wish
    plan: SplicePlan | None = None
    reason: str = ""
    waits_until: float | None = None
    promised: list[Load] = field(default_factory=list)
    due: list[Load] = field(default_factory=list)
    num_loaded: int = 0
    counted: bool = False
    held: list[Any] = field(default_factory=list)

    def said(self) -> dict[str, Any]:
        """Return what its reply says about the splice."""
        plan = self.plan
        if plan is None:
            return {"strategy": "reprefill", "fallback_reason": self.reason}
        counts = plan.plan.tokens
        return {
            "strategy": plan.plan.strategy,
            "shape": plan.plan.shape,
            "digest": plan.digest,
            "exact": plan.plan.exact,
            "segments": list(plan.titles),
            "spliced_tokens": counts.total - counts.computed,
            "computed_tokens": counts.computed,
            "loaded_tokens": self.num_loaded,
            "fallback_reason": self.reason,
        }


def is_plain(request: Any) -> bool:
    """Whether a prompt is text alone, computed by the model alone."""
    return bool(
        request.prompt_token_ids
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and request.sampling_params is not None
    )

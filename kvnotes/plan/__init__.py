"""Plans: what is reused, moved and computed to turn one cache into another.

Integers and digests only; `steps` holds the nouns, `compose` and `edit` make plans,
`select` chooses notes, `cost` predicts time.
"""

from kvnotes.plan.compose import (
    DEFAULT_NUM_SEAM_TOKENS,
    FIELD_BEFORE_SEGMENT,
    Splice,
    check_compiled,
    plan_compose,
)
from kvnotes.plan.cost import MIN_SPLICE_TOKENS, CostModel
from kvnotes.plan.edit import (
    STRATEGIES,
    Block,
    Match,
    Strategy,
    align,
    check_strategy,
    plan_keep,
    plan_suffix,
    plan_without,
)
from kvnotes.plan.lineage import (
    Layout,
    Reuse,
    Run,
    canonical,
    clip,
    common_prefix,
    digest_tokens,
    holds,
    is_exact,
    layout_token_ids,
    num_equal,
)
from kvnotes.plan.select import DEFAULT_NOTE_SHARE, select_notes
from kvnotes.plan.steps import Compute, Plan, Step, TokenCounts

__all__ = [
    "DEFAULT_NOTE_SHARE",
    "DEFAULT_NUM_SEAM_TOKENS",
    "FIELD_BEFORE_SEGMENT",
    "MIN_SPLICE_TOKENS",
    "STRATEGIES",
    "Block",
    "Compute",
    "CostModel",
    "Layout",
    "Match",
    "Plan",
    "Reuse",
    "Run",
    "Splice",
    "Step",
    "Strategy",
    "TokenCounts",
    "align",
    "canonical",
    "check_compiled",
    "check_strategy",
    "clip",
    "common_prefix",
    "digest_tokens",
    "holds",
    "is_exact",
    "layout_token_ids",
    "num_equal",
    "plan_compose",
    "plan_keep",
    "plan_suffix",
    "plan_without",
    "select_notes",
]

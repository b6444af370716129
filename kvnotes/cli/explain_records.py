"""What `kvnotes explain --json` prints: a contract that others script against.

Owns the keys and their types. Every key is always there; what does not apply is null or
empty.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kvnotes.cli.records import Tokens
from kvnotes.plan import CostModel


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CostRecord(_Record):
    """What this machine takes for this model, measured when it was loaded."""

    ms_per_pass: float = Field(description="fixed cost of one forward pass")
    ms_per_token: float = Field(description="one more computed token, without attention")
    ms_per_pair: float = Field(description="attention of a computed token over one cached token")
    ms_per_moved_token: float
    tokens_per_pass: int | None = Field(description="most tokens of one pass")

    @classmethod
    def of(cls, cost: CostModel) -> CostRecord:
        """Return the record of a cost model."""
        return cls(
            ms_per_pass=cost.ms_per_pass,
            ms_per_token=cost.ms_per_token,
            ms_per_pair=cost.ms_per_pair,
            ms_per_moved_token=cost.ms_per_moved_token,
            tokens_per_pass=cost.tokens_per_pass,
        )


class SegmentPlan(_Record):
    """A segment that is compiled before the first turn, or at a later one."""

    name: str
    variant: dict[str, str] = Field(description="values of the fields of its preamble")
    tokens: int
    preamble_tokens: int
    compiled: bool = Field(description="it is there already")
    predicted_ms: float = Field(description="what compiling it takes, 0 if it is there")


class Covered(_Record):
    """A message that a step covers, or a part of it."""

    name: str = Field(description="id of the message, empty for the generation prompt")
    whole: bool = Field(description="the step covers all of it")
    segments: list[str] = Field(description="segments of it that the step touches")
    fields: dict[str, str] = Field(description="fields in it that the step touches, as shown")


class StepPlan(_Record):
    """One step of a plan, over tokens [start, stop); it differs from its neighbours."""

    step: str = Field(description="R reused, R' moved, C computed")
    start: int
    stop: int
    source: str | None = Field(description="cache, or segment:NAME; null where it is computed")
    covers: list[Covered]
    predicted_ms: float = Field(description="what it adds to the passes' fixed cost")


class Seam(_Record):
    """Tokens of a spliced segment that are computed behind the real prefix."""

    segment: str
    start: int
    stop: int


class VerifyPlan(_Record):
    """A check of the result, of which the outcome is not known before."""

    level: str
    refused: list[str] = Field(description="strategies that the check refuses for certain")
    needed: bool = Field(description="whether a check runs at all: an exact result needs none")
    check_tokens: int = Field(description="most tokens that one check computes")
    check_predicted_ms: float | None = Field(description="null where only a part is computed")
    may_follow: list[str] = Field(description="strategies tried if the check refuses this plan")


class TurnPlan(_Record):
    """What one turn of the scenario would do."""

    turn: int = Field(ge=1, description="its place in the scenario, from 1")
    op: str
    waits: bool = Field(description="done with the next turn that computes; as it were alone")
    strategy: str
    evidence: str = Field(description="why this strategy")
    evidence_kind: str = Field(description="none, user, scorecard or verify")
    plan: str = Field(description="kinds of steps in order, equal neighbours once")
    exact: bool = Field(description="the cache equals a cold prefill of its tokens, by lineage")
    tokens: Tokens
    steps: list[StepPlan]
    seams: list[Seam]
    predicted_ms: float = Field(description="to the first token, without compiling and checks")
    full_predicted_ms: float = Field(description="a prefill of the whole prompt")
    speedup: float = Field(description="full_predicted_ms / predicted_ms")
    assumed_reply_tokens: int | None = Field(description="length of the stand-in reply")
    scored_tokens: int = Field(description="tokens whose notes selective scores before it plans")
    scoring_predicted_ms: float = Field(description="what that takes, beside predicted_ms")
    verify: VerifyPlan | None
    compiles: list[SegmentPlan] = Field(description="segments compiled at this turn")
    notes: list[str]
    template_rewrote: list[str] = Field(description="what the chat template changed before")
    fallback_reason: str | None = Field(description="why another strategy was taken")


class Totals(_Record):
    """Sums over the turns that compute."""

    answers: int
    computed_tokens: int
    prompt_tokens: int = Field(description="what full prefills compute")
    predicted_ms: float
    full_predicted_ms: float
    compile_predicted_ms: float


class ExplainRecord(_Record):
    """A scenario's plans."""

    model: str
    fingerprint: str = Field(description="SHA-256 of weights, shapes, dtype and rotary embedding")
    dtype: str
    versions: dict[str, str]
    threads: int
    cost: CostRecord
    segments: list[SegmentPlan]
    turns: list[TurnPlan]
    totals: Totals

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=2)

"""What `kvnotes run --json` prints: a contract that others script against.

Owns the keys and their types. Every key is always there; what does not apply is null, and
so is a number that is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from kvnotes.fidelity import FidelityReport
    from kvnotes.session import Comparison, Decision, Turn


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tokens(_Record):
    """Where the tokens of a plan come from; they add up to the total."""

    total: int
    reused: int = Field(description="K/V taken from where it stands")
    moved: int = Field(description="K/V taken from another position, keys rotated")
    computed: int = Field(description="computed by the model")


class Fidelity(_Record):
    """Distance of the last token's logits from a reference's."""

    top1_agree: bool = Field(description="the most likely token is the same")
    kl_nats: float | None = Field(description="KL divergence, reference || result")
    cosine: float | None
    max_logit_gap: float | None = Field(description="relative to the largest reference logit")
    floor_kl_nats: float | None = Field(description="KL between two exact computations, median")


class FidelityPair(_Record):
    """Distances from both references."""

    same_tokens: Fidelity = Field(description="a cold prefill of the live tokens")
    clean: Fidelity = Field(description="a cold prefill of the current values, no errata")


class DecisionRecord(_Record):
    """Texts scored as the assistant's next words."""

    choices: dict[str, float | None] = Field(description="summed log-probability of each text")
    chosen: str
    clean_chosen: str | None = Field(description="what a cold prefill of the values chooses")
    stale_chosen: str | None = Field(description="what the values before the edit choose")
    recovery: float | None = Field(description="share of the change of margin that was recovered")


class TurnRecord(_Record):
    """One turn of the scenario."""

    turn: int = Field(ge=1, description="its place in the scenario, from 1")
    op: str = Field(description="user, tool, system, assistant, edit, delete, move, replace, ...")
    strategy: str
    plan: str = Field(description="kinds of steps: R reused, R' moved, C computed")
    exact: bool = Field(description="the cache equals a cold prefill of its tokens, by lineage")
    tokens: Tokens
    ttft_ms: float | None = Field(description="waiting edits included; null: nothing was computed")
    prefix_hit_ttft_ms: float | None
    full_ttft_ms: float | None
    speedup: float | None = Field(description="full_ttft_ms / ttft_ms")
    fidelity: FidelityPair | None
    decision: DecisionRecord | None
    text: str | None = Field(description="the generated reply")
    template_rewrote: list[str] = Field(description="what the chat template changed before")
    fallback_reason: str | None = Field(description="why another strategy was taken")


class RunRecord(_Record):
    """One run of a scenario."""

    model: str
    fingerprint: str = Field(description="SHA-256 of weights, shapes, dtype and rotary embedding")
    versions: dict[str, str]
    threads: int
    turns: list[TurnRecord]

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=2)


def turn_record(number: int, op: str, turn: Turn) -> TurnRecord:
    """Return the record of a turn.

    Args:
        number: Its place in the scenario, from 1.
        op: The scenario's operation, which may be more than the session was told in one call.
        turn: What the session says.
    """
    tokens = turn.plan.tokens
    hit, full = _times(turn.comparison)
    return TurnRecord(
        turn=number,
        op=op,
        strategy=turn.strategy,
        plan=turn.plan.shape,
        exact=turn.plan.exact,
        tokens=Tokens(
            total=tokens.total,
            reused=tokens.reused,
            moved=tokens.moved,
            computed=tokens.computed,
        ),
        ttft_ms=_rounded(turn.ttft_ms),
        prefix_hit_ttft_ms=hit,
        full_ttft_ms=full,
        speedup=speedup(full, turn.ttft_ms),
        fidelity=_pair(turn.comparison),
        decision=_decision(turn.decision),
        text=turn.text,
        template_rewrote=list(turn.template_rewrote),
        fallback_reason=turn.fallback_reason,
    )


def with_times(
    record: TurnRecord, *, ttft: float | None, hit: float | None, full: float | None
) -> TurnRecord:
    """Return a record with other times."""
    times = {
        "ttft_ms": _rounded(ttft),
        "prefix_hit_ttft_ms": _rounded(hit),
        "full_ttft_ms": _rounded(full),
        "speedup": speedup(full, ttft),
    }
    return record.model_copy(update=times)


def speedup(full_ms: float | None, ttft_ms: float | None) -> float | None:
    """Return full prefill over ours; None without either."""
    return round(full_ms / ttft_ms, 3) if full_ms is not None and ttft_ms else None


def _times(comparison: Comparison | None) -> tuple[float | None, float | None]:
    if comparison is None:
        return None, None
    return _rounded(comparison.prefix_hit_ttft_ms), _rounded(comparison.full_ttft_ms)


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


def _pair(comparison: Comparison | None) -> FidelityPair | None:
    if comparison is None:
        return None
    return FidelityPair(
        same_tokens=_fidelity(comparison.same_tokens), clean=_fidelity(comparison.clean)
    )


def _fidelity(report: FidelityReport) -> Fidelity:
    return Fidelity(
        top1_agree=report.top1_agree,
        kl_nats=report.kl_nats,
        cosine=report.cosine,
        max_logit_gap=report.max_logit_gap,
        floor_kl_nats=report.floor_kl_nats,
    )


def _decision(decision: Decision | None) -> DecisionRecord | None:
    if decision is None:
        return None
    return DecisionRecord(
        choices=dict(decision.choices),
        chosen=decision.chosen,
        clean_chosen=decision.clean_chosen,
        stale_chosen=decision.stale_chosen,
        recovery=decision.recovery,
    )

"""What a session says about a turn: values only, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvnotes.engine.exchange import Served
from kvnotes.fidelity import FidelityReport
from kvnotes.plan import Plan
from kvnotes.prompt import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Decision:
    """Scored choices of a turn.

    Args:
        choices: Summed log-probability of each choice.
        chosen: The most likely one.
        clean_chosen: What a cold prefill of the current values chooses; None if not compared.
        stale_chosen: What the values before the last edit would choose; None without an edit.
        recovery: (m - m_stale) / (m_clean - m_stale) with m the margin of the clean over the
            stale choice; None where they are the same.
    """

    choices: Mapping[str, float]
    chosen: str
    clean_chosen: str | None = None
    stale_chosen: str | None = None
    recovery: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a strategy was taken.

    Args:
        kind: `none` (exact by default), `user`, `scorecard`, `verify`, or `engine` (what a server
            can do).
        detail: One line.
        predicted_ms: Predicted time of the plan; not a number where nobody knows.
    """

    kind: str
    detail: str
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of a verify.

    Args:
        level: `full` or `cheap`.
        agreed: The rung taken decides as the check does.
        rungs: Strategies tried, in order; the last was taken.
        num_checked_tokens: Token-equivalents the check computed, largest over the rungs.
        checked_share: The same as a share of the prompt.
    """

    level: str
    agreed: bool
    rungs: tuple[str, ...]
    num_checked_tokens: int
    checked_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """References of a turn, measured beside it.

    Args:
        prefix_hit_ttft_ms: The same new tokens over an exact cache of all before them.
        full_ttft_ms: Cold prefill of everything.
        same_tokens: Distance to a cold prefill of the live tokens.
        clean: Distance to a cold prefill of the current values.
    """

    prefix_hit_ttft_ms: float
    full_ttft_ms: float
    same_tokens: FidelityReport
    clean: FidelityReport


@dataclass(frozen=True, slots=True)
class Turn:
    """One operation of a session.

    Args:
        op: What was called: `user`, `decide`, `edit`, `splice`, ...; the role for `add`.
        plan: What was, or (edit, delete, ...) would be, reused, moved and computed. Over a server
            it says what the prompt shares with the one before; what was done says `served`.
        strategy: The strategy taken.
        evidence: Why.
        ttft_ms: From the call to the first token's logits, waiting edits included; None for
            an edit alone, which is counted into the next turn that computes.
        decision: Scored choices, if asked for.
        text: Generated text, if asked for.
        token_ids: Generated tokens.
        comparison: References, if asked for.
        verification: Outcome of a verify, if asked for.
        template_rewrote: What the chat template changed in earlier turns.
        fallback_reason: Why another strategy than the one asked for was taken.
        notices: Escaped strings, wrappers, notes of the plan.
        prompt: The prompt that the plan is of.
        served: What the server said it had; None where the engine is in this process.
    """

    op: str
    plan: Plan
    strategy: str
    evidence: Evidence
    ttft_ms: float | None = None
    decision: Decision | None = None
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    comparison: Comparison | None = None
    verification: Verification | None = None
    template_rewrote: tuple[str, ...] = ()
    fallback_reason: str | None = None
    notices: tuple[str, ...] = field(default=())
    prompt: TokenizedPrompt | None = field(default=None, repr=False)
    served: Served | None = None

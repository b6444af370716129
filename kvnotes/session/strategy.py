"""Which strategy a turn takes, and on what evidence.

Exact by default, approximate when proved: `auto` is `suffix` until a scorecard of this
very fingerprint, or a verify, or the user's word allows less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvnotes.engine.abilities import Abilities
from kvnotes.engine.base import Engine
from kvnotes.errors import PlanError, SpecMismatchError, nearest
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS
from kvnotes.session.edits import ErratumMode
from kvnotes.session.operations import Edit, Operation
from kvnotes.session.report import Evidence

LADDER = ("erratum", "refresh+erratum", "suffix", "reprefill")
"""Escalation of a verify; every rung starts from the cache before the edit."""

MIN_AGREEMENT = 0.95
"""Lower end of a scorecard's interval that lets `auto` take its strategy."""

_EXACTNESS = ("swap", "erratum", "selective", "refresh", "refresh+erratum", "suffix", "reprefill")


@dataclass(frozen=True, slots=True)
class Scorecard:
    """What is proved about edits on one model.

    Args:
        fingerprint: The model it was measured on.
        strategy: The cheapest strategy measured.
        agreement_low: Lower end of the 95 % interval of its agreement with a clean prefill.
        num_items: Items it was measured on.
        num_seam_tokens: Seam that the model needs.
    """

    fingerprint: str
    strategy: str
    agreement_low: float
    num_items: int
    num_seam_tokens: int = DEFAULT_NUM_SEAM_TOKENS

    def __post_init__(self) -> None:
        proved = ("erratum", "refresh+erratum", "refresh", "selective", "suffix")
        if self.strategy not in proved:
            raise PlanError(
                f"a scorecard proves no strategy {self.strategy!r}",
                hint=nearest(self.strategy, proved),
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy with its evidence.

    Args:
        strategy: What is done.
        asked: What was asked for.
        evidence: Why.
        verify: Level of the verify asked for, if any.
        changed: Fields that take another value.
        keep: Nothing has changed but what is appended.
        compile_after: Compile missing variants after the turn.
        fallback_reason: Why `strategy` is not what was asked for.
    """

    strategy: str
    asked: str
    evidence: Evidence
    verify: str | None = None
    changed: frozenset[str] = frozenset()
    keep: bool = False
    compile_after: bool = False
    fallback_reason: str | None = None


def choose(
    waiting: Sequence[Operation],
    *,
    default: str,
    mode: ErratumMode,
    scorecard: Scorecard | None,
    engine: Engine,
) -> Choice:
    """Return the strategy for all waiting operations: the most exact one asked for.

    Raises:
        SpecMismatchError: The scorecard belongs to another model.
    """
    if scorecard is not None and scorecard.fingerprint != engine.fingerprint:
        raise SpecMismatchError(
            f"the scorecard is of model {scorecard.fingerprint[:12]}, this is "
            f"{engine.fingerprint[:12]}",
            hint="measure this model, or leave the scorecard out",
        )
    changes = [(o, o.strategy) for o in waiting if o.strategy is not None]
    edits = [o for o, _ in changes if isinstance(o, Edit)]
    verify = next((edit.verify for edit in edits if edit.verify), None)
    asked = [strategy for _, strategy in changes] or [default]
    auto, evidence = _auto(scorecard, mode, engine.abilities)
    if not changes:
        evidence = Evidence("none", "nothing is changed: what is cached is kept")
    elif verify and "auto" in asked:
        auto = "erratum" if mode == "append" else "refresh+erratum"
        evidence = Evidence("verify", f"verify={verify!r} checks each rung before it is used")
    # evidence is about edits: any other change is exact under auto
    edited = [isinstance(o, Edit) for o, _ in changes] or [False]
    resolved = [
        (auto if edit else "suffix") if name == "auto" else name
        for name, edit in zip(asked, edited, strict=True)
    ]
    strategy = max(resolved, key=_EXACTNESS.index)
    name = asked[resolved.index(strategy)]
    if name != "auto" and changes:
        evidence = Evidence("user", f"strategy {strategy!r} was asked for")
    others = sorted(set(resolved) - {strategy})
    reason = (
        f"{', '.join(map(repr, others))} waited together with {strategy!r}, which is more exact"
        if others
        else None
    )
    return Choice(
        strategy,
        name,
        evidence,
        verify,
        changed=frozenset(field for edit in edits for field in edit.changes),
        keep=not changes,
        fallback_reason=reason,
    )


def ladder(strategy: str, mode: ErratumMode) -> tuple[str, ...]:
    """Return the rungs of an escalation that starts with `strategy`.

    In `append` mode nothing cached is rewritten: `refresh+erratum` is left out.
    """
    known = strategy in LADDER
    rungs = LADDER[LADDER.index(strategy) :] if known else (strategy, *LADDER[1:])
    return tuple(r for r in rungs if mode == "rewrite" or r != "refresh+erratum")


def _auto(
    scorecard: Scorecard | None, mode: ErratumMode, abilities: Abilities
) -> tuple[str, Evidence]:
    if scorecard is None:
        kind = "none" if abilities.auto == "suffix" else "engine"
        return abilities.auto, Evidence(kind, abilities.auto_because)
    shown = f"{scorecard.agreement_low:.2f} or more of {scorecard.num_items} items agree"
    if scorecard.agreement_low < MIN_AGREEMENT:
        return "suffix", Evidence(
            "scorecard", f"{scorecard.strategy}: {shown}, {MIN_AGREEMENT} are needed: exact"
        )
    if mode == "append" and scorecard.strategy == "refresh+erratum":
        return "suffix", Evidence(
            "scorecard", "refresh+erratum is proved, and append mode may not do it: exact"
        )
    if not abilities.allows(scorecard.strategy):
        return "suffix", Evidence(
            "scorecard", f"{scorecard.strategy} is proved, and needs more than {abilities.title}"
        )
    return scorecard.strategy, Evidence("scorecard", f"{scorecard.strategy}: {shown}")

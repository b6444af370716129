"""`Compute`, `Plan`: one value that serves every method.

Owns the steps and the checks that make a plan a plan. Does not choose steps (see
`edit`, `compose`) and does not run them (see `engine`). No torch, no text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvnotes.errors import PlanGapError
from kvnotes.plan.lineage import (
    Layout,
    Reuse,
    Run,
    canonical,
    digest_tokens,
    extend,
    holds,
    is_exact,
)


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the K/V of `token_ids` at `target_start`, seeing everything before them."""

    target_start: int
    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens."""
        return len(self.token_ids)

    @property
    def target_stop(self) -> int:
        """Position after the last computed token."""
        return self.target_start + len(self.token_ids)


Step = Reuse | Compute


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Where the tokens of a plan come from; `reused` are those that stay where they are."""

    total: int
    reused: int
    moved: int
    computed: int


@dataclass(frozen=True)
class Plan:
    """Steps that cover a target once, in order.

    Args:
        token_ids: The target, exactly.
        steps: Reuse and Compute, by target position.
        strategy: The name of the method that made it.
        notes: What the reader must know, for example `field_before_segment`.
        base: Layout of the cache the plan starts from; what it holds in place is not moved.

    Raises:
        PlanGapError: The steps leave a gap, overlap, or hold other tokens.
    """

    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    strategy: str = "reprefill"
    notes: tuple[str, ...] = ()
    base: Layout = ()

    def __post_init__(self) -> None:
        position = 0
        for step in self.steps:
            if step.target_start != position:
                raise PlanGapError(
                    f"step {self.step_name(step)} starts at token {step.target_start}, the step "
                    f"before it ends at {position}",
                    hint="steps must cover the target once, in order",
                )
            if isinstance(step, Reuse) and not 0 <= step.source_start <= step.source_stop <= len(
                step.run
            ):
                raise PlanGapError(
                    f"the step at token {position} takes tokens {step.source_start} to "
                    f"{step.source_stop} of a run of {len(step.run)}",
                    hint="a view lies inside its run",
                )
            wanted = self.token_ids[position : position + step.num_tokens]
            if wanted != step.token_ids:
                raise PlanGapError(
                    f"step {self.step_name(step)} at token {position} holds "
                    f"{list(step.token_ids[:4])}..., the target has {list(wanted[:4])}...",
                    hint="a plan must end up with exactly the target's tokens",
                )
            if not step.num_tokens:
                raise PlanGapError(f"empty step at token {position}", hint="leave it out")
            position = step.target_stop
        if position != len(self.token_ids):
            raise PlanGapError(
                f"the steps end at token {position}, the target has {len(self.token_ids)} tokens",
                hint="add a Compute step for the rest",
            )

    @classmethod
    def prefill(cls, token_ids: Sequence[int]) -> Plan:
        """Return the plan that computes everything: a cold prefill."""
        ids = tuple(token_ids)
        return cls(ids, (Compute(0, ids),) if ids else ())

    def step_name(self, step: Step) -> str:
        """Return `C`, `R` (stays where the base holds it) or `R'` (keys change position)."""
        if isinstance(step, Compute):
            return "C"
        return "R'" if step.moved and not holds(self.base, step) else "R"

    @property
    def shape(self) -> str:
        """Kinds of steps in order, for example `R C R' C`; equal neighbours count once."""
        names: list[str] = []
        for step in self.steps:
            name = self.step_name(step)
            if not names or names[-1] != name:
                names.append(name)
        return " ".join(names)

    @property
    def tokens(self) -> TokenCounts:
        """Token counts by source; they add up to the total."""
        moved = sum(step.num_tokens for step in self.steps if self.step_name(step) == "R'")
        computed = sum(s.num_tokens for s in self.steps if isinstance(s, Compute))
        total = len(self.token_ids)
        return TokenCounts(total, total - moved - computed, moved, computed)

    @property
    def yields_logits(self) -> bool:
        """Whether the last token is computed, so that the plan ends in logits."""
        return bool(self.steps) and isinstance(self.steps[-1], Compute)

    @cached_property
    def layout(self) -> Layout:
        """What the cache holds after the plan, one entry per step."""
        seen: Layout = ()
        views: list[Reuse] = []
        for step in self.steps:
            if isinstance(step, Compute):
                view = Run(step.token_ids, step.target_start, seen).whole()
            else:
                view = step
            views.append(view)
            seen = extend(seen, view)
        return tuple(views)

    @cached_property
    def canonical_layout(self) -> Layout:
        """The layout in its one canonical form."""
        return canonical(self.layout)

    @cached_property
    def exact(self) -> bool:
        """Whether the result equals a cold prefill of the target, by lineage."""
        return is_exact(self.layout)

    def digest(self, fingerprint: str) -> str:
        """Return the key of the plan's result for one model.

        Exact plans of the same tokens share one key however they were made; an inexact
        plan never has an exact plan's key, also when their integers agree.
        """
        state = hashlib.sha256(fingerprint.encode())
        state.update(b"exact" if self.exact else b"approximate")
        state.update(digest_tokens(self.token_ids).encode())
        if not self.exact:
            for view in self.canonical_layout:
                state.update(f"{view.source_id}@{view.target_start};".encode())
        return state.hexdigest()

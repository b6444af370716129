"""Explaining a prepared scenario: its turns on a dry session, described.

Owns the way from a turn's plan to a record: what each step covers, where it comes from,
what it would take. Prints nothing and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import fsum
from typing import TYPE_CHECKING

from kvnotes.cli import scenario as form
from kvnotes.cli.check import Prepared
from kvnotes.cli.explain_records import (
    CostRecord,
    Covered,
    Seam,
    SegmentPlan,
    StepPlan,
    Totals,
    TurnPlan,
    VerifyPlan,
)
from kvnotes.cli.parse import located
from kvnotes.cli.records import Tokens
from kvnotes.cli.run import new_session, run_turn, title_of
from kvnotes.errors import KVNotesError
from kvnotes.plan import Compute, CostModel, Plan, Reuse, Run, Step, holds
from kvnotes.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from kvnotes.session import Model, Turn
    from kvnotes.session.dry import DryCompile


@dataclass(frozen=True, slots=True)
class Explained:
    """A turn's plan, and the turn in words."""

    record: TurnPlan
    title: str


class Explainer:
    """Plans one scenario on one loaded model, of which nothing is run.

    Args:
        prepared: The scenario.
        model: What `kvnotes.load` returned.
    """

    def __init__(self, prepared: Prepared, model: Model) -> None:
        from kvnotes.session.dry import dry_run

        self._prepared = prepared
        self._model = dry_run(model, _stops(prepared))
        self._cost = model.engine.cost
        self._turns: list[TurnPlan] = []
        self._session = new_session(prepared, self._model)
        self.segments = [_segment(item) for item in self._model.book.wanted]

    def __iter__(self) -> Iterator[Explained]:
        """Plan all turns, in order; iterate once."""
        for index, spec in enumerate(self._prepared.scenario.turns):
            known = len(self._model.book.wanted)
            try:
                turn = run_turn(self._session, index, spec, compare=False)
            except KVNotesError as error:
                raise located(error, self._prepared.source, ("turns", index)) from error
            compiles = [_segment(item) for item in self._model.book.wanted[known:]]
            record = self._record(index + 1, str(form.operation_of(spec)), turn, compiles)
            self._turns.append(record)
            yield Explained(record, title_of(spec))

    @property
    def cost(self) -> CostRecord:
        """What the predictions are made of."""
        return CostRecord.of(self._cost)

    @property
    def totals(self) -> Totals:
        """Sums over the turns planned so far that compute."""
        ran = [record for record in self._turns if not record.waits]
        compiled = [*self.segments, *(item for record in self._turns for item in record.compiles)]
        return Totals(
            answers=len(ran),
            computed_tokens=sum(record.tokens.computed for record in ran),
            prompt_tokens=sum(record.tokens.total for record in ran),
            predicted_ms=_ms(fsum(r.predicted_ms + r.scoring_predicted_ms for r in ran)),
            full_predicted_ms=_ms(fsum(record.full_predicted_ms for record in ran)),
            compile_predicted_ms=_ms(fsum(item.predicted_ms for item in compiled)),
        )

    def _record(self, number: int, op: str, turn: Turn, compiles: list[SegmentPlan]) -> TurnPlan:
        plan, prompt = turn.plan, turn.prompt
        assert prompt is not None
        names = {run: name for name, run, _ in self._model.book.known()}
        predicted = self._cost.predict_ms(plan)
        full = self._cost.predict_ms(Plan.prefill(plan.token_ids))
        tokens = plan.tokens
        changed = turn.strategy == "selective" and turn.evidence.kind != "none"
        scored = _num_scored(plan) if changed else 0
        return TurnPlan(
            turn=number,
            op=op,
            waits=turn.ttft_ms is None,
            strategy=turn.strategy,
            evidence=turn.evidence.detail,
            evidence_kind=turn.evidence.kind,
            plan=plan.shape,
            exact=plan.exact,
            tokens=Tokens(
                total=tokens.total,
                reused=tokens.reused,
                moved=tokens.moved,
                computed=tokens.computed,
            ),
            steps=list(_steps(plan, prompt, names, self._cost)),
            seams=list(_seams(plan, prompt, names)),
            predicted_ms=_ms(predicted),
            full_predicted_ms=_ms(full),
            speedup=round(full / predicted, 3),
            assumed_reply_tokens=None if turn.text is None else len(turn.token_ids),
            scored_tokens=scored,
            scoring_predicted_ms=_ms(self._scoring_ms(plan, scored)),
            verify=self._verify(turn),
            compiles=compiles,
            notes=list(turn.notices),
            template_rewrote=list(turn.template_rewrote),
            fallback_reason=turn.fallback_reason,
        )

    def _scoring_ms(self, plan: Plan, num_scored: int) -> float:
        """Predict a pass over the scored tokens through the first layers."""
        if not num_scored:
            return 0.0
        step = Compute(len(plan.token_ids) - num_scored, plan.token_ids[-num_scored:])
        whole = self._cost.passes_ms(num_scored) + self._cost.step_ms(plan, step)
        return whole * self._model.engine.note_score_share

    def _verify(self, turn: Turn) -> VerifyPlan | None:
        """What is known of a check: the dry one agrees wherever scores would decide."""
        from kvnotes.session.strategy import ladder

        done = turn.verification
        if done is None:
            return None
        rungs = ladder(done.rungs[0], self._prepared.scenario.erratum_mode)
        needed = done.num_checked_tokens > 0
        whole = Plan.prefill((0,) * done.num_checked_tokens)
        full = done.level == "full" and needed
        return VerifyPlan(
            level=done.level,
            refused=list(done.rungs[:-1]),
            needed=needed,
            check_tokens=done.num_checked_tokens,
            check_predicted_ms=_ms(self._cost.predict_ms(whole)) if full else None,
            may_follow=list(rungs[len(done.rungs) :]) if needed else [],
        )


def _steps(
    plan: Plan, prompt: TokenizedPrompt, names: Mapping[Run, str], cost: CostModel
) -> Iterator[StepPlan]:
    """Yield the steps of a plan; neighbours of one kind and one source are one."""
    kinds = ((plan.step_name(step), _source(plan, step, names), step) for step in plan.steps)
    for (kind, source), group in groupby(kinds, key=lambda item: item[:2]):
        steps = [step for _, _, step in group]
        start, stop = steps[0].target_start, steps[-1].target_stop
        yield StepPlan(
            step=kind,
            start=start,
            stop=stop,
            source=source,
            covers=list(_covered(prompt, start, stop)),
            predicted_ms=_ms(fsum(cost.step_ms(plan, step) for step in steps)),
        )


def _source(plan: Plan, step: Step, names: Mapping[Run, str]) -> str | None:
    if isinstance(step, Compute):
        return None
    spliced = step.run in names and not holds(plan.base, step)
    return f"segment:{names[step.run]}" if spliced else "cache"


def _covered(prompt: TokenizedPrompt, start: int, stop: int) -> Iterator[Covered]:
    """Yield the messages that share tokens with a range, and what of each does."""
    inner = [
        span
        for span in prompt.spans
        if span.kind in ("segment", "field") and span.start < stop and span.stop > start
    ]
    for span in prompt.spans:
        if span.kind not in ("message", "generation") or span.start >= stop or span.stop <= start:
            continue
        own = [part for part in inner if part.message_id == span.name]
        yield Covered(
            name="" if span.kind == "generation" else span.name,
            whole=start <= span.start and span.stop <= stop,
            segments=[part.name for part in own if part.kind == "segment"],
            fields={part.name: part.value for part in own if part.kind == "field"},
        )


def _seams(plan: Plan, prompt: TokenizedPrompt, names: Mapping[Run, str]) -> Iterator[Seam]:
    """Yield the first tokens of spliced segments that are computed, not taken."""
    before: Step | None = None
    for step in plan.steps:
        if isinstance(step, Reuse) and step.run in names and isinstance(before, Compute):
            for span in prompt.segments:
                first = span.start + span.num_edge_left
                skipped = step.source_start - span.standalone_start
                if 0 < skipped == step.target_start - first and before.target_start <= first:
                    yield Seam(segment=span.name, start=first, stop=step.target_start)
        before = step


def _num_scored(plan: Plan) -> int:
    """How many tokens stand behind the first that changes: `selective` scores them all."""
    kept = takewhile(lambda step: plan.step_name(step) == "R", plan.steps)
    return len(plan.token_ids) - sum(step.num_tokens for step in kept)


def _segment(item: DryCompile) -> SegmentPlan:
    return SegmentPlan(
        name=item.name,
        variant=dict(item.variant),
        tokens=item.num_tokens,
        preamble_tokens=item.num_preamble_tokens,
        compiled=item.compiled,
        predicted_ms=_ms(item.predicted_ms),
    )


def _stops(prepared: Prepared) -> Sequence[str]:
    asked = (getattr(turn, "generate", None) for turn in prepared.scenario.turns)
    return [stop for sampling in asked if sampling is not None for stop in sampling.stop]


def _ms(value: float) -> float:
    return round(value, 3)

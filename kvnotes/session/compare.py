"""References of a turn, measured beside it: prefix hit, full prefill, clean, stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvnotes.engine.base import Execution
from kvnotes.fidelity import MIN_FLOOR_CUTS, compare, floor_of, prefix_hit
from kvnotes.plan import Plan, plan_suffix
from kvnotes.prompt import TokenizedPrompt
from kvnotes.segment import KVCache
from kvnotes.session.edits import PromptState
from kvnotes.session.loaded import Model
from kvnotes.session.reply import decide
from kvnotes.session.report import Comparison, Turn

Render = Callable[[PromptState, bool], TokenizedPrompt]

FLOOR_FROM = 0.75
"""Floor cuts lie in the last quarter of the prompt, where turns are: a cut at the front
would cost a prefill each."""


class References:
    """Computes the references of one session's turns.

    Cold prefills are timed; the clean and the stale prompt continue exact caches of their
    own, which equals a cold prefill up to the floor and costs a turn instead of a prompt.

    Args:
        model: The session's model.
        render: Renders a state, with or without the generation prompt.
    """

    def __init__(self, model: Model, render: Render) -> None:
        self._model = model
        self._render = render
        self._exact: dict[str, KVCache] = {}

    def compare(
        self,
        turn: Turn,
        execution: Execution,
        prompt: TokenizedPrompt,
        state: PromptState,
        stale_values: Mapping[str, str],
        choices: Sequence[str] | None,
        new_start: int,
    ) -> Turn:
        """Return the turn with its references filled in.

        Args:
            turn: What was done.
            execution: Its result.
            prompt: The prompt it computed.
            state: The conversation after it.
            stale_values: Values before the last edits.
            choices: Choices of a decision.
            new_start: First token of the turn's new text.
        """
        engine = self._model.engine
        full = engine.prefill(prompt.token_ids)
        ids = prompt.token_ids
        cuts = [step.target_start for step in turn.plan.steps]
        distances = floor_of(engine, full, _floor_cuts(cuts, len(ids)))
        prefix = full.cache.truncated(new_start)
        full_logits, full_ms = full.last_logits(), full.elapsed_ms
        del full
        hit = prefix_hit(engine, prefix, ids, consume=True)
        clean = self._execution("clean", clean_state(state))
        ours = execution.last_logits()
        comparison = Comparison(
            hit.elapsed_ms,
            full_ms,
            compare(ours, full_logits, distances),
            compare(ours, clean.last_logits(), distances),
        )
        turn = replace(turn, comparison=comparison)
        if turn.decision is None or choices is None:
            return turn
        clean_choice = decide(self._model, clean, choices)
        decision = replace(turn.decision, clean_chosen=clean_choice.chosen)
        if dict(stale_values) != dict(state.values):
            stale_state = PromptState(clean_state(state).template, stale_values)
            stale_choice = decide(self._model, self._execution("stale", stale_state), choices)
            decision = replace(
                decision,
                stale_chosen=stale_choice.chosen,
                recovery=recovery(
                    decision.choices,
                    clean_choice.choices,
                    stale_choice.choices,
                    clean_choice.chosen,
                    stale_choice.chosen,
                ),
            )
        return replace(turn, decision=decision)

    def _execution(self, name: str, state: PromptState) -> Execution:
        """Compute a reference prompt, continuing the exact cache of the last one."""
        prompt = self._render(state, True)
        known = self._exact.get(name)
        plan = Plan.prefill(prompt.token_ids)
        if known is not None:
            plan = plan_suffix(known.layout, plan)
        execution = self._model.engine.execute(plan, base=known)
        self._exact[name] = execution.cache
        return execution


def clean_state(state: PromptState) -> PromptState:
    """Return the conversation without errata and pinned values."""
    return PromptState(state.template.without_errata(), state.values)


def recovery(
    ours: Mapping[str, float],
    clean: Mapping[str, float],
    stale: Mapping[str, float],
    clean_chosen: str,
    stale_chosen: str,
) -> float | None:
    """Return (m - m_stale) / (m_clean - m_stale); None where clean and stale choose the same."""
    if clean_chosen == stale_chosen:
        return None

    def margin(scores: Mapping[str, float]) -> float:
        return scores[clean_chosen] - scores[stale_chosen]

    return (margin(ours) - margin(stale)) / (margin(clean) - margin(stale))


def _floor_cuts(cuts: Sequence[int], length: int) -> list[int]:
    first = int(FLOOR_FROM * length)
    places = {cut for cut in cuts if first <= cut < length}
    for i in range(MIN_FLOOR_CUTS):
        if len(places) >= MIN_FLOOR_CUTS:
            break
        places.add(first + (length - first) * (i + 1) // (MIN_FLOOR_CUTS + 1))
    return sorted(place for place in places if 0 < place < length)

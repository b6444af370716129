"""Checks of an edit: does the result decide as it should?

`full` compares with a cold prefill of the current values. `cheap` may compute a quarter of
the prompt: it makes a second, independent estimate (refresh without an erratum, plus the
notes that deviate most) and asks whether both decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvnotes.engine.base import Execution
from kvnotes.errors import PlanError
from kvnotes.session.edits import PromptState
from kvnotes.session.planner import Live

if TYPE_CHECKING:
    from kvnotes.session.conversation import Conversation

VerifyLevel = Literal["cheap", "full"]

CHEAP_SHARE = 0.25
"""Most that a cheap check may compute, as a share of the prompt's tokens."""


class Checker:
    """Judges executions of one turn against the same check.

    Args:
        talk: The conversation.
        level: `full` or `cheap`.
        choices: Tokens of the choices to decide between; None compares the most likely next
            token.
    """

    def __init__(
        self, talk: Conversation, level: str, choices: Sequence[Sequence[int]] | None
    ) -> None:
        if level not in ("cheap", "full"):
            raise PlanError(f"unknown verify level {level!r}", hint="use 'cheap' or 'full'")
        self.level = level
        self._talk = talk
        self._encoded = choices
        self._clean: tuple[tuple[int, ...], int] | None = None

    def check(
        self,
        execution: Execution,
        state: PromptState,
        live: Live | None,
    ) -> tuple[bool, int]:
        """Return whether the execution decides as the check, and what the check computed.

        The second number is in tokens; a pass over a part of the layers counts that part.
        """
        amended = any(m.pinned or m.is_erratum for m in state.template.messages)
        if execution.cache.exact and not amended:
            return True, 0
        ours = self._decision(execution)
        if self.level == "full":
            return self._check_full(ours, state)
        if live is None or not live.cache.length:
            return True, 0  # everything was computed just now: nothing can be stale
        return self._check_cheap(ours, state, live)

    def _decision(self, execution: Execution) -> int:
        if self._encoded is None:
            return self._talk.model.engine.next_token(execution)
        scores = self._talk.model.engine.score(execution, self._encoded)
        return max(range(len(scores)), key=lambda i: scores[i])

    def _check_full(self, ours: int, state: PromptState) -> tuple[bool, int]:
        clean = self._talk.clean_prompt(state)
        if self._clean is None or self._clean[0] != clean.token_ids:
            execution = self._talk.model.engine.prefill(clean.token_ids)
            self._clean = (clean.token_ids, self._decision(execution))
        return ours == self._clean[1], clean.num_tokens

    def _check_cheap(self, ours: int, state: PromptState, live: Live) -> tuple[bool, int]:
        engine = self._talk.model.engine
        clean = self._talk.clean_prompt(state)
        planner = self._talk.planner
        ideal = planner.ideal(clean, cautious=False)
        matches = planner.matches(clean, live)
        first = planner.keep(live, matches, ideal, strategy="selective")
        budget = int(CHEAP_SHARE * clean.num_tokens) - first.tokens.computed
        if budget < 0:
            return False, 0  # no second estimate fits the budget: not checked is not agreed
        changed = next((m.num_tokens for m in matches if m.target_start == 0), 0)
        num_scored = clean.num_tokens - changed
        scoring = int(num_scored * engine.note_score_share) + 1
        recompute: tuple[int, ...] = ()
        spent = first.tokens.computed
        if budget > scoring:
            share = (budget - scoring) / max(1, num_scored)
            recompute = planner.notes_to_recompute(clean, live, matches, min(1.0, share))
            spent += scoring
        plan = planner.keep(live, matches, ideal, strategy="selective", recompute=recompute)
        spent += plan.tokens.computed - first.tokens.computed
        second = engine.execute(plan, base=live.cache, segments=ideal.segments)
        return ours == self._decision(second), spent

"""An engine that computes nothing: what would run, before it runs.

Owns `DryEngine`. Sessions plan on it exactly as on the engine it stands for, in shapes alone.
What depends on the values of K/V is a placeholder: generated tokens, scores of choices, and which
notes deviate most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.base import Engine, Execution, Executor, Fed, SamplingParams, Stopwatch
from kvnotes.engine.generate import TokenStream
from kvnotes.engine.shapes import ShapeEngine
from kvnotes.errors import EngineError
from kvnotes.plan import Match, Plan, Run
from kvnotes.segment import KVCache, KVSegment

GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, without their whole parts: the largest of them, however many
are taken, stand at even distances."""

_NO_SCORE = 0.0


class DryEngine(ShapeEngine):
    """Executes plans in shapes alone.

    Args:
        engine: The engine it stands for; nothing of it is run, and none of its weights kept.
        reply_id: The token that stands for every generated one.
    """

    title = "a dry run"
    hint = "run it on the engine itself"

    def __init__(self, engine: Engine, reply_id: int = 0) -> None:
        if not 0 <= reply_id < engine.spec.vocab_size:
            raise EngineError(
                f"token {reply_id} cannot stand for a reply, the model has "
                f"{engine.spec.vocab_size} tokens",
                hint="take a token of the model's vocabulary",
            )
        self.identity = engine.identity
        self.rotaries = engine.rotaries
        self.cost = engine.cost
        self.abilities = engine.abilities
        self.copies_because = engine.copies_because
        self._note_score_share = engine.note_score_share
        self._reply_id = reply_id
        self.dtype = getattr(torch, engine.spec.dtype)

    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        """Return a segment without memory."""
        ids, preamble = tuple(token_ids), tuple(preamble_ids)
        if not ids:
            raise EngineError("nothing to compile: the segment has no tokens", hint="give it text")
        whole = (*preamble, *ids)
        self.check_length(len(whole), "the segment")
        return self.stand_in(Run(whole).cut(len(preamble), len(whole)), preamble)

    def execute(
        self,
        plan: Plan,
        *,
        base: KVCache | None = None,
        segments: Iterable[KVSegment] = (),
        consume: bool = False,
        reserve: int = 0,
        executor: Executor = "fast",
    ) -> Execution:
        """Return the cache that a plan leaves, without its K/V."""
        watch = Stopwatch()
        cache = self.arranged(plan, base, segments, reserve)
        logits = self._logits() if plan.yields_logits else None
        return Execution(cache, logits, watch.elapsed_ms)

    def generate(
        self, start: Execution, params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> TokenStream:
        """Generate the stand-in token until the limit."""
        self.check_length(start.cache.length + params.max_new_tokens, "prompt and new tokens")
        return TokenStream(self, start, params, stop_ids)

    def score(self, start: Execution, choices: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return placeholders: no choice is known to be likelier."""
        longest = self.check_choices(choices)
        if longest > 1:
            self.check_length(start.cache.length + longest, "prompt and choices")
        return (_NO_SCORE,) * len(choices)

    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        """Return placeholders: the highest are spread evenly over the tokens that are scored."""
        start = next((m.num_tokens for m in matches if m.source_start == m.target_start == 0), 0)
        scored = [
            position
            for match in matches
            for position in range(match.target_start, match.target_start + match.num_tokens)
            if position >= start
        ]
        return [(position, (i + 1) * GOLDEN % 1) for i, position in enumerate(scored)]

    @property
    def note_score_share(self) -> float:
        """Share of the layers that the engine's own scoring runs."""
        return self._note_score_share

    def step(self, rows: Sequence[Fed]) -> Float[Tensor, "rows vocab"]:
        """Return logits that are certain of the stand-in token."""
        return self._logits().expand(len(rows), -1)

    def _logits(self) -> Tensor:
        logits = torch.full((self.spec.vocab_size,), -torch.inf)
        logits[self._reply_id] = 0.0
        return logits

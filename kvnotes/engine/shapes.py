"""Caches in shapes alone: the bookkeeping of plans for engines that hold no K/V.

Owns `ShapeEngine`. Plans are executed over buffers without memory (torch's "meta" device), so
sessions plan on it as on an engine with K/V: plans depend on tokens and lineage, never on the
values of K/V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvnotes.engine.base import Engine
from kvnotes.engine.execute import Start, arrange_in_place, settle
from kvnotes.errors import EngineError
from kvnotes.plan import Plan, Run
from kvnotes.segment import Buffer, KVCache, KVSegment


class ShapeEngine(Engine):
    """An engine without K/V.

    Attributes:
        title: What it is, in messages.
        hint: Where its refusals send the caller.
    """

    title: str
    hint: str
    dtype: torch.dtype

    def stand_in(self, run: Run, preamble_ids: tuple[int, ...] = ()) -> KVSegment:
        """Return a segment without memory for one that is held elsewhere."""
        tensors = self._buffer(len(run)).tensors
        return KVSegment(run, self.identity, tensors, preamble_ids=preamble_ids)

    def arranged(
        self, plan: Plan, base: KVCache | None, segments: Iterable[KVSegment], reserve: int
    ) -> KVCache:
        """Return the cache that a plan leaves, without its K/V."""
        return self._run(plan, self.sources_of(plan, base, segments), reserve)

    def check_choices(self, choices: Sequence[Sequence[int]]) -> int:
        """Refuse choices that cannot be scored; return the tokens of the longest.

        Raises:
            EngineError: There are none, or one of them is empty.
        """
        if not choices or not all(choices):
            raise EngineError(
                "a choice to score has no tokens", hint="give at least one non-empty choice"
            )
        return max(len(choice) for choice in choices)

    def masked_forward(
        self,
        token_ids: Sequence[int],
        positions: Int[Tensor, " tokens"],
        visible: Bool[Tensor, "tokens tokens"],
        rows: Sequence[int],
    ) -> Float[Tensor, "rows vocab"]:
        """Refuse: a reference without K/V is none."""
        raise EngineError(f"{self.title} has no reference", hint=self.hint)

    def own_forward(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Refuse, as above."""
        raise EngineError(f"{self.title} has no reference", hint=self.hint)

    def room_for(self, cache: KVCache, num_tokens: int) -> KVCache:
        """Return the cache in memory for so many more tokens: there is nothing to copy."""
        plan = Plan(cache.token_ids, cache.layout, base=cache.layout)
        return self._run(plan, cache.sources, num_tokens)

    def gathered(self, cache: KVCache) -> KVCache:
        """Return the cache: everything is in place."""
        return cache

    def _run(self, plan: Plan, sources: Sequence[KVSegment], reserve: int) -> KVCache:
        made = arrange_in_place(plan, Start(self._buffer, sources=sources, reserve=reserve))
        return settle(plan, sources, made, self.identity)

    def _buffer(self, num_tokens: int) -> Buffer:
        return Buffer.allocate(self.spec, num_tokens, self.dtype, "meta")

"""Caches that live side by side, operated on at random, and what must hold after each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from helpers_laws import token_lists
from helpers_models import engine, relative_gap, same_kv, snapshot
from hypothesis import strategies as st
from torch import Tensor

from kvnotes.engine.base import Execution, SamplingParams
from kvnotes.fidelity import LOAD_TOLERANCE, MECHANICAL_TOLERANCE, mask_reference
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.segment import KVCache, KVSegment

MAX_LENGTH = 40
"""Tokens of the longest cache: more only takes longer."""

GAP = MECHANICAL_TOLERANCE["float32"]


@dataclass(eq=False)
class Live:
    """A cache somebody still uses, what it held when it was made, and its last logits."""

    cache: KVCache
    held: list[Tensor]
    execution: Execution | None = None


@dataclass
class World:
    """Live caches and compiled segments of one engine."""

    data: st.DataObject
    name: str = "llama-gqa"
    dtype: torch.dtype = torch.float32
    live: list[Live] = field(default_factory=list)
    segments: list[KVSegment] = field(default_factory=list)
    truth: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = engine(self.name, self.dtype)
        half = self.dtype != torch.float32
        self.gap = LOAD_TOLERANCE[self.engine.spec.dtype] if half else GAP  # of few tokens

    # -- operations ------------------------------------------------------------------------

    def compile(self) -> None:
        preamble = self.data.draw(token_lists(0, 3), label="preamble")
        ids = self.data.draw(token_lists(1, 8), label="segment")
        segment = self.engine.compile(ids, preamble)
        self.segments.append(segment)
        self._remember(segment)

    def compose(self) -> Live:
        """Prefill a prompt, some segments spliced into it."""
        ids: list[int] = list(self.data.draw(token_lists(0, 6), label="header"))
        splices: list[Splice] = []
        count = self.data.draw(st.integers(0, 2)) if self.segments else 0
        for _ in range(count):
            segment = self.segments[self.data.draw(st.integers(0, len(self.segments) - 1))]
            start = self.data.draw(st.integers(0, segment.num_tokens - 1))
            stop = self.data.draw(st.integers(start + 1, segment.num_tokens))
            splices.append(Splice("s", segment.run, start, stop, len(ids)))
            ids += segment.run.token_ids[start:stop]
            ids += self.data.draw(token_lists(0, 4))
        ids += self.data.draw(token_lists(1, 4))
        seam = self.data.draw(st.integers(0, 2), label="seam")
        return self.run(plan_compose(ids, splices, num_seam_tokens=seam), None)

    def edit(self) -> Live | None:
        """Keep stretches of a cache, in any order, between computed tokens."""
        base = self.pick()
        if base is None:
            return None
        length = base.cache.length
        ids: list[int] = []
        matches: list[Match] = []
        for _ in range(self.data.draw(st.integers(1, 3), label="stretches")):
            ids += self.data.draw(token_lists(0, 2))
            start = self.data.draw(st.integers(0, length - 1))
            size = self.data.draw(st.integers(1, length - start))
            matches.append(Match(start, len(ids), size))
            ids += base.cache.token_ids[start : start + size]
        ids = ids[: MAX_LENGTH - 1]
        matches = [
            Match(m.source_start, m.target_start, min(m.num_tokens, len(ids) - m.target_start))
            for m in matches
            if m.target_start < len(ids)
        ]
        ids += self.data.draw(token_lists(1, 2))
        recompute = self.data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=3))
        plan = plan_keep(
            base.cache.layout, matches, Plan.prefill(ids), strategy="refresh", recompute=recompute
        )
        return self.run(plan, base)

    def refresh(self) -> Live | None:
        """Give a stretch other tokens and keep everything round it, in place if allowed."""
        base = self.pick()
        if base is None or base.cache.length < 2:
            return None
        length = base.cache.length
        start = self.data.draw(st.integers(0, length - 2), label="field")
        stop = self.data.draw(st.integers(start, length - 1))
        value = self.data.draw(token_lists(0, 3), label="value")
        old = base.cache.token_ids
        ids = (*old[:start], *value, *old[stop:], *self.data.draw(token_lists(1, 3)))
        kept = [Match(0, 0, start), Match(stop, start + len(value), length - stop)]
        matches = [match for match in kept if match.num_tokens]
        plan = plan_keep(base.cache.layout, matches, Plan.prefill(ids), strategy="refresh")
        return self.run(plan, base)

    def append(self) -> Live | None:
        base = self.pick()
        if base is None or base.cache.length > MAX_LENGTH:
            return None
        ids = (*base.cache.token_ids, *self.data.draw(token_lists(1, 4), label="turn"))
        matches = [Match(0, 0, base.cache.length)]
        plan = plan_keep(base.cache.layout, matches, Plan.prefill(ids), strategy="refresh")
        return self.run(plan, base)

    def truncate(self) -> None:
        base = self.pick()
        if base is not None:
            cut = self.data.draw(st.integers(1, base.cache.length), label="length")
            self._keep(base.cache.truncated(cut))

    def fork(self) -> None:
        base = self.pick()
        if base is not None:
            self._keep(base.cache.fork())

    def drop(self) -> None:
        base = self.pick()
        if base is not None:
            self.live.remove(base)

    def generate(self) -> None:
        base = self.pick(with_logits=True)
        if base is None or base.execution is None or base.cache.length > MAX_LENGTH:
            return
        size = self.data.draw(st.integers(1, 4), label="new tokens")
        read = self.data.draw(st.integers(1, size), label="tokens read")
        stream = self.engine.generate(base.execution, SamplingParams(size))
        for count, _ in enumerate(stream, 1):
            if count == read:
                break
        self._keep(stream.cache.fork())  # if nothing was fed it is the cache it started from

    def score(self) -> None:
        base = self.pick(with_logits=True)
        if base is not None and base.execution is not None:
            choices = self.data.draw(st.lists(token_lists(1, 3), min_size=1, max_size=3))
            self.engine.score(base.execution, choices)

    # -- what each step does ---------------------------------------------------------------

    def run(self, plan: Plan, base: Live | None) -> Live:
        """Run a plan, perhaps giving its base up, and check the result against the oracle."""
        consume = base is not None and self.data.draw(st.booleans(), label="consume")
        base_cache = base.cache if base is not None else None
        if consume and base is not None:
            self.live.remove(base)
            base.execution = None
        execution = self.engine.execute(
            plan, base=base_cache, segments=self.segments, consume=consume
        )
        del base_cache
        self.check_result(plan, execution)
        return self._keep(execution.cache, execution)

    def check_result(self, plan: Plan, execution: Execution) -> None:
        cache = execution.cache
        assert cache.token_ids == plan.token_ids
        assert cache.canonical_layout == plan.canonical_layout
        reference = mask_reference(self.engine, cache.layout)
        gap = relative_gap(execution.last_logits(), reference)
        assert gap < self.gap, f"{plan.shape}: {gap:.1e}"

    def pick(self, *, with_logits: bool = False) -> Live | None:
        usable = [item for item in self.live if item.execution is not None or not with_logits]
        if not usable:
            return None
        return usable[self.data.draw(st.integers(0, len(usable) - 1), label="which")]

    def _keep(self, cache: KVCache, execution: Execution | None = None) -> Live:
        item = Live(cache, snapshot(cache), execution)
        self.live.append(item)
        for segment in cache.sources:
            self._remember(segment)
        return item

    def _remember(self, segment: KVSegment) -> None:
        tensors = [t.clone() for t in (*segment.keys, *segment.values)]
        self.truth.setdefault(segment.source_id, tensors)

    def check(self) -> None:
        """Every live cache holds what it held, every run of it the K/V of that run."""
        for item in self.live:
            assert same_kv(snapshot(item.cache), item.held), "a live cache was overwritten"
            for segment in item.cache.sources:
                truth = self.truth[segment.source_id]
                now = (*segment.keys, *segment.values)
                for left, right in zip(now, truth, strict=True):
                    assert torch.allclose(left, right, rtol=1e-3, atol=1e-4), (
                        f"a cache offers {segment.run} with the K/V of other tokens"
                    )

"""What the property tests share: budgets, and a naive model of lineage.

The naive model writes down, for every cached token, everything it saw and where that stood.
It has no runs, no cuts and no canonical form: two caches are the same if and only if their
tokens saw the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import for_type_by_name

from kvnotes.plan import Compute, Layout, Match, Plan, Reuse, Run, plan_compose, plan_keep
from kvnotes.plan.compose import Splice

BEARTYPE_IN_STRATEGIES = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)
"""Strategies here call kvnotes, whose types beartype checks, at an item taken by `random`."""


for_type_by_name(
    Run.__module__, Run.__qualname__, lambda run, printer, cycle: printer.text(repr(run))
)  # not its whole history


def laws(max_examples: int) -> Any:
    """Return the settings of a property test: no deadline, a machine may be busy."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=slow)


Slot = tuple[int, int]
"""One cached token: which (everything it saw, interned), and where it stands."""


class Naive:
    """Interns what tokens saw."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, tuple[Slot, ...]], int] = {}
        self._runs: dict[int, tuple[int, ...]] = {}
        self._kept: list[Run] = []

    def token(self, token_id: int, position: int, seen: tuple[Slot, ...]) -> int:
        """Return the number of a token that was computed at `position` and saw `seen`."""
        return self._known.setdefault((token_id, position, seen), len(self._known))

    def known(self) -> dict[tuple[int, int, tuple[Slot, ...]], int]:
        """Return every token seen so far: its id, its own position, what it saw; its number."""
        return dict(self._known)

    def computed(self, ids: Iterable[int], start: int, seen: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Return the slots of tokens computed one after the other."""
        for position, token_id in enumerate(ids, start):
            seen = (*seen, (self.token(token_id, position, seen), position))
        return seen

    def layout(self, layout: Layout) -> tuple[Slot, ...]:
        """Return the slots of a layout, run by run."""
        slots: list[Slot] = []
        for view in layout:
            numbers = self._run(view.run)[view.source_start : view.source_stop]
            slots.extend(zip(numbers, range(view.target_start, view.target_stop), strict=True))
        return tuple(slots)

    def plan(self, plan: Plan) -> tuple[Slot, ...]:
        """Return the slots a plan leaves, step by step."""
        slots: tuple[Slot, ...] = ()
        for step in plan.steps:
            if isinstance(step, Compute):
                slots = self.computed(step.token_ids, step.target_start, slots)
            else:
                slots = (*slots, *self.layout((step,)))
        return slots

    def prefill(self, ids: Iterable[int]) -> tuple[Slot, ...]:
        """Return the slots of a cold prefill."""
        return self.computed(ids, 0, ())

    def _run(self, run: Run) -> tuple[int, ...]:
        if id(run) not in self._runs:
            seen = self.layout(run.context)
            slots = self.computed(run.token_ids, run.start, seen)
            self._runs[id(run)] = tuple(number for number, _ in slots[len(seen) :])
            self._kept.append(run)  # its id must not be given to another
        return self._runs[id(run)]


NUM_IDS = 3
"""Few token ids: equal tokens of different lineage must be common."""

token_ids = st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=6).map(tuple)


MODEL_IDS = 89
"""Size of the vocabulary of the tiny models (`helpers_models.VOCAB_SIZE`)."""


def token_lists(min_size: int, max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Token ids of the tiny models."""
    ids = st.integers(0, MODEL_IDS - 1)
    return st.lists(ids, min_size=min_size, max_size=max_size).map(tuple)


@st.composite
def compiled_runs(draw: st.DrawFn) -> tuple[Run, tuple[int, ...]]:
    """A run as `compile` leaves it, and its preamble."""
    preamble = draw(st.one_of(st.just(()), token_ids))
    ids = draw(token_ids)
    return Run((*preamble, *ids)).cut(len(preamble), len(preamble) + len(ids)), preamble


@st.composite
def compositions(draw: st.DrawFn, pool: list[Run]) -> Plan:
    """A plan that splices some runs of a pool between computed tokens."""
    ids: list[int] = []
    splices: list[Splice] = []
    for _ in range(draw(st.integers(0, 3))):
        ids += draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=4))
        if pool:
            run = draw(st.sampled_from(pool))
            start = draw(st.integers(0, len(run) - 1))
            stop = draw(st.integers(start + 1, len(run)))
            splices.append(Splice("s", run, start, stop, len(ids)))
            ids += run.token_ids[start:stop]
    ids += draw(token_ids)
    return plan_compose(ids, splices, num_seam_tokens=draw(st.integers(0, 2)))


@st.composite
def edits(draw: st.DrawFn, live: Layout) -> Plan:
    """A plan that keeps some stretches of a layout, in any order, between computed tokens."""
    length = live[-1].target_stop if live else 0
    held = tuple(token for view in live for token in view.token_ids)
    ids: list[int] = []
    matches: list[Match] = []
    for _ in range(draw(st.integers(0, 4))):
        ids += draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=2))
        if length:
            start = draw(st.integers(0, length - 1))
            size = draw(st.integers(1, length - start))
            matches.append(Match(start, len(ids), size))
            ids += held[start : start + size]
    ids += draw(token_ids)
    recompute = draw(st.sets(st.integers(0, len(ids) - 1), max_size=3))
    return plan_keep(live, matches, Plan.prefill(ids), strategy="refresh", recompute=recompute)


@st.composite
def histories(draw: st.DrawFn, max_edits: int = 3) -> list[Plan]:
    """Plans, each starting from what the one before left."""
    pool = [run for run, _ in draw(st.lists(compiled_runs(), max_size=2))]
    plans = [draw(compositions(pool))]
    for _ in range(draw(st.integers(0, max_edits))):
        plans.append(draw(edits(plans[-1].layout)))
    return plans


@st.composite
def cuts(draw: st.DrawFn, layout: Layout) -> Layout:
    """The same layout with its views cut anywhere, also into runs of their own."""
    result: list[Reuse] = []
    for view in layout:
        places = draw(st.sets(st.integers(view.target_start, view.target_stop), max_size=3))
        edges = sorted({view.target_start, view.target_stop, *places})
        for start, stop in itertools.pairwise(edges):
            part = view.clip(start, stop)
            if draw(st.booleans()):
                run = part.run.cut(part.source_start, part.source_stop)
                part = run.whole(part.target_start)
            result.append(part)
    return tuple(result)

"""Laws 4, 6, 9 and 11 on tiny models: what executing a plan leaves behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from helpers_laws import BEARTYPE_IN_STRATEGIES, cuts, laws, token_lists
from helpers_models import MODELS, engine, kv_gap, plain_logits, relative_gap, same_kv, snapshot
from helpers_world import GAP, World
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.engine import hf
from kvnotes.engine.base import Execution
from kvnotes.errors import LineageError
from kvnotes.plan import Compute, Plan, canonical, check_compiled
from kvnotes.segment import KVSegment
from kvnotes.session import SegmentBook

pytestmark = BEARTYPE_IN_STRATEGIES

KV_GAP = 1e-5
"""K/V of one token computed in two ways, relative to the largest of its layer: float32 sums
in another order, a few layers deep."""


def steps_at(ids: tuple[int, ...], places: set[int]) -> tuple[Compute, ...]:
    edges = sorted({0, len(ids), *(place for place in places if place < len(ids))})
    return tuple(Compute(start, ids[start:stop]) for start, stop in pairwise(edges))


# -- law 4 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_has_the_logits_of_the_models_own_forward(name: str) -> None:
    for size in (1, 2, 30):
        ids = tuple(range(3, 3 + size))
        ours = engine(name).prefill(ids).last_logits()
        assert relative_gap(ours, plain_logits(engine(name).model, ids)) < GAP


@laws(30)
@given(
    ids=token_lists(1, 30),
    places=st.sets(st.integers(1, 29), max_size=4),
    executor=st.sampled_from(["fast", "loop"]),
    chunk=st.sampled_from([1, 3, 512]),
)
def test_computing_everything_is_a_prefill_wherever_it_is_cut(
    ids: tuple[int, ...], places: set[int], executor: str, chunk: int
) -> None:
    whole = engine().prefill(ids)
    with patch.object(hf, "PREFILL_CHUNK", chunk):
        pieces = engine().execute(Plan(ids, steps_at(ids, places)), executor=executor)
    assert kv_gap(snapshot(pieces.cache), snapshot(whole.cache)) < KV_GAP
    assert relative_gap(pieces.last_logits(), whole.last_logits()) < GAP
    assert pieces.cache.exact


@laws(30)
@given(data=st.data(), executor=st.sampled_from(["fast", "loop"]), consume=st.booleans())
def test_reusing_everything_is_the_source_bit_by_bit(
    data: st.DataObject, executor: str, consume: bool
) -> None:
    world = World(data)
    world.compile()
    base = world.compose()
    source = snapshot(base.cache)
    layout = data.draw(cuts(base.cache.layout))
    own = {id(view.run) for view in base.cache.layout}
    views = tuple(view for view in layout if id(view.run) in own)
    if canonical(views) != base.cache.canonical_layout:  # a cut made runs that nobody holds
        views = base.cache.layout
    plan = Plan(base.cache.token_ids, views, base=base.cache.layout)
    again = engine().execute(
        plan, base=base.cache, segments=world.segments, consume=consume, executor=executor
    )
    assert same_kv(snapshot(again.cache), source)
    assert again.logits is None
    assert again.cache.canonical_layout == plan.canonical_layout


# -- law 6 ---------------------------------------------------------------------------------


@laws(30)
@given(ids=token_lists(2, 30), data=st.data())
def test_a_prefilled_cache_cut_anywhere_and_continued_is_the_same_cache(
    ids: tuple[int, ...], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(ids) - 1))
    whole = engine().prefill(ids)
    expected, logits = snapshot(whole.cache), whole.last_logits()
    if data.draw(st.booleans(), label="drop the whole cache first"):
        prefix = whole.cache.truncated(cut)
        del whole
    else:
        prefix = whole.cache.truncated(cut)
    plan = Plan(ids, (*prefix.layout, Compute(cut, ids[cut:])), base=prefix.layout)
    again = engine().execute(plan, base=prefix)
    cold = Plan.prefill(ids)
    assert again.cache.canonical_layout == cold.canonical_layout
    assert plan.digest("model") == cold.digest("model")
    assert again.cache.exact
    assert kv_gap(snapshot(again.cache), expected) < KV_GAP
    assert relative_gap(again.last_logits(), logits) < GAP


@laws(30)
@given(ids=token_lists(2, 20), data=st.data())
def test_slices_of_a_prefilled_cache_are_refused_as_segments(
    ids: tuple[int, ...], data: st.DataObject
) -> None:
    start = data.draw(st.integers(1, len(ids) - 1))
    stop = data.draw(st.integers(start + 1, len(ids)))
    cache = engine().prefill(ids).cache
    run = cache.layout[0].run.cut(start, stop)
    part = cache.buffer.segment(run, start, cache.identity)
    with pytest.raises(LineageError, match="'policy' was computed at position"):
        check_compiled("policy", run, ())
    with pytest.raises(LineageError, match="a slice of a conversation is no segment"):
        SegmentBook(engine()).add("policy", part)
    forged = replace(part, preamble_ids=tuple(token + 1 for token in ids[:start]))
    with pytest.raises(LineageError):
        SegmentBook(engine()).add("policy", forged)


@laws(20)
@given(data=st.data())
def test_slices_of_a_spliced_or_edited_cache_are_refused_as_segments(data: st.DataObject) -> None:
    world = World(data)
    world.compile()
    world.compose()
    item = world.edit()
    assert item is not None
    for segment in item.cache.sources:
        if segment in world.segments or not segment.run.context:
            continue
        with pytest.raises(LineageError):
            SegmentBook(engine()).add("slice", segment)


@laws(20)
@given(preamble=token_lists(0, 8), ids=token_lists(1, 12))
def test_a_segment_compiled_behind_a_preamble_is_the_slice_of_a_prefill(
    preamble: tuple[int, ...], ids: tuple[int, ...]
) -> None:
    segment = engine().compile(ids, preamble)
    whole = engine().prefill((*preamble, *ids)).cache
    start, stop = len(preamble), len(preamble) + len(ids)
    layers = (*whole.buffer.keys, *whole.buffer.values)
    expected = [layer[:, start:stop] for layer in layers]
    assert same_kv([*segment.keys, *segment.values], expected)
    assert segment.run == whole.layout[0].run.cut(start, stop)
    assert segment.preamble_ids == preamble
    SegmentBook(engine()).add("policy", segment)


# -- law 9 ---------------------------------------------------------------------------------


def assert_same(fast: Execution, loop: Execution) -> None:
    assert fast.cache.canonical_layout == loop.cache.canonical_layout
    assert fast.cache.token_ids == loop.cache.token_ids
    assert kv_gap(snapshot(fast.cache), snapshot(loop.cache)) < KV_GAP
    assert relative_gap(fast.last_logits(), loop.last_logits()) < GAP


class BothWorld(World):
    """Runs every plan with both executors, the loop first: the fast one may consume."""

    def run(self, plan, base):  # type: ignore[no-untyped-def]
        base_cache = base.cache if base is not None else None
        loop = self.engine.execute(plan, base=base_cache, segments=self.segments, executor="loop")
        del base_cache
        item = super().run(plan, base)
        assert_same(item.execution, loop)
        return item


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen3-qknorm"])
@laws(20)
@given(data=st.data(), chunk=st.sampled_from([1, 2, 5, 512]))
def test_the_fast_executor_equals_the_loop(name: str, data: st.DataObject, chunk: int) -> None:
    with patch.object(hf, "PREFILL_CHUNK", chunk):
        world = BothWorld(data, name)
        world.compile()
        world.compose()
        for _ in range(data.draw(st.integers(1, 3), label="edits")):
            getattr(world, data.draw(st.sampled_from(["edit", "refresh", "append"])))()
        world.check()


# -- law 11 --------------------------------------------------------------------------------


@laws(20)
@given(data=st.data(), request_ids=token_lists(1, 20))
def test_an_unrelated_request_has_bit_identical_output_after_any_edit(
    data: st.DataObject, request_ids: tuple[int, ...]
) -> None:
    own = plain_logits(engine().model, request_ids)
    before = engine().prefill(request_ids)
    held = snapshot(before.cache)
    world = World(data)
    world.compile()
    world.compose()
    for _ in range(data.draw(st.integers(1, 3), label="operations")):
        doing = st.sampled_from(["edit", "refresh", "append", "generate", "score"])
        getattr(world, data.draw(doing))()
    after = engine().prefill(request_ids)
    assert torch.equal(after.last_logits(), before.last_logits())
    assert same_kv(snapshot(after.cache), held) and same_kv(snapshot(before.cache), held)
    assert torch.equal(plain_logits(engine().model, request_ids), own)


# -- half precision ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@laws(6)
@given(data=st.data())
def test_half_precision_caches_equal_their_mask_reference(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    world = World(data, dtype=dtype)
    world.compile()
    world.compose()
    for doing in ("edit", "refresh"):
        getattr(world, doing)()


def test_a_segment_is_a_value_of_its_own_memory() -> None:
    # compiled segments outlive caches and buffers: nothing may write into them
    segment = engine().compile((5, 6, 7, 8), (1, 2))
    assert isinstance(segment, KVSegment) and segment.buffer is None
    before = segment.checksum()
    for _ in range(4):
        engine().prefill(tuple(range(40)))
    assert segment.checksum() == before

"""Laws 3 and 8, and the canonical form of layouts, against a naive model of lineage."""

from __future__ import annotations

import itertools

import pytest
from helpers_laws import (
    BEARTYPE_IN_STRATEGIES,
    NUM_IDS,
    Naive,
    compiled_runs,
    cuts,
    edits,
    histories,
    laws,
    token_ids,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from kvnotes.errors import LineageError, PlanGapError
from kvnotes.plan import (
    Block,
    Compute,
    Plan,
    Reuse,
    Run,
    Step,
    align,
    canonical,
    check_compiled,
    clip,
    common_prefix,
    holds,
    layout_token_ids,
    plan_suffix,
)

pytestmark = BEARTYPE_IN_STRATEGIES

# -- law 3: a plan covers its target once, in order, with its tokens -------------------------


@st.composite
def loose_steps(draw: st.DrawFn) -> tuple[Step, ...]:
    """Steps that may or may not make a plan."""
    steps: list[Step] = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        ids = draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=3).map(tuple))
        if draw(st.booleans()):
            steps.append(Compute(position, ids))
        else:
            start = draw(st.integers(-3, 2))
            stop = start + draw(st.integers(0, 3))
            steps.append(Reuse(Run(ids, draw(st.integers(0, 2))), start, stop, position))
        position = max(0, steps[-1].target_stop)
    return tuple(steps)


def covers(steps: tuple[Step, ...], ids: tuple[int, ...]) -> bool:
    """Law 3, written down token by token."""
    written: list[int] = []
    for step in steps:
        if step.target_start != len(written) or not step.num_tokens:
            return False
        if isinstance(step, Compute):
            written += step.token_ids
            continue
        places = range(step.source_start, step.source_stop)
        if not all(0 <= place < len(step.run) for place in places):
            return False
        written += [step.run.token_ids[place] for place in places]
    return tuple(written) == ids


@laws(300)
@given(steps=loose_steps(), data=st.data())
def test_steps_are_a_plan_exactly_if_they_cover_the_target_once(
    steps: tuple[Step, ...], data: st.DataObject
) -> None:
    written = tuple(token for step in steps for token in step.token_ids)
    ids = data.draw(st.sampled_from([written, written[:-1], (*written, 0)]))
    if covers(steps, ids):
        assert Plan(ids, steps).tokens.total == len(ids)
    else:
        with pytest.raises(PlanGapError):
            Plan(ids, steps)


@laws(100)
@given(plans=histories())
def test_plans_of_splices_and_edits_hold_the_target_and_count_each_token_once(
    plans: list[Plan],
) -> None:
    for plan in plans:
        assert layout_token_ids(plan.layout) == plan.token_ids
        counts = plan.tokens
        assert counts.reused + counts.moved + counts.computed == counts.total
        assert plan.yields_logits


# -- the canonical form ------------------------------------------------------------------


@laws(150)
@given(plans=histories(), data=st.data())
def test_a_layout_cut_anywhere_has_the_same_canonical_form(
    plans: list[Plan], data: st.DataObject
) -> None:
    layout = plans[-1].layout
    pieces = data.draw(cuts(layout))
    assert canonical(pieces) == canonical(layout)
    assert canonical(canonical(layout)) == canonical(layout)


@laws(150)
@given(plans=histories(), data=st.data())
def test_canonical_form_is_associative(plans: list[Plan], data: st.DataObject) -> None:
    layout = plans[-1].layout
    cut = data.draw(st.integers(0, len(layout)))
    assert canonical((*canonical(layout[:cut]), *layout[cut:])) == canonical(layout)
    assert canonical((*layout[:cut], *canonical(layout[cut:]))) == canonical(layout)


@laws(100)
@given(plans=histories())
def test_a_layout_says_of_every_token_what_it_saw(plans: list[Plan]) -> None:
    naive = Naive()
    for plan in plans:
        assert naive.layout(plan.layout) == naive.plan(plan)
        assert naive.layout(plan.canonical_layout) == naive.plan(plan)


@laws(150)
@given(plans=histories(), others=histories(), data=st.data())
def test_layouts_are_equal_exactly_if_their_tokens_saw_the_same(
    plans: list[Plan], others: list[Plan], data: st.DataObject
) -> None:
    naive = Naive()
    first = plans[-1]
    rivals = [*others, *plans, data.draw(edits(first.layout)), Plan.prefill(first.token_ids)]
    for rival in rivals:
        same = naive.plan(first) == naive.plan(rival)
        assert (first.canonical_layout == rival.canonical_layout) is same


@laws(150)
@given(plans=histories(), others=histories(), data=st.data())
def test_a_common_prefix_is_all_that_two_layouts_share(
    plans: list[Plan], others: list[Plan], data: st.DataObject
) -> None:
    naive = Naive()
    first = plans[-1]
    for rival in (*others, *plans, data.draw(edits(first.layout))):
        left, right = naive.plan(first), naive.plan(rival)
        shared = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
            min(len(left), len(right)),
        )
        assert common_prefix(first.canonical_layout, rival.canonical_layout) == shared


@laws(100)
@given(plans=histories(), data=st.data())
def test_a_layout_holds_its_own_views_and_no_others_there(
    plans: list[Plan], data: st.DataObject
) -> None:
    naive = Naive()
    layout = plans[-1].layout
    slots = naive.layout(layout)
    for view in (v for plan in plans for v in plan.layout):
        there = slots[view.target_start : view.target_stop] == naive.layout((view,))
        if holds(layout, view):
            assert there
    for view in layout:
        start = data.draw(st.integers(view.target_start, view.target_stop - 1))
        stop = data.draw(st.integers(start + 1, view.target_stop))
        assert holds(layout, view.clip(start, stop))


@laws(100)
@given(plans=histories(), data=st.data())
def test_the_parts_of_a_layout_join_to_the_whole(plans: list[Plan], data: st.DataObject) -> None:
    layout = plans[-1].layout
    cut = data.draw(st.integers(0, len(plans[-1].token_ids)))
    parts = (*clip(layout, 0, cut), *clip(layout, cut, len(plans[-1].token_ids)))
    assert canonical(parts) == canonical(layout)


# -- law 6, in integers: a prefilled prompt cut and continued, and its slices ----------------


@laws(100)
@given(ids=token_ids, data=st.data())
def test_a_prompt_continued_in_pieces_has_the_key_of_one_prefill(
    ids: tuple[int, ...], data: st.DataObject
) -> None:
    edges = sorted({0, len(ids), *data.draw(st.sets(st.integers(0, len(ids)), max_size=3))})
    steps = tuple(Compute(a, ids[a:b]) for a, b in itertools.pairwise(edges))
    plan = Plan(ids, steps)
    assert plan.exact
    assert plan.canonical_layout == Plan.prefill(ids).canonical_layout
    assert plan.digest("m") == Plan.prefill(ids).digest("m")


@laws(150)
@given(plans=histories(), data=st.data())
def test_a_slice_of_a_conversation_is_refused_as_a_segment(
    plans: list[Plan], data: st.DataObject
) -> None:
    naive = Naive()
    view = data.draw(st.sampled_from(plans[-1].layout))
    start = data.draw(st.integers(view.source_start, view.source_stop - 1))
    run = view.run.cut(start, view.source_stop)
    alone = naive.layout((run.whole(),)) == naive.prefill(run.token_ids)
    if alone:
        check_compiled("slice", run, ())
    else:
        with pytest.raises(LineageError, match="'slice'"):
            check_compiled("slice", run, ())


@laws(100)
@given(compiled=compiled_runs(), other=token_ids)
def test_a_compiled_run_is_a_segment_behind_its_own_preamble_only(
    compiled: tuple[Run, tuple[int, ...]], other: tuple[int, ...]
) -> None:
    run, preamble = compiled
    check_compiled("s", run, preamble)
    assume(other != preamble)
    with pytest.raises(LineageError):
        check_compiled("s", run, other)


# -- law 8: exact and approximate never share a key ----------------------------------------


@laws(200)
@given(plans=histories())
def test_a_plan_is_exact_exactly_if_every_token_saw_what_a_prefill_shows_it(
    plans: list[Plan],
) -> None:
    naive = Naive()
    for plan in plans:
        cold = Plan.prefill(plan.token_ids)
        assert plan.exact is (naive.plan(plan) == naive.prefill(plan.token_ids))
        assert (plan.digest("m") == cold.digest("m")) is plan.exact


@laws(150)
@given(plans=histories(), others=histories(), data=st.data())
def test_two_plans_share_a_key_exactly_if_they_leave_the_same_cache(
    plans: list[Plan], others: list[Plan], data: st.DataObject
) -> None:
    naive = Naive()
    first = plans[-1]
    for rival in (*plans, *others, data.draw(edits(first.layout)), Plan.prefill(first.token_ids)):
        same = naive.plan(first) == naive.plan(rival)
        assert (first.digest("m") == rival.digest("m")) is same
        assert first.digest("m") != rival.digest("n")


# -- suffix and alignment ------------------------------------------------------------------


@laws(150)
@given(plans=histories(), others=histories())
def test_suffix_equals_composing_from_nothing_whatever_the_live_cache_holds(
    plans: list[Plan], others: list[Plan]
) -> None:
    naive = Naive()
    for live in plans:
        for ideal in (others[0], Plan.prefill(live.token_ids)):
            plan = plan_suffix(live.layout, ideal)
            assert naive.plan(plan) == naive.plan(ideal)
            assert plan.digest("m") == ideal.digest("m")
            assert plan.tokens.computed <= ideal.tokens.computed + 1


@st.composite
def prompts_in_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Block]]:
    """A prompt of a few blocks, with anchors in them."""
    ids: list[int] = []
    blocks: list[Block] = []
    for key in draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]:
        start = len(ids)
        anchors: list[tuple[int, int]] = []
        for _ in range(draw(st.integers(0, 2))):
            ids += draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=4))
            first = len(ids)
            ids += draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=3))
            anchors.append((first, len(ids)))
        ids += draw(st.lists(st.integers(0, NUM_IDS - 1), max_size=4))
        blocks.append(Block(key, start, len(ids), tuple(anchors)))
    return tuple(ids), blocks


@laws(200)
@given(live=prompts_in_blocks(), wanted=prompts_in_blocks())
def test_alignment_claims_equal_tokens_of_the_same_block_once_and_in_order(
    live: tuple[tuple[int, ...], list[Block]], wanted: tuple[tuple[int, ...], list[Block]]
) -> None:
    matches = align(live[0], live[1], wanted[0], wanted[1])
    position = 0
    for match in matches:
        assert match.num_tokens > 0 and match.target_start >= position
        position = match.target_start + match.num_tokens
        source_stop = match.source_start + match.num_tokens
        assert live[0][match.source_start : source_stop] == wanted[0][match.target_start : position]
    used = [m.source_start + i for m in matches for i in range(m.num_tokens)]
    assert len(used) == len(set(used))
    assert position <= len(wanted[0])


@laws(50)
@given(prompt=prompts_in_blocks())
def test_alignment_of_a_prompt_with_itself_keeps_all_of_it(
    prompt: tuple[tuple[int, ...], list[Block]],
) -> None:
    ids, blocks = prompt
    assert sum(m.num_tokens for m in align(ids, blocks, ids, blocks)) == len(ids)

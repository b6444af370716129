"""Plans as integers: steps, lineage, compose, edits, selection, cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvnotes.errors import LineageError, PlanError, PlanGapError
from kvnotes.plan import (
    MIN_SPLICE_TOKENS,
    STRATEGIES,
    Block,
    Compute,
    CostModel,
    Match,
    Plan,
    Reuse,
    Run,
    Splice,
    Step,
    TokenCounts,
    align,
    canonical,
    check_compiled,
    check_strategy,
    clip,
    common_prefix,
    holds,
    is_exact,
    layout_token_ids,
    plan_compose,
    plan_keep,
    plan_suffix,
    select_notes,
)
from kvnotes.plan.edit import MAX_DIFF_TOKENS

IDS = (10, 11, 12, 13, 14, 15, 16, 17)
PREFILLED = Plan.prefill(IDS).layout
SEGMENT = Run((40, 41, 42, 43))
"""A segment compiled alone."""


def splice_behind(header: tuple[int, ...], *rest: int, seam: int = 1) -> Plan:
    ids = (*header, *SEGMENT.token_ids, *rest)
    return plan_compose(
        ids, [Splice("s", SEGMENT, 0, len(SEGMENT), len(header))], num_seam_tokens=seam
    )


# -- steps ---------------------------------------------------------------------------------


def test_a_prefill_computes_everything() -> None:
    plan = Plan.prefill(IDS)
    assert plan.shape == "C"
    assert plan.tokens == TokenCounts(total=8, reused=0, moved=0, computed=8)
    assert plan.exact and plan.yields_logits


def test_an_empty_prompt_has_an_empty_plan_without_logits() -> None:
    plan = Plan.prefill(())
    assert (plan.steps, plan.shape, plan.yields_logits) == ((), "", False)


MALFORMED: dict[str, tuple[Step, ...]] = {
    "gap": (Compute(0, IDS[:3]), Compute(4, IDS[4:])),
    "overlap": (Compute(0, IDS[:4]), Compute(3, IDS[3:])),
    "late start": (Compute(1, IDS[1:]),),
    "out of order": (Compute(4, IDS[4:]), Compute(0, IDS[:4])),
    "wrong token": (Compute(0, (*IDS[:7], 99)),),
    "wrong reused token": (Reuse(Run((*IDS[:3], 99)), 0, 4, 0), Compute(4, IDS[4:])),
    "ends early": (Compute(0, IDS[:7]),),
    "ends late": (Compute(0, (*IDS, 18)),),
    "empty step": (Compute(0, ()), Compute(0, IDS)),
    "empty reuse": (Reuse(Run(IDS), 0, 0, 0), Compute(0, IDS)),
    "reuse past its run": (Reuse(Run(IDS[:2]), 0, 4, 0), Compute(4, IDS[4:])),
    "reuse counted from the end": (Reuse(Run(IDS), -8, -1, 0), Compute(7, IDS[7:])),
    "nothing": (),
}


@pytest.mark.parametrize("steps", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_plan_that_does_not_cover_its_target_once_is_refused(steps: tuple[Step, ...]) -> None:
    with pytest.raises(PlanGapError) as caught:
        Plan(IDS, steps)
    assert caught.value.hint


def test_equal_neighbours_count_once_in_the_shape() -> None:
    plan = Plan(IDS, (Compute(0, IDS[:2]), Compute(2, IDS[2:4]), Compute(4, IDS[4:])))
    assert plan.shape == "C"


def test_a_view_that_the_base_holds_where_it_was_moved_to_is_reused_not_moved() -> None:
    spliced = splice_behind((1, 2), 50)
    follow = Plan(
        (*spliced.token_ids, 51),
        (*spliced.layout[:-1], Compute(6, (50, 51))),
        base=spliced.layout,
    )
    assert spliced.shape == "C R' C"
    assert follow.shape == "R C"
    assert follow.tokens.moved == 0
    assert Plan(follow.token_ids, follow.steps).shape == "R R' C"


def test_token_counts_add_up_to_the_total() -> None:
    plan = splice_behind((1, 2), 50, 51)
    assert plan.tokens == TokenCounts(total=8, reused=0, moved=3, computed=5)


# -- lineage -------------------------------------------------------------------------------


def test_a_prompt_prefilled_in_pieces_is_the_prompt_prefilled_at_once() -> None:
    pieces = Plan(IDS, (Compute(0, IDS[:3]), Compute(3, IDS[3:4]), Compute(4, IDS[4:])))
    assert len(pieces.layout) == 3
    assert pieces.canonical_layout == canonical(PREFILLED)
    assert pieces.digest("model") == Plan.prefill(IDS).digest("model")


def test_a_spliced_prompt_is_not_exact() -> None:
    plan = splice_behind((1, 2), 50)
    assert not plan.exact
    assert plan.digest("model") != Plan.prefill(plan.token_ids).digest("model")


def test_equal_integers_of_another_lineage_have_another_key() -> None:
    # same ids, same shape, same counts: only what the segment saw differs
    alone = Run(SEGMENT.token_ids, 2, Plan.prefill((8, 9)).canonical_layout)
    ids = (1, 2, *SEGMENT.token_ids, 50)
    plans = [
        Plan(ids, (Compute(0, (1, 2)), run.whole(2), Compute(6, (50,)))) for run in (alone, SEGMENT)
    ]
    assert not plans[0].exact and not plans[1].exact
    assert len({plan.digest("model") for plan in (*plans, Plan.prefill(ids))}) == 3


def test_a_plan_has_another_key_on_another_model() -> None:
    assert Plan.prefill(IDS).digest("a") != Plan.prefill(IDS).digest("b")


GOLDEN_RUN = "a9a46f5a4f57f77f43950c7074b18841c8f9ed54b76068891ddfe15568e5c448"
GOLDEN_BEHIND = "098762b9ba92c792aaadcb4deab31086c998d0b01f683cbddde77d0308ded561"
GOLDEN_PLAN = "986a21faafcf0d831506752c124c60646782aa081ae02aef981c9a0b078db367"


def test_digests_do_not_change_between_releases() -> None:
    # stored segments and caches are found by these; a change needs a new format version
    run = Run((1, 2, 300000))
    behind = Run((4, 5), 3, run.after)
    assert run.digest == GOLDEN_RUN
    assert behind.digest == GOLDEN_BEHIND
    assert splice_behind((1, 2), 50).digest("model") == GOLDEN_PLAN


def test_a_run_cut_in_two_sees_its_own_head() -> None:
    run = Run(IDS)
    assert run.cut(0, 8) is run
    assert run.cut(3, 6) == Run(IDS[3:6], 3, Run(IDS[:3]).after)
    assert run.cut(0, 3).cut(1, 3) == run.cut(1, 3)


def test_a_run_of_a_long_history_is_shown_on_one_short_line() -> None:
    layout = PREFILLED
    for turn in range(40):  # every turn sees all runs of the turns before it
        ids = (*layout_token_ids(layout), turn)
        matches = (Match(0, 0, 1), Match(2, 2, len(ids) - 3))
        layout = plan_keep(layout, matches, Plan.prefill(ids), strategy="refresh").layout
    assert len(repr(layout[-1].run)) < 80


def test_a_layout_is_exact_only_at_the_place_it_was_computed_for() -> None:
    assert is_exact(())
    assert is_exact(PREFILLED)
    assert not is_exact((SEGMENT.whole(at=2),))
    assert not is_exact((Run(IDS[2:], 2, Run(IDS[:2]).after).whole(),))


def test_a_common_prefix_ends_where_tokens_or_lineage_differ() -> None:
    other = Plan.prefill((*IDS[:5], 99, 98)).canonical_layout
    assert common_prefix(canonical(PREFILLED), other) == 5
    assert common_prefix(canonical(PREFILLED), canonical(PREFILLED)) == 8
    spliced = splice_behind((1, 2), 50)
    cold = Plan.prefill(spliced.token_ids)
    assert common_prefix(spliced.canonical_layout, cold.canonical_layout) == 3  # header and seam


def test_a_layout_holds_a_view_only_with_its_run_and_its_place() -> None:
    run = PREFILLED[0].run
    assert holds(PREFILLED, Reuse(run, 2, 5, 2))
    assert not holds(PREFILLED, Reuse(run, 2, 5, 3))
    assert not holds(PREFILLED, run.whole(at=1))
    assert not holds(PREFILLED[:0], Reuse(run, 0, 2, 0))
    assert not holds(PREFILLED, Reuse(Run(IDS[:5]), 0, 5, 0))
    assert holds((Reuse(run, 0, 3, 0), Reuse(run, 3, 8, 3)), Reuse(run, 1, 7, 1))


def test_clipping_a_layout_keeps_tokens_and_places() -> None:
    layout = splice_behind((1, 2), 50, 51).layout
    part = clip(layout, 2, 7)
    assert layout_token_ids(part) == (40, 41, 42, 43, 50)
    assert (part[0].target_start, part[-1].target_stop) == (2, 7)


# -- what may be a segment -----------------------------------------------------------------


def test_a_run_compiled_alone_or_behind_its_preamble_is_a_segment() -> None:
    check_compiled("s", SEGMENT, ())
    check_compiled("s", Run(IDS).cut(3, 8), IDS[:3])


@pytest.mark.parametrize("start", [1, 3, 7])
def test_a_slice_of_a_conversation_is_no_segment(start: int) -> None:
    with pytest.raises(LineageError, match="declared preamble has 0 tokens") as caught:
        check_compiled("policy", Run(IDS).cut(start, 8), ())
    assert "'policy'" in str(caught.value) and f"position {start}" in str(caught.value)


def test_a_run_computed_behind_another_preamble_is_no_segment() -> None:
    with pytest.raises(LineageError):
        check_compiled("s", Run(IDS).cut(3, 8), (1, 2, 3))
    with pytest.raises(LineageError):
        check_compiled("s", SEGMENT, (1, 2, 3))
    with pytest.raises(LineageError):  # a spliced conversation behind which it was computed
        context = splice_behind((1, 2), 50).canonical_layout
        check_compiled("s", Run((60, 61), 7, context), layout_token_ids(context))


# -- compose -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seam", "shape", "moved"),
    [(0, "C R' C", 4), (1, "C R' C", 3), (3, "C R' C", 1), (4, "C", 0), (9, "C", 0)],
)
def test_seam_tokens_are_computed_and_the_rest_moved(seam: int, shape: str, moved: int) -> None:
    plan = splice_behind((1, 2), 50, seam=seam)
    assert (plan.shape, plan.tokens.moved) == (shape, moved)


def test_a_segment_at_the_start_stays_in_place_without_a_seam() -> None:
    plan = splice_behind((), 50)
    assert (plan.shape, plan.tokens.reused) == ("R C", 4)
    assert plan.exact


def test_a_segment_behind_exactly_its_preamble_stays_in_place_and_is_exact() -> None:
    whole = (7, 8, *SEGMENT.token_ids)
    run = Run(whole).cut(2, 6)
    plan = plan_compose((*whole, 50), [Splice("s", run, 0, 4, 2)])
    assert (plan.shape, plan.exact) == ("C R C", True)
    elsewhere = plan_compose((7, 9, *SEGMENT.token_ids, 50), [Splice("s", run, 0, 4, 2)])
    assert (elsewhere.shape, elsewhere.exact) == ("C R C", False)
    assert elsewhere.tokens.reused == 3  # behind another preamble it gets its seam


def test_the_last_token_is_computed_also_when_a_segment_ends_the_prompt() -> None:
    plan = splice_behind((1, 2))
    assert plan.yields_logits
    assert plan.steps[-1] == Compute(5, (43,))


def test_segments_compose_in_any_order_they_are_given() -> None:
    first, second = Run((40, 41, 42)), Run((60, 61, 62))
    ids = (1, 40, 41, 42, 60, 61, 62, 2)
    splices = [Splice("a", first, 0, 3, 1), Splice("b", second, 0, 3, 4)]
    assert plan_compose(ids, splices).steps == plan_compose(ids, splices[::-1]).steps
    assert plan_compose(ids, splices).shape == "C R' C R' C"


def test_a_field_before_a_segment_is_noted_only_where_it_is_spliced() -> None:
    ids = (1, 2, *SEGMENT.token_ids, 50)
    splice = Splice("policy", SEGMENT, 0, 4, 2, field_before=True)
    assert plan_compose(ids, [splice]).notes == ("field_before_segment:policy",)
    assert plan_compose(ids, [splice], num_seam_tokens=4).notes == ()


def test_overlapping_segments_and_negative_seams_are_refused() -> None:
    ids = (1, *SEGMENT.token_ids, 2)
    twice = [Splice("a", SEGMENT, 0, 4, 1), Splice("b", SEGMENT, 1, 4, 2)]
    with pytest.raises(PlanError, match="'b' starts at token 2, the one before it ends at 5"):
        plan_compose(ids, twice)
    with pytest.raises(PlanError, match="num_seam_tokens is -1"):
        plan_compose(ids, twice[:1], num_seam_tokens=-1)


def test_a_segment_with_other_tokens_than_the_prompt_is_refused() -> None:
    with pytest.raises(PlanGapError):
        plan_compose((1, 40, 41, 99, 43, 2), [Splice("a", SEGMENT, 0, 4, 1)], num_seam_tokens=0)


# -- edits ---------------------------------------------------------------------------------

LIVE = (*range(100, 110), 1, 2, *range(110, 120))
WANTED = (*range(100, 110), 5, 6, 7, *range(110, 120), 200)
BLOCKS = (Block("field", 0, 22, ((10, 12),)),)
WANTED_BLOCKS = (Block("field", 0, 23, ((10, 13),)), Block("turn", 23, 24))


def test_a_longer_value_keeps_what_stands_around_it() -> None:
    matches = align(LIVE, BLOCKS, WANTED, WANTED_BLOCKS)
    assert matches == (Match(0, 0, 10), Match(12, 13, 10))


def test_a_value_that_occurs_elsewhere_is_never_confused_with_the_field() -> None:
    live = (7, 7, 5, 7, 7)
    wanted = (7, 7, 7, 7, 7)
    anchored = align(live, [Block("m", 0, 5, ((2, 3),))], wanted, [Block("m", 0, 5, ((2, 3),))])
    assert anchored == (Match(0, 0, 2), Match(3, 3, 2))


def test_blocks_that_changed_places_are_matched_where_they_are_now() -> None:
    live = [Block("a", 0, 3), Block("b", 3, 5)]
    wanted = [Block("b", 0, 2), Block("a", 2, 5)]
    matches = align((1, 2, 3, 4, 5), live, (4, 5, 1, 2, 3), wanted)
    assert matches == (Match(3, 0, 2), Match(0, 2, 3))


def test_blocks_of_other_keys_are_never_matched_though_their_tokens_agree() -> None:
    assert align((1, 2), [Block("a", 0, 2)], (1, 2), [Block("b", 0, 2)]) == ()


def test_a_block_with_another_number_of_occurrences_is_still_matched_at_its_ends() -> None:
    live = [Block("m", 0, 6, ((2, 3),))]
    wanted = [Block("m", 0, 7, ((2, 3), (4, 5)))]
    matches = align((1, 2, 50, 3, 4, 5), live, (1, 2, 60, 3, 61, 4, 5), wanted)
    assert matches[0] == Match(0, 0, 2)
    assert matches[-1] == Match(4, 5, 2)


def test_a_stretch_longer_than_the_limit_is_recomputed_between_its_equal_ends() -> None:
    size = MAX_DIFF_TOKENS + 10
    live = (1, *range(1000, 1000 + size), 2)
    wanted = (
        1,
        *range(5000, 5000 + size // 2),
        1000 + size // 2,
        *range(7000, 7000 + size // 2),
        2,
    )
    matches = align(live, [Block("m", 0, len(live))], wanted, [Block("m", 0, len(wanted))])
    assert matches == (Match(0, 0, 1), Match(len(live) - 1, len(wanted) - 1, 1))


def test_suffix_recomputes_from_the_first_change_and_is_exact() -> None:
    plan = plan_suffix(Plan.prefill(LIVE).layout, Plan.prefill(WANTED))
    assert (plan.shape, plan.exact) == ("R C", True)
    assert plan.tokens.reused == 10


def test_suffix_after_stale_notes_starts_at_the_first_of_them() -> None:
    live = Plan.prefill(LIVE)
    matches = align(LIVE, BLOCKS, WANTED, WANTED_BLOCKS)
    refreshed = plan_keep(live.layout, matches, Plan.prefill(WANTED), strategy="refresh")
    again = plan_suffix(refreshed.layout, Plan.prefill((*WANTED, 201)))
    assert again.exact
    assert again.tokens.reused == 13  # up to the end of the refreshed field


def test_suffix_of_an_unchanged_prompt_computes_the_last_token_alone() -> None:
    plan = plan_suffix(PREFILLED, Plan.prefill(IDS))
    assert plan.tokens == TokenCounts(total=8, reused=7, moved=0, computed=1)


def test_refresh_keeps_what_stands_around_the_field_and_is_approximate() -> None:
    matches = align(LIVE, BLOCKS, WANTED, WANTED_BLOCKS)
    plan = plan_keep(Plan.prefill(LIVE).layout, matches, Plan.prefill(WANTED), strategy="refresh")
    assert (plan.shape, plan.exact) == ("R C R' C", False)
    assert plan.tokens == TokenCounts(total=24, reused=10, moved=10, computed=4)


def test_refresh_of_the_same_length_moves_nothing() -> None:
    wanted = (*LIVE[:10], 5, 6, *LIVE[12:], 200)
    blocks = (Block("field", 0, 22, ((10, 12),)),)
    matches = align(LIVE, BLOCKS, wanted, blocks)
    plan = plan_keep(Plan.prefill(LIVE).layout, matches, Plan.prefill(wanted), strategy="refresh")
    assert (plan.shape, plan.exact) == ("R C R C", False)


def test_chosen_notes_are_computed_and_nothing_else() -> None:
    matches = align(LIVE, BLOCKS, WANTED, WANTED_BLOCKS)
    plan = plan_keep(
        Plan.prefill(LIVE).layout,
        matches,
        Plan.prefill(WANTED),
        strategy="selective",
        recompute=(15, 16, 20, 500),
    )
    assert plan.shape == "R C R' C R' C R' C"
    assert plan.tokens.computed == 4 + 3


def test_deleting_a_span_moves_what_follows() -> None:
    wanted = (*IDS[:2], *IDS[4:], 99)
    matches = (Match(0, 0, 2), Match(4, 2, 4))
    plan = plan_keep(PREFILLED, matches, Plan.prefill(wanted), strategy="refresh")
    assert (plan.shape, plan.tokens.moved) == ("R R' C", 4)


def test_a_kept_prompt_still_computes_its_last_token() -> None:
    plan = plan_keep(PREFILLED, (Match(0, 0, 8),), Plan.prefill(IDS), strategy="refresh")
    assert (plan.shape, plan.tokens.computed) == ("R C", 1)
    assert plan.exact


def test_unknown_strategies_are_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(PlanError) as caught:
        check_strategy("sufix")
    assert caught.value.hint == "did you mean 'suffix'?"


def test_stale_is_offered_to_measurements_only() -> None:
    with pytest.raises(PlanError) as caught:
        check_strategy("stale")
    assert "stale" not in caught.value.hint
    assert check_strategy("stale", allow_stale=True) == "stale"
    assert [check_strategy(s, allow_stale=True) for s in STRATEGIES] == list(STRATEGIES)


# -- selection and cost --------------------------------------------------------------------


def test_the_notes_that_deviate_most_are_chosen_in_order_of_position() -> None:
    assert select_notes([0.1, 5.0, 3.0, 4.0], [7, 20, 9, 8], 2) == (8, 20)
    assert select_notes([1.0, 1.0, 1.0], [9, 8, 7], 2) == (7, 8)
    assert select_notes([1.0], [3], 10) == (3,)
    assert select_notes([1.0], [3], 0) == ()


def test_a_selection_needs_one_score_per_position_and_a_count() -> None:
    with pytest.raises(PlanError, match="2 scores for 1 positions"):
        select_notes([1.0, 2.0], [3], 1)
    with pytest.raises(PlanError, match="num_notes is -1"):
        select_notes([1.0], [3], -1)


COST = CostModel(ms_per_token=1.0, ms_per_pair=0.001, ms_per_moved_token=0.01, ms_per_pass=0.5)


def test_a_plan_costs_its_computed_tokens_and_what_they_see() -> None:
    assert COST.predict_ms(Plan.prefill(IDS)) == pytest.approx(0.5 + 8 * (1 + 4 * 0.001))
    spliced = splice_behind((1, 2), 50)
    moved = 3 * 0.01
    computed = 3 * (1 + 1.5 * 0.001) + 1 * (1 + 6.5 * 0.001)
    assert COST.predict_ms(spliced) == pytest.approx(0.5 + moved + computed)


def test_every_pass_that_a_plan_needs_has_its_fixed_cost() -> None:
    cost = replace(COST, tokens_per_pass=3)
    more = cost.predict_ms(Plan.prefill(IDS)) - COST.predict_ms(Plan.prefill(IDS))
    assert len(IDS) == 8 and more == pytest.approx(2 * 0.5)
    assert [cost.passes_ms(n) for n in (0, 1, 3, 4, 6, 7)] == [0, 0.5, 0.5, 1.0, 1.0, 1.5]
    assert COST.passes_ms(10_000) == 0.5


def test_steps_add_up_to_the_plan() -> None:
    plan = splice_behind((1, 2), 50)
    steps = [COST.step_ms(plan, step) for step in plan.steps]
    assert COST.predict_ms(plan) == pytest.approx(COST.passes_ms(plan.tokens.computed) + sum(steps))
    assert steps[1] == pytest.approx(3 * 0.01), "a moved step"
    kept = Plan(plan.token_ids, plan.steps, base=plan.layout)
    assert COST.step_ms(kept, kept.steps[1]) == 0, "what is there already costs nothing"


def test_a_splice_pays_only_above_the_break_even_length() -> None:
    assert COST.splice_pays(MIN_SPLICE_TOKENS, 10, 1)
    assert not COST.splice_pays(MIN_SPLICE_TOKENS - 1, 10, 1)
    assert not COST.splice_pays(100, 10, 60)
    slow_copy = CostModel(1.0, 0.0, 2.0, 0.0)
    assert not slow_copy.splice_pays(1000, 10, 1)

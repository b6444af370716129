"""Sampling, streams and scores against brute force, and forks that generate in turn."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_laws import laws, token_lists
from helpers_models import MAX_POSITIONS, engine, plain_logits, same_kv, snapshot, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.engine.base import SamplingParams
from kvnotes.engine.generate import Sampler
from kvnotes.errors import EngineError, OutOfCacheError
from kvnotes.plan import Compute, Match, Plan, Splice, plan_compose, plan_keep

IDS = tokens(20)

LOG_PROB_GAP = 2e-5
"""Sum of a few float32 log-probabilities, computed in one pass or token by token."""

# -- sampling ------------------------------------------------------------------------------

logit_lists = st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=9)
"""Few values: ties are common."""


def distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn and how likely, written down plainly."""
    scores = sorted(
        ((value / params.temperature, token) for token, value in enumerate(logits)),
        key=lambda pair: (-pair[0], pair[1]),
    )
    if params.top_k:
        lowest = scores[min(params.top_k, len(scores)) - 1][0]
        scores = [pair for pair in scores if pair[0] >= lowest]  # ties with the last are kept
    weights = [(math.exp(score - scores[0][0]), token) for score, token in scores]
    total = sum(weight for weight, _ in weights)
    kept: dict[int, float] = {}
    for weight, token in weights:
        if sum(kept.values()) >= params.top_p:
            break
        kept[token] = weight / total
    rest = sum(kept.values())
    return {token: weight / rest for token, weight in kept.items()}


@laws(80)
@given(
    logits=logit_lists,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.35, 0.72, 0.97, 1.0]),
    seed=st.integers(0, 9),
)
def test_only_tokens_of_the_distribution_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    params = SamplingParams(1, temperature, top_p, top_k, seed)
    expected = distribution(logits, params)
    sampler = Sampler(params)
    drawn = {sampler.choose(torch.tensor(logits)) for _ in range(20)}
    assert drawn <= set(expected)


@laws(80)
@given(logits=logit_lists, seed=st.integers(0, 99))
def test_without_temperature_the_first_most_likely_token_is_taken(
    logits: list[float], seed: int
) -> None:
    for params in (SamplingParams(seed=seed), SamplingParams(temperature=0.0, top_k=3, top_p=0.5)):
        assert Sampler(params).choose(torch.tensor(logits)) == logits.index(max(logits))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1e-320),
    ],
)
def test_the_narrowest_sampling_is_greedy(params: SamplingParams) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.9])
    assert {Sampler(params).choose(logits) for _ in range(20)} == {1}


def test_tokens_that_a_model_rules_out_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    sampler = Sampler(SamplingParams(temperature=2.0))
    assert {sampler.choose(logits) for _ in range(40)} == {1, 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_k": -1},
        {"stop": ("",)},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(changes: dict[str, object]) -> None:
    name = next(iter(changes))
    with pytest.raises(EngineError, match=f"{name}=") as caught:
        SamplingParams(**changes)  # type: ignore[arg-type]
    assert caught.value.hint


# -- streams -------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_text_whatever_else_was_drawn() -> None:
    start = engine().prefill(IDS)
    params = SamplingParams(10, temperature=1.2, seed=4)
    alone = list(engine().generate(start, params))
    torch.manual_seed(99)
    other = iter(engine().generate(start, SamplingParams(10, temperature=1.2, seed=5)))
    mixed = []
    for token in engine().generate(start, params):
        mixed.append(token)
        next(other, None)
        torch.rand(3)
    assert mixed == alone


def test_two_forks_that_generate_alternately_equal_each_alone() -> None:
    start = engine().prefill(IDS)
    before = start.cache.checksum()
    settings = [SamplingParams(8, temperature=1.0, seed=seed) for seed in (1, 2)]
    alone = [list(engine().generate(start, params)) for params in settings]
    assert alone[0] != alone[1], "two seeds, two texts"
    streams = [engine().generate(start, params) for params in settings]
    running = [iter(stream) for stream in streams]
    for _ in range(8):
        for stream in running:
            next(stream)
    assert [list(stream.token_ids) for stream in streams] == alone
    assert start.cache.checksum() == before
    for stream, ids in zip(streams, alone, strict=True):
        cold = engine().prefill((*IDS, *ids[:-1])).cache
        for ours, theirs in zip(snapshot(stream.cache), snapshot(cold), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_cache_of_a_stream_grows_with_it_and_is_exact() -> None:
    start = engine().prefill(IDS)
    stream = engine().generate(start, SamplingParams(5))
    assert stream.cache.token_ids == IDS
    for count, _ in enumerate(stream, 1):
        fed = stream.token_ids[: count - 1]  # the last token is not fed back
        assert stream.cache.token_ids == (*IDS, *fed)
        assert stream.cache.exact
    cold = Plan.prefill((*IDS, *stream.token_ids[:-1]))
    assert stream.cache.canonical_layout == cold.canonical_layout


def test_a_cache_read_in_the_middle_of_a_stream_keeps_what_it_held() -> None:
    stream = engine().generate(engine().prefill(IDS), SamplingParams(6))
    running = iter(stream)
    for _ in range(3):
        next(running)
    middle = stream.cache
    held = snapshot(middle)
    list(running)
    assert middle.token_ids == (*IDS, *stream.token_ids[:2])
    assert same_kv(snapshot(middle), held)


def test_a_stream_that_nobody_finishes_gives_its_memory_back() -> None:
    start = engine().prefill(IDS)
    running = iter(engine().generate(start, SamplingParams(50)))
    next(running)
    del running
    ids = (*IDS, 1, 2)
    plan = Plan(ids, (*start.cache.layout, Compute(20, (1, 2))), base=start.cache.layout)
    follow = engine().execute(plan, base=start.cache)
    assert follow.cache.buffer is start.cache.buffer


def test_a_finished_stream_reads_no_more_than_its_cache_holds() -> None:
    start = engine().prefill(IDS)
    stream = engine().generate(start, SamplingParams(50))
    running = iter(stream)
    for _ in range(3):
        next(running)
    running.close()  # type: ignore[attr-defined]
    cache = stream.cache
    ids = (*cache.token_ids, 1, 2)
    plan = Plan(ids, (*cache.layout, Compute(cache.length, (1, 2))), base=cache.layout)
    follow = engine().execute(plan, base=cache)
    assert follow.cache.buffer is cache.buffer, "the stream is still there, and claims no more"


def test_generation_goes_on_from_a_spliced_cache_as_from_its_logits() -> None:
    segment = engine().compile(tokens(12, seed=3))
    ids = (*IDS[:5], *segment.run.token_ids, *IDS[5:9])
    plan = plan_compose(ids, [Splice("s", segment.run, 0, 12, 5)])
    start = engine().execute(plan, segments=[segment])
    stream = engine().generate(start, SamplingParams(4))
    generated = list(stream)
    again = engine().execute(plan, segments=[segment])
    for token in generated:
        assert token == int(again.last_logits().argmax())
        ids = (*ids, token)
        layout = again.cache.layout
        step = Plan(ids, (*layout, Compute(len(ids) - 1, (token,))), base=layout)
        again = engine().execute(step, base=again.cache)
    assert not stream.cache.exact


def test_generation_may_fill_the_context_and_not_one_token_more() -> None:
    ids = tokens(MAX_POSITIONS - 3)
    start = engine().prefill(ids)
    assert len(list(engine().generate(start, SamplingParams(3)))) == 3
    with pytest.raises(OutOfCacheError, match=f"{MAX_POSITIONS + 1} tokens.*{MAX_POSITIONS}"):
        engine().generate(start, SamplingParams(4))


def test_generation_needs_logits() -> None:
    whole = engine().prefill(IDS)
    reused = engine().execute(Plan(IDS, whole.cache.layout), base=whole.cache)
    with pytest.raises(EngineError, match="yields no logits"):
        list(engine().generate(reused, SamplingParams(2)))


# -- scores --------------------------------------------------------------------------------


@laws(15)
@given(
    choices=st.lists(token_lists(1, 5), min_size=1, max_size=4),
    name=st.sampled_from(["llama-gqa", "qwen2-bias"]),
)
def test_a_score_is_the_summed_log_probability_of_plain_forwards(
    choices: list[tuple[int, ...]], name: str
) -> None:
    start = engine(name).prefill(IDS)
    held = snapshot(start.cache)
    expected = []
    for choice in choices:
        total, ids = 0.0, IDS
        for token in choice:
            total += float(torch.log_softmax(plain_logits(engine(name).model, ids), -1)[token])
            ids = (*ids, token)
        expected.append(total)
    scores = engine(name).score(start, choices)
    assert scores == pytest.approx(expected, abs=LOG_PROB_GAP * 20)
    assert same_kv(snapshot(start.cache), held) and start.cache.token_ids == IDS


def test_a_choice_is_scored_the_same_whatever_the_others_are() -> None:
    start = engine().prefill(IDS)
    choices = [(3, 4, 5), (7,), (3, 4), (3, 4, 5, 6, 8)]
    together = engine().score(start, choices)
    alone = [engine().score(start, [choice])[0] for choice in choices]
    assert together == pytest.approx(alone, abs=LOG_PROB_GAP)
    assert engine().score(start, choices[::-1]) == pytest.approx(together[::-1], abs=LOG_PROB_GAP)


def test_scores_do_not_disturb_a_fork_that_has_gone_on() -> None:
    start = engine().prefill(IDS)
    ids = (*IDS, 1, 2, 3)
    plan = Plan(ids, (*start.cache.layout, Compute(20, (1, 2, 3))), base=start.cache.layout)
    fork = engine().execute(plan, base=start.cache)
    held = snapshot(fork.cache)
    engine().score(start, [(5, 6, 7, 8)])
    assert same_kv(snapshot(fork.cache), held)


def test_choices_without_tokens_or_beyond_the_context_are_refused() -> None:
    start = engine().prefill(tokens(MAX_POSITIONS - 2))
    for choices in ([], [()], [(1,), ()]):
        with pytest.raises(EngineError, match="no tokens"):
            engine().score(start, choices)
    with pytest.raises(OutOfCacheError, match=f"{MAX_POSITIONS + 1} tokens.*{MAX_POSITIONS}"):
        engine().score(start, [(1,), (1, 2, 3)])
    assert len(engine().score(start, [(1, 2), (3,)])) == 2


# -- note scores ---------------------------------------------------------------------------


def test_note_scores_are_highest_where_the_change_is_seen_most() -> None:
    ids = tokens(40, seed=8)
    cache = engine().prefill(ids).cache
    changed = (*ids[:10], (ids[10] + 1) % 80, *ids[11:])
    matches = [Match(0, 0, 10), Match(11, 11, 29)]
    scores = dict(engine().note_scores(cache, changed, matches))
    cold = engine().prefill(changed).cache
    depth = engine()._depth
    moved = (cold.buffer.values[depth][:, 11:40] - cache.buffer.values[depth][:, 11:40]).pow(2)
    expected = moved.sum((0, 2))
    assert list(scores) == list(range(11, 40))
    assert torch.allclose(torch.tensor(list(scores.values())), expected, rtol=1e-3, atol=1e-6)


def test_note_scores_follow_tokens_that_have_moved() -> None:
    ids = tokens(30, seed=8)
    cache = engine().prefill(ids).cache
    longer = (*ids[:10], 5, 6, *ids[10:])
    scores = engine().note_scores(cache, longer, [Match(0, 0, 10), Match(10, 12, 20)])
    assert [position for position, _ in scores] == list(range(12, 32))


def test_nothing_new_has_no_note_scores() -> None:
    cache = engine().prefill(IDS).cache
    assert engine().note_scores(cache, IDS, [Match(0, 0, len(IDS))]) == []


def test_note_scores_leave_the_cache_as_it_is() -> None:
    cache = engine().prefill(IDS).cache
    held = snapshot(cache)
    engine().note_scores(cache, (*IDS[:5], 1, *IDS[6:]), [Match(0, 0, 5), Match(6, 6, 14)])
    assert same_kv(snapshot(cache), held)
    plan = plan_keep(cache.layout, [Match(0, 0, 20)], Plan.prefill((*IDS, 1)), strategy="refresh")
    engine().execute(plan, base=cache)

"""The engine against plain forwards of the same model: every supported family, no cache of ours."""

from __future__ import annotations

import pytest
import torch
from helpers_models import (
    MAX_POSITIONS,
    MODELS,
    engine,
    kv_gap,
    plain_logits,
    relative_gap,
    snapshot,
    tokens,
)

from kvnotes.engine.base import SamplingParams
from kvnotes.engine.generate import Sampler
from kvnotes.errors import (
    EngineError,
    LineageError,
    OutOfCacheError,
    SpecMismatchError,
    UnknownSegmentError,
)
from kvnotes.fidelity import MECHANICAL_TOLERANCE, compare, floor, mask_reference
from kvnotes.gate import run_gate
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.rope import Rotary
from kvnotes.session import SegmentBook

TOLERANCE = MECHANICAL_TOLERANCE["float32"]

UNROTATED = 1000 * TOLERANCE
"""Not moving the keys must be this much worse, or the test could not fail."""

IDS = tokens(60)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_equals_the_models_own_forward(name: str) -> None:
    assert (
        relative_gap(engine(name).prefill(IDS).last_logits(), plain_logits(engine(name).model, IDS))
        <= TOLERANCE
    )


@pytest.mark.parametrize("name", MODELS)
def test_splices_and_edits_equal_the_loop_and_the_mask(name: str) -> None:
    e = engine(name)
    assert run_gate(e).worst <= TOLERANCE
    first, second = e.compile(IDS[10:30]), e.compile(IDS[35:50], IDS[:5])
    splices = [Splice("a", first.run, 0, 20, 10), Splice("b", second.run, 0, 15, 35)]
    plan = plan_compose(IDS, splices, num_seam_tokens=2)
    spliced = e.execute(plan, segments=[first, second])
    looped = e.execute(plan, segments=[first, second], executor="loop")
    assert kv_gap(snapshot(spliced.cache), snapshot(looped.cache)) <= TOLERANCE
    assert relative_gap(spliced.last_logits(), mask_reference(e, spliced.cache.layout)) <= TOLERANCE
    longer = (*IDS[:20], 5, 6, 7, *IDS[21:])
    matches = [Match(0, 0, 20), Match(21, 23, 39)]
    edit = plan_keep(
        spliced.cache.layout,
        matches,
        Plan.prefill(longer),
        strategy="selective",
        recompute=(30, 41),
    )
    before = spliced.cache.checksum()
    edited = e.execute(edit, base=spliced.cache)
    assert relative_gap(edited.last_logits(), mask_reference(e, edited.cache.layout)) <= TOLERANCE
    assert spliced.cache.checksum() == before
    again = e.execute(edit, base=spliced.cache, executor="loop")
    assert relative_gap(edited.last_logits(), again.last_logits()) <= TOLERANCE


def test_keys_left_unrotated_fail_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvnotes.engine import execute

    e = engine()
    segment = e.compile(IDS[10:40])
    plan = plan_compose(IDS, [Splice("a", segment.run, 0, 30, 10)], num_seam_tokens=1)

    def unrotated(
        layers: list[torch.Tensor], turn: object, spec: object, outs: list[torch.Tensor]
    ) -> None:
        for keys, out in zip(layers, outs, strict=True):
            out.copy_(keys)

    monkeypatch.setattr(execute, "turn_keys", unrotated)
    monkeypatch.setattr(Rotary, "back", lambda self, *move: torch.eye(self.spec.rotary_dim))
    for executor in ("copy", "view"):
        wrong = e.execute(plan, segments=[segment], executor=executor)
        assert relative_gap(wrong.last_logits(), mask_reference(e, wrong.cache.layout)) > UNROTATED


def test_a_segment_behind_a_preamble_is_that_slice_of_a_prefill() -> None:
    e = engine()
    segment = e.compile(IDS[12:40], IDS[:12])
    whole = e.prefill(IDS[:40]).cache
    keys = [layer[:, 12:40] for layer in whole.buffer.keys]
    values = [layer[:, 12:40] for layer in whole.buffer.values]
    assert kv_gap([*segment.keys, *segment.values], [*keys, *values]) <= TOLERANCE
    assert segment.run.start == 12 and segment.preamble_ids == IDS[:12]


def test_all_reuse_is_the_source_bit_for_bit_and_yields_no_logits() -> None:
    e = engine()
    source = e.prefill(IDS)
    copy = e.execute(Plan(IDS, source.cache.layout), base=source.cache)
    assert kv_gap(snapshot(copy.cache), snapshot(source.cache)) == 0
    with pytest.raises(EngineError, match="yields no logits"):
        copy.last_logits()


def test_scores_are_the_log_probabilities_of_plain_forwards() -> None:
    e = engine()
    start = e.prefill(IDS[:30])
    choices = [(3, 4, 5), (7,), (3, 8)]
    expected = []
    for choice in choices:
        total, ids = 0.0, IDS[:30]
        for token in choice:
            total += float(torch.log_softmax(plain_logits(e.model, ids), -1)[token])
            ids = (*ids, token)
        expected.append(total)
    assert e.score(start, choices) == pytest.approx(expected, abs=1e-4)  # sums of logs in float32
    assert start.cache.length == 30


def test_greedy_generation_is_argmax_of_plain_forwards() -> None:
    e = engine()
    stream = e.generate(e.prefill(IDS[:20]), SamplingParams(6))
    ids = IDS[:20]
    for token in stream:
        assert token == int(plain_logits(e.model, ids).argmax())
        ids = (*ids, token)
    assert stream.cache.token_ids == ids[:-1] and stream.cache.exact


def test_generation_ends_at_a_stop_token() -> None:
    e = engine()
    free = list(e.generate(e.prefill(IDS[:20]), SamplingParams(6)))
    stopped = list(e.generate(e.prefill(IDS[:20]), SamplingParams(6), frozenset({free[2]})))
    assert stopped == free[: free.index(free[2]) + 1]


def test_the_same_seed_samples_the_same_tokens() -> None:
    e = engine()
    runs = [
        list(e.generate(e.prefill(IDS[:20]), SamplingParams(12, temperature=1.5, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.6},
    ],
)
def test_samples_follow_the_distribution_they_should(params: dict[str, float]) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0])
    probs = torch.softmax(logits.double() / params["temperature"], -1)
    kept = torch.ones(6, dtype=torch.bool)
    if "top_k" in params:
        kept[int(params["top_k"]) :] = False  # the logits are in descending order
    if "top_p" in params:
        kept = probs.cumsum(0) - probs < params["top_p"]
    probs = torch.where(kept, probs, 0.0)
    probs /= probs.sum()
    sampler = Sampler(SamplingParams(1, seed=3, **params))  # type: ignore[arg-type]
    draws = torch.tensor([sampler.choose(logits) for _ in range(4000)])
    seen = torch.bincount(draws, minlength=6) / 4000
    assert not bool(seen[~kept].any())
    assert float((seen - probs).abs().max()) < 0.04  # five standard deviations of 4000 draws


def test_what_does_not_fit_is_refused_before_work_with_both_lengths() -> None:
    e = engine()
    with pytest.raises(OutOfCacheError, match=f"300 tokens.*{MAX_POSITIONS}"):
        e.prefill(tokens(300))
    with pytest.raises(OutOfCacheError, match=f"320 tokens.*{MAX_POSITIONS}"):
        e.generate(e.prefill(IDS[:20]), SamplingParams(300))


def test_an_unknown_run_and_another_models_segment_are_refused() -> None:
    e, other = engine(), engine("llama-mha")
    segment = other.compile(IDS[10:40])
    plan = plan_compose(IDS, [Splice("a", segment.run, 0, 30, 10)])
    with pytest.raises(UnknownSegmentError):
        e.execute(plan)
    with pytest.raises(SpecMismatchError, match="num_kv_heads"):
        e.execute(plan, segments=[segment])


def test_a_slice_of_a_conversation_is_refused_as_a_segment() -> None:
    e = engine()
    cache = e.prefill(IDS).cache
    run = cache.layout[0].run.cut(20, 40)
    slice_ = cache.buffer.segment(run, 20, e.identity)
    with pytest.raises(LineageError, match="position 20"):
        SegmentBook(e).add("stolen", slice_)


def test_note_scores_find_what_a_change_touches() -> None:
    e = engine()
    cache = e.prefill(IDS).cache
    changed = (*IDS[:20], (IDS[20] + 1) % 80, *IDS[21:])
    scores = dict(e.note_scores(cache, changed, [Match(0, 0, 20), Match(21, 21, 39)]))
    assert set(scores) == set(range(21, 60))
    same = dict(e.note_scores(cache, IDS[:59], [Match(0, 0, 20), Match(21, 21, 38)]))
    assert max(same.values()) < 1e-6 * max(scores.values())  # rounding against a real change


def test_a_floor_is_measured_at_five_cuts_or_more() -> None:
    values = floor(engine(), IDS, [30])
    assert len(values) >= 5 and max(values) < 1e-9  # float32 logits, float64 divergence


def test_compare_knows_equal_from_different() -> None:
    left = torch.tensor([1.0, 2.0, 3.0])
    same, other = compare(left, left), compare(left, -left)
    assert same.kl_nats == 0 and same.top1_agree and same.max_logit_gap == 0
    assert other.kl_nats > 1 and not other.top1_agree and other.max_logit_gap == 2

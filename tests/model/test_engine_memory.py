"""What executing a plan copies, overwrites and refuses to hand out."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers_models import engine, kv_gap, same_kv, snapshot, tokens

from kvnotes.errors import UnknownSegmentError
from kvnotes.plan import Compute, Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.segment import KVCache

IDS = tokens(20)
KV_GAP = 1e-5
"""K/V computed by another route in float32, relative to the largest of the layer."""


def append(cache: KVCache, ids: tuple[int, ...]) -> Plan:
    step = Compute(cache.length, ids)
    return Plan((*cache.token_ids, *ids), (*cache.layout, step), base=cache.layout)


def refreshed(cache: KVCache, value: tuple[int, ...]) -> Plan:
    """Tokens 8 and 9 replaced, everything round them kept."""
    ids = (*cache.token_ids[:8], *value, *cache.token_ids[10:], 1)
    matches = [Match(0, 0, 8), Match(10, 8 + len(value), cache.length - 10)]
    return plan_keep(cache.layout, matches, Plan.prefill(ids), strategy="refresh")


def test_appending_a_turn_copies_nothing() -> None:
    base = engine().prefill(IDS).cache
    longer = engine().execute(append(base, (1, 2)), base=base).cache
    assert longer.buffer is base.buffer
    assert base.token_ids == IDS


def test_a_second_continuation_of_the_same_cache_copies() -> None:
    base = engine().prefill(IDS).cache
    first = engine().execute(append(base, (1, 2)), base=base).cache
    held = snapshot(first)
    second = engine().execute(append(base, (3, 4)), base=base).cache
    assert second.buffer is not base.buffer
    assert same_kv(snapshot(first), held)


def test_an_edit_of_a_cache_that_is_given_up_runs_in_its_memory() -> None:
    base = engine().prefill(IDS).cache
    buffer = base.buffer
    plan = refreshed(base, (5, 6))
    edited = engine().execute(plan, base=base, consume=True, executor="copy").cache
    assert edited.buffer is buffer
    assert base.length == 0, "the cache that was given up is empty, not wrong"


def test_an_edit_goes_on_behind_what_it_keeps_and_overwrites_nothing() -> None:
    base = engine().prefill(IDS).cache
    held = snapshot(base)
    edited = engine().execute(refreshed(base, (5, 6)), base=base).cache
    assert edited.buffer is base.buffer
    assert [(p.slot, p.start, p.num_tokens) for p in edited.pieces] == [
        (0, 0, 8),
        (20, 8, 2),
        (10, 10, 10),
        (22, 20, 1),
    ]
    assert same_kv(snapshot(base), held)


def test_what_an_edit_of_a_cache_that_is_given_up_does_not_keep_is_overwritten() -> None:
    base = engine().prefill(IDS).cache
    buffer, ids = base.buffer, (*IDS[:8], 5, 6, 7)
    plan = plan_keep(base.layout, [Match(0, 0, 8)], Plan.prefill(ids), strategy="suffix")
    edited = engine().execute(plan, base=base, consume=True).cache
    assert edited.buffer is buffer and edited.in_place and edited.end == 11
    assert base.length == 0


def test_an_edit_of_a_cache_that_is_kept_copies() -> None:
    base = engine().prefill(IDS).cache
    held = snapshot(base)
    plan = refreshed(base, (5, 6))
    edited = engine().execute(plan, base=base, executor="copy").cache
    assert edited.buffer is not base.buffer
    assert same_kv(snapshot(base), held)


def test_a_cache_given_up_while_a_fork_lives_is_copied() -> None:
    base = engine().prefill(IDS).cache
    fork = base.fork()
    held = snapshot(fork)
    engine().execute(refreshed(base, (5, 6)), base=base, consume=True)
    assert same_kv(snapshot(fork), held)


def test_an_edit_that_moves_its_own_tokens_never_overwrites_them_first() -> None:
    base = engine().prefill(IDS).cache
    plan = refreshed(base, (5, 6, 7))
    loop = engine().execute(plan, base=base, executor="loop")
    held = snapshot(loop.cache)
    fast = engine().execute(plan, base=base, consume=True)
    assert kv_gap(snapshot(fast.cache), held) < KV_GAP


def test_tokens_that_were_overwritten_are_refused_and_not_handed_out() -> None:
    base = engine().prefill(IDS).cache
    again = append(base, (1,))  # reuses all of the base, tokens 8 and 9 too
    edited = engine().execute(refreshed(base, (5, 6)), base=base, consume=True).cache
    with pytest.raises(UnknownSegmentError, match="the plan reuses run"):
        engine().execute(again, base=edited)


def test_tokens_behind_a_truncated_cache_are_refused_and_not_handed_out() -> None:
    base = engine().prefill(IDS).cache
    again = append(base, (1,))
    short = base.truncated(12)
    del base
    gc.collect()
    other = engine().execute(append(short, (60, 61, 62)), base=short).cache
    for cache in (short, other):
        with pytest.raises(UnknownSegmentError):
            engine().execute(again, base=cache)


def test_moved_tokens_are_always_moved_from_where_they_were_computed() -> None:
    # ten moves of a moved copy would round ten times; the source copy rounds once
    segment = engine("llama-gqa", torch.bfloat16).compile(tokens(12, seed=5))
    half = engine("llama-gqa", torch.bfloat16)
    ids = (*IDS[:3], *segment.run.token_ids, 1)
    plan = plan_compose(ids, [Splice("s", segment.run, 0, 12, 3)], num_seam_tokens=0)
    cache = half.execute(plan, segments=[segment]).cache
    for turn in range(10):
        ids = (turn, *cache.token_ids[:-1], turn)
        matches = [Match(0, 1, cache.length - 1)]
        plan = plan_keep(cache.layout, matches, Plan.prefill(ids), strategy="refresh")
        cache = half.execute(plan, base=cache, consume=True).cache
    once = plan_compose(cache.token_ids, [Splice("s", segment.run, 0, 12, 13)], num_seam_tokens=0)
    direct = half.execute(once, segments=[segment]).cache
    for ours, theirs in zip(snapshot(cache), snapshot(direct), strict=True):
        assert torch.equal(ours[:, 13:25], theirs[:, 13:25])
    assert all(piece.memory is segment for piece in cache.pieces if piece.shift)


def test_a_segment_is_not_touched_by_the_caches_it_is_spliced_into() -> None:
    segment = engine().compile(tokens(12, seed=5))
    before = segment.checksum()
    ids = (*IDS[:3], *segment.run.token_ids, 1)
    plan = plan_compose(ids, [Splice("s", segment.run, 0, 12, 3)])
    cache = engine().execute(plan, segments=[segment]).cache
    engine().execute(refreshed(cache, (5, 6)), base=cache, consume=True)
    assert segment.checksum() == before

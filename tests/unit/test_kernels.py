"""Kernels against float64, and merging: parts of the keys give what all of them give."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from helpers_laws import laws
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvnotes.engine.blocks import ALL, Rows
from kvnotes.engine.kernels import Kernel, flash_cpu, flex, kernel_for, merged, plain

KERNELS = {"flash_cpu": flash_cpu, "flex": flex, "plain": plain}

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5
SOFTCAP = 2.0
"""Low enough to bend the scores of random queries, which reach 4."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of outputs near 1: a few times the unit roundoff, for scores up to 8, weights and the output
are each rounded."""

each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@pytest.fixture(autouse=True)
def _flex_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo cannot trace the wrappers by which jaxtyping checks shapes while tests run
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(dtype)


def qkv(
    queries: int, keys: int, *, value_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        2 * draw(1, HEADS, queries, HEAD_DIM, seed=1, dtype=dtype),
        draw(1, KV_HEADS, keys, HEAD_DIM, seed=2, dtype=dtype),
        draw(1, KV_HEADS, keys, value_dim, seed=3, dtype=dtype),
    )


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exps in float64, written down plainly.

    A query that sees nothing gives zeros.
    """
    groups = query.shape[1] // key.shape[1]
    keys = key.double().repeat_interleave(groups, 1)
    values = value.double().repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), keys) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ values, torch.logsumexp(scores, -1)


def additive(seen: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask as `Read` makes it: hidden keys get the lowest number."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[
        None, None
    ]


def pack(query: Tensor) -> Tensor:
    """Queries that share keys as rows: `[1, kv_heads, groups x queries, head_dim]`."""
    return query.reshape(1, KV_HEADS, -1, HEAD_DIM)


def gap(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape
    return float((left.double() - right).abs().max())


# -- kernels -------------------------------------------------------------------------------


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (5, 7), (7, 3)])
def test_grouped_heads_give_the_output_and_the_weight_of_float64(
    kernel: Kernel, dtype: torch.dtype, queries: int, keys: int
) -> None:
    q, k, v = qkv(queries, keys, dtype=dtype)
    expected, lse = exact(q, k, v)
    out, ours = kernel(q, k, v, None, causal=False, scale=SCALE)
    assert out.dtype == dtype and ours.dtype == torch.float32
    assert gap(out, expected) < TOLERANCE[dtype]
    assert gap(ours, lse) < 4 * TOLERANCE[dtype], "of scores up to 4"


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_queries_under_a_mask_give_the_same(kernel: Kernel, dtype: torch.dtype) -> None:
    q, k, v = qkv(5, 7, dtype=dtype)
    seen = draw(5, 7, seed=4) > 0
    seen[:, 0] = True
    expected, lse = exact(q, k, v, seen)
    mask = additive(seen.repeat(HEADS // KV_HEADS, 1), dtype)
    out, ours = kernel(pack(q), k, v, mask, causal=False, scale=SCALE)
    assert gap(out.reshape(1, HEADS, 5, HEAD_DIM), expected) < TOLERANCE[dtype]
    assert gap(ours.reshape(1, HEADS, 5), lse) < 4 * TOLERANCE[dtype]


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 70])
def test_causal_attention_hides_what_comes_later(
    kernel: Kernel, dtype: torch.dtype, size: int
) -> None:
    q, k, v = qkv(size, size, dtype=dtype)
    expected, lse = exact(q, k, v, torch.ones(size, size, dtype=torch.bool).tril())
    out, ours = kernel(q, k, v, None, causal=True, scale=SCALE)
    assert gap(out, expected) < TOLERANCE[dtype]
    assert gap(ours, lse) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", [flex, plain])
@pytest.mark.parametrize("causal", [True, False])
def test_softcapped_scores_stay_below_the_cap(kernel: Kernel, causal: bool) -> None:
    q, k, v = qkv(6, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() if causal else draw(6, 6, seed=4) > -1
    seen[:, 0] = True
    expected, lse = exact(q, k, v, seen, softcap=SOFTCAP)
    mask = None if causal else additive(seen)
    out, ours = kernel(q, k, v, mask, causal=causal, scale=SCALE, softcap=SOFTCAP)
    assert gap(out, expected) < TOLERANCE[torch.float32]
    assert gap(ours, lse) < TOLERANCE[torch.float32]
    assert gap(exact(q, k, v, seen)[0], expected) > 0.1, "without the cap it is another result"


@pytest.mark.parametrize("causal", [True, False])
def test_values_may_be_wider_than_keys(causal: bool) -> None:
    q, k, v = qkv(5, 5, value_dim=12)
    seen = torch.ones(5, 5, dtype=torch.bool).tril() if causal else None
    out, ours = plain(q, k, v, None, causal=causal, scale=SCALE)
    expected, lse = exact(q, k, v, seen)
    assert gap(out, expected) < TOLERANCE[torch.float32]
    assert gap(ours, lse) < TOLERANCE[torch.float32]


@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_query_that_sees_nothing_of_a_part_has_no_weight_there(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    q, k, v = qkv(3, 8, dtype=dtype)
    seen = torch.ones(3, 8, dtype=torch.bool)
    seen[1, :5] = False
    seen[2, 5:] = False
    parts = [
        (kernel(q, k[:, :, s], v[:, :, s], additive(seen[:, s], dtype), causal=False, scale=SCALE))
        for s in (slice(0, 5), slice(5, 8))
    ]
    for order in (parts, parts[::-1]):
        ours = merged([(part, ALL) for part in order], (1, HEADS, 3, HEAD_DIM), None)
        assert gap(ours, exact(q, k, v, seen)[0]) < TOLERANCE[dtype]
    alone = parts[1][0][:, :, 1]
    assert torch.equal(merged([(p, ALL) for p in parts], q.shape, None)[:, :, 1], alone.float())


def test_a_kernel_is_chosen_that_takes_the_tensors() -> None:
    q, k, v = qkv(2, 3)
    wide = qkv(2, 3, value_dim=12)[2]
    assert kernel_for(q, k, v, None) is flash_cpu
    assert kernel_for(q, k, v, SOFTCAP) is plain
    assert kernel_for(q, k, wide, None) is plain


# -- merging -------------------------------------------------------------------------------


def as_rows(chosen: list[int], as_slice: bool) -> Rows:
    """Rows as a stretch where they are one, else as an index."""
    first, stop = chosen[0], chosen[-1] + 1
    if as_slice and stop - first == len(chosen):
        return slice(first, stop)
    return torch.tensor(chosen)


def attended(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[tuple[slice, Rows]], sinks: Tensor | None
) -> Tensor:
    """Attention over each part of the keys by the queries that see it, merged."""
    partials = [
        (plain(q[:, :, rows], k[:, :, keys], v[:, :, keys], None, causal=False, scale=SCALE), rows)
        for keys, rows in parts
    ]
    return merged(partials, (*q.shape[:3], v.shape[-1]), sinks)


def seen_in(parts: Sequence[tuple[slice, Rows]], queries: int, keys: int) -> Tensor:
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for stretch, rows in parts:
        held = torch.zeros_like(seen[:, stretch])
        held[rows] = True
        seen[:, stretch] = held
    return seen


@laws(150)
@given(data=st.data(), queries=st.integers(1, 6), with_sinks=st.booleans())
def test_merged_parts_equal_attention_over_all_keys(
    data: st.DataObject, queries: int, with_sinks: bool
) -> None:
    parts: list[tuple[slice, Rows]] = []
    start = 0
    for _ in range(data.draw(st.integers(1, 4), label="parts")):
        stop = start + data.draw(st.integers(1, 5), label="keys")
        rows: Rows = ALL
        if data.draw(st.booleans(), label="some rows"):
            chosen = data.draw(st.sets(st.integers(0, queries - 1), min_size=1))
            rows = as_rows(sorted(chosen), data.draw(st.booleans(), label="as slice"))
        parts.append((slice(start, stop), rows))
        start = stop
    q, k, v = qkv(queries, start, value_dim=data.draw(st.sampled_from([HEAD_DIM, 3])))
    sinks = draw(HEADS, seed=5) if with_sinks else None
    expected, _ = exact(q, k, v, seen_in(parts, queries, start), sinks=sinks)
    held = [p.clone() for p in (q, k, v)]
    assert gap(attended(q, k, v, parts, sinks), expected) < TOLERANCE[torch.float32]
    assert all(map(torch.equal, held, (q, k, v)))


def test_rows_that_no_first_part_covers_take_all_from_a_later_one() -> None:
    q, k, v = qkv(4, 9)
    parts: list[tuple[slice, Rows]] = [
        (slice(0, 3), slice(1, 2)),
        (slice(3, 5), torch.tensor([0, 3])),
        (slice(5, 9), torch.tensor([0, 1])),
    ]
    out = attended(q, k, v, parts, None)
    assert gap(out, exact(q, k, v, seen_in(parts, 4, 9))[0]) < TOLERANCE[torch.float32]
    assert not out[:, :, 2].any(), "it sees nothing"


def test_sinks_alone_take_weight_and_give_nothing() -> None:
    q, k, v = qkv(3, 4)
    none, half, all_ = (
        attended(q, k, v, [(slice(0, 4), ALL)], torch.full((HEADS,), sink))
        for sink in (-math.inf, 0.0, math.inf)
    )
    whole = exact(q, k, v)[0]
    assert gap(none, whole) < TOLERANCE[torch.float32]
    assert not all_.any()
    assert 0.1 < float(half.abs().max() / whole.abs().max()) < 1


@pytest.mark.parametrize("lift", [60.0, -60.0, 3000.0])
def test_parts_of_very_different_weight_are_merged_without_overflow(lift: float) -> None:
    q, k, v = qkv(3, 6)
    (a, lse_a), (b, lse_b) = (
        plain(q, k[:, :, s], v[:, :, s], None, causal=False, scale=SCALE)
        for s in (slice(0, 3), slice(3, 6))
    )
    ours = merged([((a, lse_a), ALL), ((b, lse_b + lift), ALL)], q.shape, None)
    assert gap(ours, (b if lift > 0 else a).double()) < TOLERANCE[torch.float32]

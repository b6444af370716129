"""Moving keys: layouts of pairs, partial rotation, one rounding, cached rotations."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_rope import rotate
from torch import Tensor

from kvnotes import rope
from kvnotes.rope import BLOCK_TOKENS, Rotary, move_keys, turn_keys
from kvnotes.spec import Pairing, RopeSpec

PLAIN = {"rope_type": "default", "rope_theta": 100.0}

ROUNDING = 2e-6
"""Largest error of a moved key in float32: the table's angles are rounded once, at positions
of a few hundred, and the key is rounded once."""


def plain_rotary(dim: int = 8, pairing: Pairing = "half", scale: float = 1.0) -> Rotary:
    """A rotary embedding with float32 tables, as a model has them."""
    frequencies = torch.tensor([100.0 ** (-2 * i / dim) for i in range(dim // 2)])

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * scale, angles.sin() * scale

    return Rotary(RopeSpec("default", dim, pairing, "0" * 64), table)


def keys_of(tokens: int, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(tokens)
    return torch.randn(2, tokens, head_dim, generator=random).to(dtype)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_moved_keys_are_the_keys_rotated_at_the_target(pairing: Pairing, head_dim: int) -> None:
    raw = keys_of(5, head_dim)
    source, target = torch.arange(5) + 3, torch.arange(5) + 40
    at_source = rotate(raw, source, PLAIN, dim=8, pairing=pairing).float()
    moved = move_keys(at_source, source, target, plain_rotary(8, pairing))
    expected = rotate(raw, target, PLAIN, dim=8, pairing=pairing)
    assert (moved.double() - expected).abs().max() < ROUNDING * expected.abs().max()


def test_dimensions_behind_the_rotated_ones_are_copied_bit_by_bit() -> None:
    keys = keys_of(4, 12)
    moved = move_keys(keys, torch.arange(4), torch.arange(4) + 9, plain_rotary(8))
    assert torch.equal(moved[..., 8:], keys[..., 8:])
    assert not torch.equal(moved[..., :8], keys[..., :8])


def test_positions_may_be_any_and_not_only_a_stretch() -> None:
    keys = keys_of(3)
    source, target = torch.tensor([9, 2, 40]), torch.tensor([1, 77, 40])
    moved = move_keys(keys, source, target, plain_rotary())
    for i in range(3):
        alone = move_keys(keys[:, i : i + 1], source[i : i + 1], target[i : i + 1], plain_rotary())
        assert torch.equal(moved[:, i : i + 1], alone)


def test_a_move_by_nothing_changes_nothing() -> None:
    keys = keys_of(6)
    assert torch.equal(move_keys(keys, torch.arange(6), torch.arange(6), plain_rotary()), keys)


def test_the_source_is_never_written() -> None:
    keys = keys_of(6)
    before = keys.clone()
    move_keys(keys, torch.arange(6), torch.arange(6) + 5, plain_rotary())
    assert torch.equal(keys, before)


def test_a_scale_of_the_tables_does_not_scale_keys() -> None:
    # YaRN multiplies cosines and sines; a cached key has that factor already, once
    keys = keys_of(6)
    source, target = torch.arange(6), torch.arange(6) + 30
    plain = move_keys(keys, source, target, plain_rotary())
    scaled = move_keys(keys, source, target, plain_rotary(scale=1.139))
    assert (plain - scaled).abs().max() < ROUNDING * plain.abs().max()


def test_a_move_keeps_the_length_of_every_pair() -> None:
    keys = keys_of(50)
    moved = move_keys(keys, torch.arange(50), torch.arange(50) + 200_000, plain_rotary())
    before = keys[..., :4].pow(2) + keys[..., 4:].pow(2)
    after = moved[..., :4].pow(2) + moved[..., 4:].pow(2)
    assert (before - after).abs().max() < ROUNDING * before.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_rounded_once(dtype: torch.dtype) -> None:
    keys = keys_of(7, dtype=dtype)
    source, target = torch.arange(7), torch.arange(7) + 60
    moved = move_keys(keys, source, target, plain_rotary())
    exact = move_keys(keys.float(), source, target, plain_rotary())
    assert moved.dtype == dtype
    assert torch.equal(moved, exact.to(dtype))


def test_a_stretch_longer_than_a_block_is_moved_as_its_parts_are() -> None:
    size = 2 * BLOCK_TOKENS + 3
    keys = keys_of(size)
    source = torch.arange(size)
    moved = move_keys(keys, source, source + 11, plain_rotary())
    for cut in (0, BLOCK_TOKENS - 1, BLOCK_TOKENS, size - 1):
        one = slice(cut, cut + 1)
        alone = move_keys(keys[:, one], source[one], source[one] + 11, plain_rotary())
        assert torch.equal(moved[:, one], alone)


def test_a_stretch_written_into_a_buffer_equals_the_keys_moved_alone() -> None:
    rotary = plain_rotary()
    keys = keys_of(6)
    buffer = torch.zeros(2, 20, 8)
    turn_keys([keys], rotary.shift(2, 9, 6), rotary.spec, [buffer[:, 9:15]])
    moved = move_keys(keys, torch.arange(6) + 2, torch.arange(6) + 9, rotary)
    assert torch.equal(buffer[:, 9:15], moved)
    assert not buffer[:, :9].any() and not buffer[:, 15:].any()


def test_rotations_are_kept_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "MAX_CACHED_TURNS", 4)
    monkeypatch.setattr(rope, "MAX_CACHED_MATRICES", 2)
    rotary = plain_rotary()
    first = rotary.shift(0, 5, 3)
    assert rotary.shift(0, 5, 3) is first
    for target in range(6, 10):
        rotary.shift(0, target, 3)
    again = rotary.shift(0, 5, 3)
    assert again is not first
    assert torch.equal(first.cos, again.cos) and torch.equal(first.sin, again.sin)
    matrix = rotary.back(9, 7)
    rotary.back(9, 6)
    assert rotary.back(9, 7) is matrix
    rotary.back(9, 5)
    assert rotary.back(9, 7) is matrix, "it was used last"
    assert len(rotary._matrices) == 2


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_query_turned_back_scores_as_the_key_moved(pairing: Pairing) -> None:
    rotary = plain_rotary(pairing=pairing)
    keys, query = keys_of(6), keys_of(1)
    places = torch.arange(6)
    moved = move_keys(keys, places + 2, places + 9, rotary)
    turned = query @ rotary.back(9, 7)
    assert torch.allclose(turned @ keys.mT, query @ moved.mT, atol=1e-5)
    assert not torch.allclose(query @ keys.mT, query @ moved.mT, atol=1e-2)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_move_by_one_turns_each_pair_by_its_angle(pairing: Pairing) -> None:
    one = torch.tensor([[[1.0, 0.0]]])
    moved = move_keys(one, torch.tensor([4]), torch.tensor([5]), plain_rotary(2, pairing))
    assert moved.flatten().tolist() == pytest.approx([math.cos(1.0), math.sin(1.0)], abs=ROUNDING)


def test_layers_moved_together_are_layers_moved_alone() -> None:
    rotary = plain_rotary()
    layers = [keys_of(6), keys_of(6) * 3, keys_of(6).flip(1)]
    outs = [torch.empty_like(keys) for keys in layers]
    turn_keys(layers, rotary.shift(0, 9, 6), rotary.spec, outs)
    for keys, out in zip(layers, outs, strict=True):
        assert torch.equal(out, move_keys(keys, torch.arange(6), torch.arange(6) + 9, rotary))

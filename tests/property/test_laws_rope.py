"""Law 2: moving keys there and back, and moving against rotating, for every kind of RoPE."""

from __future__ import annotations

import pytest
import torch
from helpers_laws import laws
from helpers_models import MODELS, ROPES, engine
from helpers_rope import inverse_frequencies, rotate, scale_of
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.rope import Rotary, move_keys

KINDS = {"llama-gqa": "default", **{f"llama-{kind}": kind for kind in ROPES if kind != "default"}}
"""A tiny model of each kind of RoPE."""

ANGLE_ROUNDING = 2.0**-23
"""float32 rounds an angle of p radians by up to p times this: it bounds the distance between
a model's own table and the true rotation."""

KEY_ROUNDING = 1e-6
"""Rounding of a rotated key itself: a few units of 1.2e-7."""

there_and_back = st.tuples(st.integers(0, 120), st.integers(0, 120), st.integers(1, 9))


def rotary_of(name: str) -> Rotary:
    return engine(name).rotaries[0]


def allowed(position: int) -> float:
    return KEY_ROUNDING + position * ANGLE_ROUNDING


def raw_keys(tokens: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, 8, generator=random)


def test_every_kind_of_rope_has_a_model_here() -> None:
    assert set(KINDS) <= set(MODELS) and set(KINDS.values()) == set(ROPES)


@pytest.mark.parametrize("name", KINDS)
def test_a_models_table_is_the_rotation_of_the_paper(name: str) -> None:
    rope = ROPES[KINDS[name]]
    positions = torch.arange(0, 200, 7)
    cos, sin = rotary_of(name).table(positions)
    angles = positions.double()[:, None] * inverse_frequencies(rope, 8)
    gap = (
        torch.complex(cos, sin) - scale_of(rope) * torch.polar(angles.new_ones(()), angles)
    ).abs()
    assert gap.max() < allowed(200) * scale_of(rope)


@pytest.mark.parametrize("name", KINDS)
@laws(25)
@given(places=there_and_back, seed=st.integers(0, 99))
def test_a_key_moved_there_and_back_is_the_key(
    name: str, places: tuple[int, int, int], seed: int
) -> None:
    start, other, size = places
    keys = raw_keys(size, seed)
    source, target = torch.arange(size) + start, torch.arange(size) + other
    back = move_keys(
        move_keys(keys, source, target, rotary_of(name)), target, source, rotary_of(name)
    )
    # the same two tables turn it there and back: their rounding of angles cancels
    assert (back - keys).abs().max() <= KEY_ROUNDING * keys.abs().max()


@pytest.mark.parametrize("name", KINDS)
@laws(25)
@given(places=there_and_back, seed=st.integers(0, 99))
def test_a_moved_key_is_the_key_rotated_at_the_other_place(
    name: str, places: tuple[int, int, int], seed: int
) -> None:
    start, other, size = places
    rope = ROPES[KINDS[name]]
    raw = raw_keys(size, seed)
    source, target = torch.arange(size) + start, torch.arange(size) + other
    moved = move_keys(rotate(raw, source, rope, dim=8).float(), source, target, rotary_of(name))
    expected = rotate(raw, target, rope, dim=8)
    gap = (moved.double() - expected).abs().max() / expected.abs().max()
    assert gap < 2 * allowed(max(start, other) + size)


@pytest.mark.parametrize("name", KINDS)
@laws(15)
@given(places=there_and_back, third=st.integers(0, 120))
def test_two_moves_are_one_move(name: str, places: tuple[int, int, int], third: int) -> None:
    start, other, size = places
    keys = raw_keys(size, 0)
    at = [torch.arange(size) + place for place in (start, other, third)]
    rotary = rotary_of(name)
    twice = move_keys(move_keys(keys, at[0], at[1], rotary), at[1], at[2], rotary)
    once = move_keys(keys, at[0], at[2], rotary)
    assert (twice - once).abs().max() <= 2 * KEY_ROUNDING * keys.abs().max()


@pytest.mark.parametrize("name", KINDS)
def test_far_moves_equal_the_keys_of_the_models_own_table(name: str) -> None:
    # at any distance a moved key is what the model would have computed, not what the paper says
    rotary = rotary_of(name)
    raw = raw_keys(4, 1)

    def own(start: int) -> torch.Tensor:
        cos, sin = (t.double() for t in rotary.table(torch.arange(4) + start))
        x, y = raw[..., :4].double(), raw[..., 4:].double()
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)

    for target in (1_000, 30_000, 200_000):
        moved = move_keys(own(3).float(), torch.arange(4) + 3, torch.arange(4) + target, rotary)
        expected = own(target)
        assert (moved - expected).abs().max() < KEY_ROUNDING * expected.abs().max()

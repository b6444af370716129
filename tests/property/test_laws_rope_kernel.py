"""Keys rotated by compiled code are the keys that eager torch rotates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_laws import laws
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvnotes import rope, rope_kernel
from kvnotes.rope import Turn, turn_keys
from kvnotes.spec import Pairing, RopeSpec

ROOT = Path(__file__).resolve().parents[2]

TOLERANCE = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
"""Largest gap, relative to the largest key: half a unit in the last place of it and of a product.
Compiled code rounds a product and the sum it goes into once; torch does so too where it has such
an instruction (x86-64 with AVX2), and there both are equal. A gap in float32 can tip a rounding
to bfloat16."""

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turn_of(tokens: int, size: int, pairing: Pairing) -> Turn:
    """Any rotation: an angle for each pair of each token."""
    angles = random(tokens, size // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    if pairing == "half":
        return Turn(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
    return Turn(cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2))


def spec_of(size: int, pairing: Pairing, start: int = 0) -> RopeSpec:
    return RopeSpec("default", size, pairing, "0" * 64, start=start)


@st.composite
def buffers(draw: Any, heads: int, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """A buffer and the part of it that holds keys, with room around it on every axis."""
    before = [draw(st.integers(0, 3)) for _ in range(3)]
    sizes = [
        size + first + draw(st.integers(0, 3))
        for size, first in zip((heads, tokens, dim), before, strict=True)
    ]
    if draw(st.booleans()):  # heads of a token side by side, as some models have them
        buffer = random(sizes[1], sizes[0], sizes[2]).transpose(0, 1)
    else:
        buffer = random(*sizes)
    part = buffer
    for axis, (first, size) in enumerate(zip(before, (heads, tokens, dim), strict=True)):
        part = part.narrow(axis, first, size)
    return buffer, part


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@laws(60)
@given(data=st.data(), num_threads=st.integers(1, 3))
def test_compiled_code_moves_keys_as_eager_torch_does(
    dtype: torch.dtype, pairing: Pairing, data: st.DataObject, num_threads: int
) -> None:
    tokens, half = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    start, rest = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    layers, compiled, eager = [], [], []
    for _ in range(data.draw(st.integers(1, 2), label="layers")):
        heads = data.draw(st.integers(1, 3), label="heads")
        shape = (heads, tokens, start + 2 * half + rest)
        layers.append(data.draw(buffers(*shape))[1].to(dtype))
        buffer, part = data.draw(buffers(*shape))
        offset, steps = part.storage_offset(), part.stride()
        for outs in (compiled, eager):
            flat = torch.zeros(buffer.numel(), dtype=dtype)
            outs.append((flat, flat.as_strided(shape, steps, offset)))
    turn, spec = turn_of(tokens, 2 * half, pairing), spec_of(2 * half, pairing, start)
    turn_keys(layers, turn, spec, [out for _, out in eager])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "MIN_COMPILED_SIZE", 1)
        patch.setattr(torch, "get_num_threads", lambda: num_threads)
        patch.delattr(rope, "_turn_eagerly")
        turn_keys(layers, turn, spec, [out for _, out in compiled])
    for keys, (ours, _), (theirs, _) in zip(layers, compiled, eager, strict=True):
        largest = float(keys.abs().max()) * 2**0.5
        assert (ours.float() - theirs.float()).abs().max() <= 2 * TOLERANCE[dtype] * largest
        assert torch.equal(ours == 0, theirs == 0), "nothing beside the keys is written"


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_compiled_code_rounds_every_number_to_bfloat16_as_torch_does(
    pairing: Pairing, ties: bool
) -> None:
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    keys = torch.stack([every, torch.zeros_like(every)], -1)[None]
    scales = (torch.full((1 << 16,), 1.5) if ties else random(1 << 16))[:, None].expand(-1, 2)
    out = torch.empty_like(keys)
    turn = Turn(scales, torch.zeros_like(scales))
    rope._turn_compiled([keys], turn, pairing, [out], 1)
    expected = (every.float() * scales[:, 0]).to(torch.bfloat16)
    assert torch.equal(out[0, :, 0].isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(out[0, number, 0], expected[number])
    assert expected[number].isinf().any()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_float32_rounded_once(pairing: Pairing) -> None:
    keys = random(2, 50, 64).to(torch.bfloat16)
    turn = turn_of(50, 64, pairing)
    rounded, exact = torch.empty_like(keys), torch.empty(keys.shape)
    rope._turn_compiled([keys], turn, pairing, [rounded], 1)
    rope._turn_compiled([keys.float()], turn, pairing, [exact], 1)
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_many_numbers_are_moved_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise AssertionError("moved eagerly")

    monkeypatch.setattr(rope, "_turn_eagerly", fails)
    keys = random(4, rope.MIN_COMPILED_SIZE // 256, 64)
    turn, spec = turn_of(keys.shape[1], 64, "half"), spec_of(64, "half")
    turn_keys([keys], turn, spec, [torch.empty_like(keys)])
    with pytest.raises(AssertionError, match="moved eagerly"):
        turn_keys([keys[:3]], turn, spec, [torch.empty_like(keys[:3])])


@pytest.mark.parametrize("kind", ["float16", "two dtypes", "steps in a key", "steps in a result"])
def test_what_compiled_code_does_not_take_is_moved_eagerly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, out = random(2, 6, 8), torch.empty(2, 6, 8)
    turn, spec = turn_of(6, 8, "half"), spec_of(8, "half")
    if kind == "float16":
        keys, out = keys.half(), out.half()
    elif kind == "two dtypes":
        out = out.to(torch.bfloat16)
    elif kind == "steps in a key":
        keys = keys.mT.contiguous().mT
    else:
        out = out.mT.contiguous().mT
    expected = torch.empty_like(out)
    rope._turn_eagerly([keys], turn, "half", [expected])
    monkeypatch.setattr(rope, "MIN_COMPILED_SIZE", 1)
    turn_keys([keys], turn, spec, [out])
    assert torch.equal(out, expected)


def test_code_is_compiled_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kept = rope_kernel.njit

    def compile_only(signature: str, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("no locator available")
        return compile_kept(signature, **options)

    monkeypatch.setattr(rope_kernel, "njit", compile_only)
    kernel = rope_kernel._kernel.__wrapped__(torch.float32, "half")
    assert kernel.signatures


def test_moving_few_keys_imports_no_numba() -> None:
    code = (
        "import sys, torch\n"
        "import kvnotes.engine.execute\n"
        "from kvnotes.rope import Turn, turn_keys\n"
        "from kvnotes.spec import RopeSpec\n"
        "keys, turn = torch.ones(1, 6, 8), Turn(torch.ones(6, 8), torch.zeros(6, 8))\n"
        "spec, out = RopeSpec('default', 8, 'half', '0' * 64), torch.empty(1, 6, 8)\n"
        "turn_keys([keys], turn, spec, [out])\n"
        "assert 'numba' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)

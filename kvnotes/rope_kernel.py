"""The rotation of one layer's keys in one pass over memory, compiled by numba.

Owns the loop and nothing else: `rope` says when it is used, and has the same in eager torch
as its reference. Importing this module imports numba, so `rope` does that late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import FunctionType
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from kvnotes.spec import Pairing


def turn_layers(
    layers: Sequence[Float[Tensor, "_ tokens _"]],
    outs: Sequence[Float[Tensor, "_ tokens _"]],
    cos: Float[Tensor, "tokens pairs"],
    sin: Float[Tensor, "tokens pairs"],
    *,
    pairing: Pairing,
    num_threads: int,
) -> None:
    """Rotate keys, all dimensions of them, into memory that does not overlap.

    Args:
        layers: Keys in float32 or bfloat16 on the CPU, contiguous along the last axis.
        outs: Where each layer's result goes; of its dtype, and likewise.
        cos: Cosine of each pair's angle, contiguous.
        sin: Sines.
        pairing: Which dimensions are a pair.
        num_threads: Threads that share the tokens; one is the caller's own.
    """
    num_tokens, half = cos.shape
    angles = cos.numpy(), sin.numpy()
    calls = []
    for keys, out in zip(layers, outs, strict=True):
        kernel, sizes = _kernel(keys.dtype, pairing), (keys.shape[0], half)
        calls.append(partial(kernel, _rows(keys), _rows(out), angles, sizes))

    def turn(first: int, stop: int) -> None:
        for call in calls:
            call(first, stop)

    if num_threads == 1:
        turn(0, num_tokens)
        return
    cuts = [num_tokens * i // num_threads for i in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads) as pool:  # not kept: threads do not survive a fork
        list(pool.map(turn, cuts, cuts[1:]))


def _rows(keys: Tensor) -> tuple[NDArray[Any], int, int]:
    """Return the memory from the first key to the last, and the steps to the next head and token.

    An array of three axes would not tell the compiler that the last one is contiguous.
    """
    span = 1 + sum((size - 1) * step for size, step in zip(keys.shape, keys.stride(), strict=True))
    flat = keys.as_strided((span,), (1,))
    if keys.dtype == torch.bfloat16:  # numpy has no such numbers
        flat = flat.view(torch.uint16)
    return flat.numpy(), keys.stride(0), keys.stride(1)


@cache
def _kernel(dtype: torch.dtype, pairing: Pairing) -> Callable[..., None]:
    """Compile the loop, or load what an earlier process has compiled.

    numba keeps it beside this module, or else in the user's cache folder: in a file for each
    name, where processes that save two signatures at the same time can mix them up.
    """
    kind = "float32" if dtype == torch.float32 else "uint16"
    name = f"turn_{pairing}_{kind}"
    parts = {"_pair": PAIRS[pairing], "_read": READERS[kind], "_write": WRITERS[kind]}
    # parts that were arguments could not be kept on disk
    loop = FunctionType(_turn.__code__, {**globals(), **parts}, name)
    loop.__qualname__ = name
    rows, angles = f"Tuple(({kind}[::1], int64, int64))", "UniTuple(float32[:, ::1], 2)"
    signature = f"void({rows}, {rows}, {angles}, UniTuple(int64, 2), int64, int64)"
    try:
        return njit(signature, cache=True, nogil=True)(loop)
    except (OSError, RuntimeError):  # no folder to keep it in, or no room there
        return njit(signature, nogil=True)(loop)


# What follows is compiled by numba, which knows no checks of types at run time.


@no_type_check
def _turn(source, target, angles, sizes, first, stop):
    keys, source_head, source_token = source
    out, target_head, target_token = target
    cos, sin = angles
    num_heads, half = sizes
    # token by token, so that a token's angles are at hand for all of its heads
    for token in range(first, stop):
        c, s = cos[token], sin[token]
        for head in range(num_heads):
            at = head * source_head + token * source_token
            to = head * target_head + token * target_token
            key, result = keys[at : at + 2 * half], out[to : to + 2 * half]
            for i in range(half):
                one, other = _pair(i, half)
                x, y = _read(key[one]), _read(key[other])
                result[one] = _write(_multiply_add(-y, s[i], x * c[i]))
                result[other] = _write(_multiply_add(x, s[i], y * c[i]))


@intrinsic
@no_type_check
def _multiply_add(context, a, b, c):
    """Return a * b + c, rounded once: as torch's `addcmul` does."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@njit
@no_type_check
def _half(i, half):
    return i, i + half


@njit
@no_type_check
def _interleaved(i, half):
    return 2 * i, 2 * i + 1


@njit
@no_type_check
def _same(number):
    return number


@njit
@no_type_check
def _widened(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit
@no_type_check
def _rounded(number):
    """Return the nearest bfloat16, of two the even one: an overflow makes an infinity.

    NaN needs no care: of those that bfloat16 or arithmetic makes, nothing is rounded away.
    """
    bits = np.float32(number).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


_pair, _read, _write = _half, _same, _same  # for readers: `_kernel` puts the right ones in
PAIRS = {"half": _half, "interleaved": _interleaved}
READERS = {"float32": _same, "uint16": _widened}
WRITERS = {"float32": _same, "uint16": _rounded}

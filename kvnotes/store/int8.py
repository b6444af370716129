"""K/V in 8 bits: one scale per head and token, its error stated.

Owns rounding and its inverse. Lossy: what comes back has another key than what went in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

from kvnotes.errors import SegmentFormatError

LEVELS = 127
"""Largest stored magnitude; symmetric, so that zero stays zero."""

MIN_SCALE = 2.0**-14
"""Smallest normal float16: rows that are smaller are rounded to steps of this size."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """One tensor in 8 bits.

    Args:
        levels: Rounded values.
        scale: Size of one level, per head and token.
        max_error: Largest absolute error of what `dequantize` returns, over the largest
            absolute value.
        rms_error: Root mean square of that error over that of the values.
    """

    levels: Int8[Tensor, "kv_heads tokens head_dim"]
    scale: Float16[Tensor, "kv_heads tokens 1"]
    max_error: float
    rms_error: float


def quantize(tensor: Float[Tensor, "kv_heads tokens head_dim"]) -> Quantized:
    """Round a tensor to 8 bits.

    The scale is rounded to float16 first and the values with the rounded one, so its own
    rounding adds no error.

    Raises:
        SegmentFormatError: It holds NaN, or values whose scale is no float16.
    """
    exact = tensor.float()
    scale = (exact.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(MIN_SCALE)
    small = scale.to(torch.float16)
    largest, size = float(exact.abs().max()), float(exact.pow(2).mean().sqrt())
    if not bool(torch.isfinite(small).all()):
        raise SegmentFormatError(
            f"K/V with values up to {largest:g} cannot be stored in 8 bits",
            hint="the model overflowed, or store it exactly",
        )
    levels = (exact / small.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    error = exact - dequantize(levels, small, tensor.dtype).float()
    return Quantized(
        levels,
        small,
        float(error.abs().max()) / largest if largest else 0.0,
        float(error.pow(2).mean().sqrt()) / size if size else 0.0,
    )


def dequantize(
    levels: Int8[Tensor, "kv_heads tokens head_dim"],
    scale: Float16[Tensor, "kv_heads tokens 1"],
    dtype: torch.dtype,
) -> Float[Tensor, "kv_heads tokens head_dim"]:
    """Return the values, rounded once to `dtype`; never infinite, whatever a file says."""
    largest = torch.finfo(dtype).max
    return (levels.float() * scale.float()).clamp(-largest, largest).to(dtype)

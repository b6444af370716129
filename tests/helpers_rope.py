"""Rotary embeddings in float64, written from the papers: shares nothing with kvnotes.

Sources: RoFormer (Su et al. 2021) 3.4; linear interpolation (Chen et al. 2023); YaRN (Peng et
al. 2023) 3.1-3.4; the frequency bands of the Llama 3.1 release.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(rope: dict[str, Any], dim: int) -> Tensor:
    """Return the angle per token of each pair."""
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    plain = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    if kind == "default":
        return plain
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor
    original = float(rope["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = original * plain / (2 * math.pi)  # rotations within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * kept + plain / factor * (1 - kept)
    assert kind == "yarn"

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_of(32.0)), 0)
    last = min(math.ceil(pair_of(1.0)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float64)
    stretched = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return plain * (1 - stretched) + plain / factor * stretched


def scale_of(rope: dict[str, Any]) -> float:
    """Return the factor on cosines and sines: 1 but for YaRN."""
    return 0.1 * math.log(rope["factor"]) + 1 if rope["rope_type"] == "yarn" else 1.0


def rotate(
    keys: Tensor, positions: Tensor, rope: dict[str, Any], *, dim: int, pairing: str = "half"
) -> Tensor:
    """Rotate keys `[kv_heads, tokens, head_dim]` to positions, pair by pair, in float64."""
    frequencies = inverse_frequencies(rope, dim)
    out = keys.double().clone()
    for pair, frequency in enumerate(frequencies.tolist()):
        i, j = (pair, pair + dim // 2) if pairing == "half" else (2 * pair, 2 * pair + 1)
        cos, sin = (positions.double() * frequency).cos(), (positions.double() * frequency).sin()
        x, y = keys[..., i].double(), keys[..., j].double()
        out[..., i] = (x * cos - y * sin) * scale_of(rope)
        out[..., j] = (y * cos + x * sin) * scale_of(rope)
    return out

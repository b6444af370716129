"""Measure what this machine does, for predicted costs; a few milliseconds at load."""

from __future__ import annotations

import time

import torch

from kvnotes.plan import CostModel
from kvnotes.spec import ModelSpec

PROBE_ROWS = 64
"""Rows of the probe product: the size of a turn, where prefill is not yet at its best."""


def measure_cost(spec: ModelSpec, dtype: torch.dtype) -> CostModel:
    """Return a cost model from one matrix product and one copy, both timed here and now."""
    width = spec.hidden_size
    left, right = torch.randn(PROBE_ROWS, width).to(dtype), torch.randn(width, width).to(dtype)
    flops_per_ms = 2 * PROBE_ROWS * width * width / _best_ms(lambda: left @ right)
    source = torch.zeros(1 << 20, dtype=dtype)
    target = torch.empty_like(source)
    bytes_per_ms = source.numel() * source.element_size() / _best_ms(lambda: target.copy_(source))
    attention = 4 * spec.num_attention_heads * sum(layer.head_dim for layer in spec.layers)
    return CostModel(
        ms_per_token=2 * spec.num_parameters / flops_per_ms,
        ms_per_pair=attention / flops_per_ms,
        ms_per_moved_token=2 * spec.nbytes_per_token(source.element_size()) / bytes_per_ms,
        ms_per_pass=spec.num_parameters * source.element_size() / bytes_per_ms,
    )


def _best_ms(operation: object, repeats: int = 3) -> float:
    assert callable(operation)
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        operation()
        times.append((time.perf_counter() - start) * 1e3)
    return max(min(times[1:]), 1e-6)

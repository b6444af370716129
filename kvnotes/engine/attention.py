"""Attention as kvnotes calls it: grouped queries packed into rows, never repeated keys.

transformers repeats K and V for every query head as soon as a mask is given and more than
one token is new: at 6k cached tokens this copies three times the cache per layer (SmolLM2,
32 new tokens: 8.2 ms per layer against 5.9 ms packed, bit-equal).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

ATTENTION_NAME = "kvnotes_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    value: Float[Tensor, "batch kv_heads tokens head_dim"],
    attention_mask: Float[Tensor, "#batch 1 queries tokens"] | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention in the signature transformers calls.

    Args:
        module: The calling layer (unused; part of the interface).
        query: Queries, post-RoPE.
        key: All keys the layer may see.
        value: All values.
        attention_mask: Additive mask; None means causal with as many keys as queries.
        dropout: Ignored: kvnotes never trains.
        scaling: Factor on the scores; None is 1/sqrt(head_dim).

    Returns:
        Output `[batch, queries, heads, head_dim]`, and None for the weights.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    if attention_mask is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=queries > 1, scale=scaling, enable_gqa=kv_heads != heads
        )
        return out.transpose(1, 2), None
    groups = heads // kv_heads
    packed = query.reshape(batch, kv_heads, groups * queries, head_dim)
    mask = attention_mask.expand(batch, groups, queries, -1)
    mask = mask.reshape(batch, 1, groups * queries, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(batch, heads, queries, head_dim).transpose(1, 2), None

"""Attention that also says how much weight it had: what makes partial results mergeable.

A kernel returns, beside its output, the logarithm of the sum of the exponentials of its
scores. Outputs over parts of the keys are then merged exactly: each counts with the share
that its sum has in all of them (Dao et al. 2022, FlashAttention, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.blocks import Rows, are_all

Partial = tuple[Tensor, Tensor]
"""Output `[1, heads, queries, value_dim]`, and log-sum-exp `[1, heads, queries]` in float32."""

Kernel = Callable[..., Partial]
"""`(query, key, value, mask, *, causal, scale, softcap)`. Heads of the query may be a multiple
of those of the keys; the mask is additive, `[1, 1, queries, keys]`, and only without it may
`causal` be set, for as many keys as queries."""


def flash_cpu(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys head_dim"],
    mask: Float[Tensor, "#batch #kv_heads queries keys"] | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """PyTorch's kernel for CPUs."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def flex(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Float[Tensor, "#batch #kv_heads queries keys"] | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """FlexAttention, for GPUs: untested there, equal to the others on CPU tensors."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    shape = (*query.shape[:3], key.shape[2])
    whole = None if mask is None else mask.expand(shape)

    def changed(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if causal:
            return torch.where(row >= column, score, -float("inf"))
        return score if whole is None else score + whole[batch, head, row, column]

    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod=changed,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    lse: Any = aux.lse
    return out, lse


def plain(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Float[Tensor, "#batch #kv_heads queries keys"] | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Matrix products and a softmax: for what the fast kernels do not take, and as reference."""
    batch, heads, queries, _ = query.shape
    shape = (batch, key.shape[1], heads // key.shape[1], *query.shape[2:])
    scores = (query.reshape(shape) @ key[:, :, None].mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask[:, :, None].float()
    if causal:
        size = scores.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -float("inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    out = weights @ value[:, :, None]
    return out.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)


def kernel_for(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> Kernel:
    """Return the fastest kernel that takes these tensors."""
    if query.device.type == "cuda":
        return flex
    return flash_cpu if softcap is None and key.shape[-1] == value.shape[-1] else plain


def merged(
    partials: Sequence[tuple[Partial, Rows]],
    shape: tuple[int, ...],
    sinks: Float[Tensor, " heads"] | None,
) -> Tensor:
    """Return attention over all parts of the keys, from attention over each, in float32.

    Two results are mixed in the proportion of their sums: with a and b the logarithms, the
    second has the share 1 / (1 + exp(a - b)).

    Args:
        partials: Results over each part, with the queries that have seen it.
        shape: Of the output: `[1, heads, queries, value_dim]`.
        sinks: Scores that take weight and give nothing, one for each head.
    """
    (first, lse), rows = partials[0]
    if are_all(rows):
        whole, sums, rest = first.float(), lse, partials[1:]
    else:
        whole = first.new_zeros(shape, dtype=torch.float32)
        sums, rest = lse.new_full(shape[:-1], -float("inf")), partials
    for index, ((out, lse), rows) in enumerate(rest, start=1):
        share = torch.sigmoid(lse - sums[:, :, rows])[..., None]
        mixed = torch.lerp(whole[:, :, rows], out.float(), share)
        if index == len(rest) and sinks is None and are_all(rows):
            return mixed
        total = torch.logaddexp(sums[:, :, rows], lse)
        if are_all(rows):
            whole, sums = mixed, total
        else:
            whole[:, :, rows], sums[:, :, rows] = mixed, total
    if sinks is None:
        return whole
    return whole * torch.sigmoid(sums - sinks.float()[None, :, None])[..., None]

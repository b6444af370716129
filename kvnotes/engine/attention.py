"""Attention as kvnotes calls it: over keys where they stand, without repeating or moving them.

A pass of ours brings what its tokens read (see `blocks`). Each read is one call of a kernel:
queries that share keys are packed into rows, queries of a segment that stands elsewhere are
turned instead of its keys, and the results are merged by their log-sum-exps. A pass without
reads has its keys in one piece, as transformers hands them over.

transformers itself repeats K and V for every query head as soon as a mask is given and more
than one token is new: at 6k cached tokens this copies three times the cache per layer (SmolLM2,
32 new tokens: 8.2 ms per layer against 5.9 ms packed, bit-equal).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from kvnotes.engine.blocks import ALL, Reads, Rows, are_all
from kvnotes.engine.kernels import Partial, kernel_for, merged
from kvnotes.engine.masks import PACKED_NAME, current_reads
from kvnotes.engine.slots import CacheForm
from kvnotes.errors import UnsupportedModelError

NUM_CHECK_TOKENS = 12

CHECK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference between packed and own attention in the last layer's K/V, relative to
their scale: rounding of one model's depth. Both normally call the same kernel."""

RESULT_CHANGING = ("position_bias",)
"""Keyword arguments of transformers' attention functions that change the result and are not
taken here. A window does not change it: it is in the mask."""


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    value: Float[Tensor, "batch kv_heads tokens value_dim"],
    attention_mask: Float[Tensor, "#batch #heads queries _"] | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention in the signature transformers calls.

    Args:
        module: The calling layer (unused; part of the interface).
        query: Queries, post-RoPE.
        key: All keys the layer may see; in a pass with reads, those of its new tokens.
        value: The values of the same tokens.
        attention_mask: Additive mask; None means causal with as many keys as queries.
        dropout: Ignored: kvnotes never trains.
        scaling: Factor on the scores; None is 1/sqrt(head_dim).
        softcap: Scores are bent to stay below this.
        s_aux: Sinks: one score for each head that takes weight and gives nothing.

    Returns:
        Output `[batch, queries, heads, head_dim]`, and None for the weights.
    """
    for name in RESULT_CHANGING:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"the model's attention takes {name!r}, packed attention does not",
                hint="load the model with its own attention implementation",
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reads = current_reads()
    if reads is None:
        out = _over_one(query, key, value, attention_mask, scale, softcap, s_aux)
    else:
        out = _over_reads(query, reads, key, attention_mask, scale, softcap, s_aux)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _over_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to keys in one piece."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    kernel = kernel_for(query, key, value, softcap)
    causal = mask is None and queries > 1
    packed = query
    if not causal:
        groups = heads // kv_heads
        packed = query.reshape(batch, kv_heads, groups * queries, head_dim)
        if mask is not None:
            per_head = mask.shape[1] == heads and heads > 1
            mask = mask.expand(batch, heads if per_head else groups, queries, -1)
            mask = mask.reshape(batch, kv_heads if per_head else 1, groups * queries, -1)
    out, lse = kernel(packed, key, value, mask, causal=causal, scale=scale, softcap=softcap)
    shape = (batch, heads, queries, value.shape[-1])
    out, lse = out.reshape(shape), lse.reshape(shape[:-1])
    return out if sinks is None else merged([((out, lse), ALL)], shape, sinks)


def _over_reads(
    query: Tensor,
    reads: Reads,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to keys where they stand, and merge."""
    layer, (_, heads, queries, head_dim) = reads.layer_of(key), query.shape
    partials: list[tuple[Partial, Rows]] = []
    found = reads.of_mask(mask)
    for read in found:
        keys, values = read.layer(layer)
        chosen = reads.turned(query, read, layer)
        count = chosen.shape[2]
        groups = 1 if read.causal else heads // keys.shape[1]
        kernel = kernel_for(query, keys, values, softcap)
        out, lse = kernel(
            chosen.reshape(1, heads // groups, groups * count, head_dim),
            keys,
            values,
            read.mask(groups, query.dtype),
            causal=read.causal,
            scale=scale,
            softcap=softcap,
        )
        shape = (1, heads, count, values.shape[-1])
        partials.append(((out.reshape(shape), lse.reshape(shape[:-1])), read.rows))
    (out, _), rows = partials[0]
    if len(partials) == 1 and are_all(rows) and sinks is None:
        return out
    return merged(partials, (1, heads, queries, out.shape[-1]), sinks)


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Which attention each part of a model uses.

    A model that has a text and a vision part can use two, and a part that cannot be changed
    keeps its own: one name for the whole model would not bring that back.
    """

    names: tuple[tuple[Any, str], ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> AttentionNames:
        """Return what a model uses now."""
        found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        configs = {id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}
        return cls(tuple((c, c._attn_implementation_internal) for c in configs.values()))

    def set(self) -> None:
        """Have the model use these again."""
        for config, name in self.names:
            config._attn_implementation_internal = name


def use_packed_attention(
    model: Any, form: CacheForm, forward: Callable[[list[int], Tensor], Any]
) -> bool:
    """Give a model packed attention if it then computes the same; else leave its own.

    Args:
        model: A transformers model.
        form: Which of its layers cache something. An indexer chooses tokens by the name of the
            attention, and only where there are many: such a model keeps its own.
        forward: `(token_ids, positions) -> what each layer caches`; deeper layers see what
            attention did in the ones before.

    Returns:
        Whether packed attention is in use.
    """
    if any(layer.indexed for layer in form):
        return False
    own_names = AttentionNames.of(model)
    size = min(NUM_CHECK_TOKENS, model.config.get_text_config(decoder=True).vocab_size)
    ids, positions = list(range(size)), torch.arange(size)
    AttentionInterface.register(PACKED_NAME, packed_attention)
    try:
        own = forward(ids, positions)[-1]
        model.set_attn_implementation(PACKED_NAME)
        packed = forward(ids, positions)[-1]
    except Exception:  # third-party code: whatever it is, the model keeps its own
        own_names.set()
        return False
    limit = CHECK_TOLERANCE[packed["keys"].dtype]
    for ours, theirs in zip(packed.values(), own.values(), strict=True):
        scale = float(theirs.float().abs().max())
        if not float((ours.float() - theirs.float()).abs().max()) <= limit * scale:
            own_names.set()
            return False
    return True

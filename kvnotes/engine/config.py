"""What a model's configuration says: constants, the longest context, numbers of weights.

Knows names of settings, and none of models.
"""

from __future__ import annotations

from typing import Any

DEFAULT_MAX_POSITIONS = 1 << 17
"""Longest context of a model that states none."""

CONSTANTS = (
    "activation_function",
    "attention_k_eq_v",
    "attention_multiplier",
    "attn_logit_softcapping",
    "attn_scale",
    "attn_temperature_tuning",
    "clip_qkv",
    "dim_model_base",
    "embedding_multiplier",
    "experts_per_token",
    "final_logit_softcapping",
    "floor_scale",
    "hidden_act",
    "hidden_activation",
    "index_topk",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "logit_scale",
    "logits_scaling",
    "moe_k",
    "moe_topk",
    "n_group",
    "norm_eps",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_kv_shared_layers",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_interleave",
    "routed_scaling_factor",
    "scale_depth",
    "scale_emb",
    "scoring_func",
    "swiglu_limit",
    "topk_group",
    "topk_method",
    "use_parallel_residual",
    "use_qk_norm",
)
"""Part of a model's identity beside shapes and weights."""


def stated_limit(config: Any) -> tuple[int, str]:
    """Return the longest context up to which tables and queries are the same everywhere."""
    longest = integer(config, "max_position_embeddings", 0) or DEFAULT_MAX_POSITIONS
    scaling = getattr(config, "rope_parameters", None) or {}
    limits = [(longest, "")]
    for own in (scaling, *scaling.values()):
        if not isinstance(own, dict):
            continue
        kind, original = own.get("rope_type"), own.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        if kind in ("dynamic", "longrope"):
            reason = f"its rotary tables change with the length (rope type {kind!r})"
            limits.append((int(original or longest), reason))
        if own.get("llama_4_scaling_beta") and original:
            limits.append((int(original), "it scales queries by their position"))
    if getattr(config, "attn_temperature_tuning", None) and getattr(config, "floor_scale", None):
        limits.append((int(config.floor_scale) - 1, "it scales queries by their position"))
    limit, reason = min(limits)
    return limit, reason if limit < longest else ""


def constants_of(config: Any) -> tuple[tuple[str, str], ...]:
    """Return the configuration's constants that change K/V or logits, by name."""
    found = {name: getattr(config, name, None) for name in CONSTANTS}
    return tuple((name, str(value)) for name, value in sorted(found.items()) if value is not None)


def integer(config: Any, name: str, default: int) -> int:
    """Return an integer of a configuration; the default where there is none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default


def num_layer_parameters(model: Any) -> int:
    """Return the number of weights outside the embeddings."""
    embedding = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    embedding |= {id(p) for p in head.parameters()} if head is not None else set()
    return sum(p.numel() for p in model.parameters() if id(p) not in embedding)

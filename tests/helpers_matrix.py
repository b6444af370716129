"""A tiny random model of every causal-LM type that the installed transformers can build."""

from __future__ import annotations

from typing import Any

import torch
from helpers_models import sharpen
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 4
VOCAB_SIZE = 97
WINDOW = 12
CHUNK = 16
MAX_POSITIONS = 512
MAX_PARAMETERS = 20_000_000

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "n_positions": MAX_POSITIONS,
    "n_embd": 64,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "d_head": 16,
    "n_heads": 4,
    "n_layers": NUM_LAYERS,
    "max_seq_len": MAX_POSITIONS,
    "expert_ffn_hidden_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "sliding_window": WINDOW,
    "attention_chunk_size": CHUNK,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 32,
    "patch_size": 16,
    "depth": 2,
    "out_hidden_size": 64,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_expand": 1,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "num_layers": NUM_LAYERS,
    "d_kv": 16,
    "d_ff": 96,
    "embedding_size": 64,
}
"""Values for what a configuration has under these names."""

OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "dory": {
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
}
"""What some types need beside that."""


def causal_types() -> list[str]:
    """Return every model type with a causal language model, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys()))


def tiny_config(model_type: str) -> Any:
    """Return a configuration with few and small layers, of every kind that the default has."""
    config = CONFIG_MAPPING[model_type]()
    return shrunk(config, OWN.get(model_type, {}))


def shrunk(config: Any, own: dict[str, Any]) -> Any:
    values = config.to_dict()
    for name, size in SIZES.items():
        held = values.get(name)
        number = isinstance(held, (int, float)) and not isinstance(held, bool)
        if number or (held is None and name in values and name in ALSO_WITHOUT):
            values[name] = size
    if "qk_rope_head_dim" in values:  # latent attention: every head has its own keys
        values |= {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 16}
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = _few(values["layer_types"])
    for name, part in values.items():
        if isinstance(part, list) and len(part) > NUM_LAYERS:
            values[name] = part[:NUM_LAYERS]
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            values[name] = shrunk(part, {}).to_dict()
    if isinstance(values.get("per_layer_config"), dict):
        values.pop("per_layer_config")
    values |= own
    return type(config)(**{name: v for name, v in values.items() if name not in DERIVED})


DERIVED = {"transformers_version", "architectures", "model_type", "torch_dtype", "dtype"}
"""What a configuration's dictionary holds and its constructor does not want."""

ALSO_WITHOUT = {
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
}
"""Values that are given where the default has none."""


def _few(kinds: list[str]) -> list[str]:
    """Return a few layer types, every kind among them, the order as it is."""
    distinct = list(dict.fromkeys(kinds))
    chosen = [distinct[i % len(distinct)] for i in range(NUM_LAYERS)]
    return chosen


def tiny_model(model_type: str) -> Any:
    """Return a tiny random model with attention that is not flat."""
    config = tiny_config(model_type)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters are too many")
    return sharpen(AutoModelForCausalLM.from_config(config))

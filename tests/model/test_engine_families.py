"""Many architectures: each computes as its own attention does, or is refused with a cause."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers_models import SHAPE, engine_of, plain_logits, relative_gap, sharpen, tokens
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvnotes.errors import UnsupportedModelError
from kvnotes.fidelity import MECHANICAL_TOLERANCE
from kvnotes.gate import run_gate

GAP = MECHANICAL_TOLERANCE["float32"]
IDS = tokens(30)
FULL = {"layer_types": ["full_attention"] * 3}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ACCEPTED: dict[str, dict[str, Any]] = {
    "gemma": {},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {},
    "stablelm": {},
    "cohere": {},
    "glm": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4},
    "gemma2": FULL,  # soft-capped scores
    "gpt_oss": {**FULL, "num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks
    "diffllama": {},
}
"""Decoders with rotary positions."""

EITHER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {  # latent keys
        "head_dim": None,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
    "doge": {},  # a mask per head
    "afmoe": FULL,  # wants contiguous attention output
    "vaultgemma": FULL,
    "ernie4_5": {},
    "persimmon": {},
}
"""Unusual ones: whatever is decided, it is decided in words and is right."""


@cache
def model_of(name: str) -> Any:
    changes = {**ACCEPTED, **EITHER}[name]
    values = {**SHAPE, **changes}
    if name in ("deepseek_v3", "gpt_neox", "phi", "stablelm"):
        del values["head_dim"]  # theirs follows from other values
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**values)
    return sharpen(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.filterwarnings("ignore")  # of the models, about kernels they would rather have
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_model_has_the_logits_of_its_own_attention(name: str) -> None:
    own = plain_logits(model_of(name), IDS)
    engine = engine_of(model_of(name))
    assert relative_gap(engine.prefill(IDS).last_logits(), own) < GAP
    assert run_gate(engine).worst < GAP


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EITHER)
def test_an_unusual_model_is_right_or_refused_and_never_a_crash(name: str) -> None:
    own = plain_logits(model_of(name), IDS)
    try:
        engine = engine_of(model_of(name))
        run_gate(engine).require()
    except UnsupportedModelError as error:
        assert "is not supported: " in error.message
        return
    assert relative_gap(engine.prefill(IDS).last_logits(), own) < GAP

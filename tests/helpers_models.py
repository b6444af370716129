"""Tiny random models of the supported families, engines on them, and an unfused reference.

Weights have std 1/sqrt(fan_in), norm weights 1 +- 0.3 and biases 0.1: with the defaults of
transformers attention is nearly flat, and a wrong mask or a wrong rotation goes unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvnotes.engine.base import Engine
from kvnotes.engine.hf import HFEngine
from kvnotes.engine.weights import state_dict_digest
from kvnotes.plan import Layout
from kvnotes.rope import Rotary, move_keys
from kvnotes.segment import KVCache, Piece
from kvnotes.spec import TensorName

VOCAB_SIZE = 89
NUM_LAYERS = 3
MAX_POSITIONS = 256

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def _llama(rope: str = "default", **changes: Any) -> nn.Module:
    config = LlamaConfig(**{**SHAPE, "rope_parameters": dict(ROPES[rope]), **changes})
    return LlamaForCausalLM(config)


def _qwen2() -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "rope_parameters": dict(ROPES["default"])}))


def _qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "rope_parameters": dict(ROPES["default"])}))


def _mistral(window: int | None = None) -> nn.Module:
    rope = dict(ROPES["default"])
    config = MistralConfig(**{**SHAPE, "rope_parameters": rope, "sliding_window": window})
    return MistralForCausalLM(config)


ROTARIES: dict[str, Sequence[Rotary]] = {}
"""Rotary embeddings of the engines that tests have made, by fingerprint."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-gqa": _llama,
    "llama-mha": lambda: _llama(num_key_value_heads=4),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "qwen2-bias": _qwen2,
    "qwen3-qknorm": _qwen3,
    "mistral": _mistral,
    "llama-linear": lambda: _llama("linear"),
    "llama-llama3": lambda: _llama("llama3"),
    "llama-yarn": lambda: _llama("yarn"),
}


def sharpen(model: nn.Module, seed: int = 0) -> Any:
    """Give a model weights whose attention is not flat; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=random)
            if weight.dim() >= 2:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            else:
                weight.copy_(1 + 0.3 * noise)
    return model.eval().requires_grad_(False)


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a new tiny model."""
    return sharpen(MODELS[name](), seed).to(dtype)


def engine_of(model: Any) -> HFEngine:
    """Return an engine on a model, its identity from the weights it has."""
    made = HFEngine(model, state_dict_digest(model.state_dict()))
    ROTARIES[made.fingerprint] = made.rotaries
    return made


@cache
def engine(name: str = "llama-gqa", dtype: torch.dtype = torch.float32) -> HFEngine:
    """Return the engine of a tiny model, shared by all tests: engines keep no state."""
    return engine_of(build(name, dtype=dtype))


def plain_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Return the logits after the last token, by the model's own forward and nothing of ours."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: Tensor = output.logits[0, -1].float()
    return logits


def snapshot(cache_: KVCache) -> list[Tensor]:
    """Copy what a cache holds now, piece by piece, keys moved to where they belong."""
    names = cache_.identity.spec.tensor_names
    layers = list(enumerate(cache_.identity.spec.layers))
    return [
        torch.cat([_held(piece, name, i, cache_) for piece in cache_.pieces], 1)
        for name in names
        for i, _ in layers
    ]


def _held(piece: Piece, name: TensorName, layer: int, cache_: KVCache) -> Tensor:
    held = piece.memory.tensors[name][layer][:, piece.slot : piece.slot_stop].clone()
    rope = cache_.identity.spec.layers[layer].rope_of(name)
    if not piece.shift or rope is None:
        return held
    places = torch.arange(piece.start, piece.stop)
    rotary = ROTARIES[cache_.identity.fingerprint][rope]
    return move_keys(held, places - piece.shift, places, rotary)


def same_kv(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two snapshots are bit-equal."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def kv_gap(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Largest difference of two snapshots, relative to the largest element of its layer."""
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(left, right, strict=True)]
    return max(gaps)


def tokens(size: int, seed: int = 0) -> tuple[int, ...]:
    """Return some token ids, the same for the same arguments."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB_SIZE, (size,), generator=random).tolist())


def describe(layout: Layout) -> str:
    """Return a layout on one line, for messages of failed tests."""
    parts = [
        f"{v.run.digest[:6]}[{v.source_start}:{v.source_stop}]@{v.target_start}{'*' * v.moved}"
        for v in layout
    ]
    return " ".join(parts)


def small_config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    """Return a tiny config of any decoder."""
    return kind(**{**SHAPE, **changes})


@lru_cache(maxsize=1)
def gap_allowed() -> float:
    """Largest relative logit gap between two ways of computing the same thing in float32."""
    from kvnotes.fidelity import MECHANICAL_TOLERANCE

    return MECHANICAL_TOLERANCE["float32"]


def relative_gap(result: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest absolute value of the reference."""
    return float((result - reference).abs().max() / reference.abs().max())


def logits_of(engine_: Engine, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of a cold prefill."""
    return engine_.prefill(token_ids).last_logits()

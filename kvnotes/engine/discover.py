"""What a transformers model caches and how its positions work, or why it is refused.

No table of model names: the layout is found by asking the cache class, the rotary module,
and by prefilling the same tokens at two places and explaining one by the other. What
cannot be explained is refused here, at load, with the reason.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvnotes.errors import UnsupportedModelError
from kvnotes.rope import Rotary, move_keys
from kvnotes.spec import LayerSpec, ModelSpec, Pairing, RopeSpec

EXACT_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Scalings whose tables do not depend on the length of the sequence."""

PROBE_TOLERANCE = 2e-3
"""Largest relative error of a moved key in the load-time probe, per dtype below. It must
only tell layouts apart: a wrong pairing or a position-dependent model is off by 0.1 to 2."""

PROBE_TOLERANCE_HALF = 6e-2
"""The same for bf16 and fp16, whose own rounding of deeper layers reaches 2e-2."""

CONSTANTS = (
    "attention_multiplier",
    "embedding_multiplier",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "logit_scale",
    "logits_scaling",
    "norm_eps",
    "partial_rotary_factor",
    "residual_multiplier",
    "rms_norm_eps",
)
"""Part of a model's identity beside shapes and weights."""

NUM_PROBE_TOKENS = 6
PROBE_DISTANCE = 19

_ERRATUM_HINT = (
    "use a decoder with full attention and rotary positions (Llama, Qwen, Mistral, SmolLM); an "
    "erratum can still be sent to this model as text"
)


def refusal(model: Any) -> str:
    """Return why edits and splices are impossible on a model, or an empty string."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        return "it keeps its own state instead of per-token K/V"
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        return f"it brings its own cache layer {error}"
    for index, layer in enumerate(layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            return f"layer {index} has sliding-window attention"
        if type(layer) is not DynamicLayer:
            return f"layer {index} keeps {type(layer).__name__}, no plain per-token K/V"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its positions cannot be set from outside"
    return ""


def check_supported(model: Any) -> None:
    """Refuse a model whose cache cannot be edited, before anything is computed.

    Raises:
        UnsupportedModelError: Names the cause.
    """
    reason = refusal(model)
    if reason:
        raise _unsupported(model, reason)


def discover(model: Any, forward: Any) -> tuple[ModelSpec, Rotary]:
    """Find a model's spec and rotary embedding, proved on a few tokens.

    Args:
        model: A transformers causal language model in eval mode.
        forward: `(token_ids, positions) -> per layer (keys, values)`, from nothing.

    Raises:
        UnsupportedModelError: Names the cause.
    """
    config = model.config.get_text_config(decoder=True)
    module = _rotary_module(model)
    kind = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if kind not in EXACT_ROPE_KINDS:
        raise _unsupported(
            model, f"its rotary tables depend on the sequence length (rope type {kind!r})"
        )
    inv_freq = cast(Tensor, module.inv_freq).detach().float()
    rotary_dim = 2 * inv_freq.numel()

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None])
        return _pairs(cos[0], rotary_dim).clone(), _pairs(sin[0], rotary_dim).clone()

    factor = float(getattr(module, "attention_scaling", 1.0))
    digest = hashlib.sha256(inv_freq.numpy().tobytes()).hexdigest()
    try:
        layers = forward(probe_ids(config), torch.arange(NUM_PROBE_TOKENS))
        far = forward(probe_ids(config), torch.arange(NUM_PROBE_TOKENS) + PROBE_DISTANCE)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _unsupported(
            model, f"its forward does not take our cache or mask: {error}"
        ) from error
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    errors: dict[str, float] = {}
    for pairing in pairings:
        rotary = Rotary(RopeSpec(kind, rotary_dim, pairing, digest, factor), table)
        errors[pairing] = _probe_error(layers, far, rotary)
    best = min(pairings, key=lambda p: errors[p])
    limit = PROBE_TOLERANCE if model.dtype == torch.float32 else PROBE_TOLERANCE_HALF
    if not errors[best] <= limit:
        raise _unsupported(
            model,
            f"its keys do not move by rotation (relative error {errors[best]:.1e}, allowed "
            f"{limit:.0e}): layers without positions, or positions that enter elsewhere",
        )
    spec = ModelSpec(
        model_type=config.model_type,
        layers=tuple(LayerSpec("full", k.shape[0], k.shape[2]) for k, _ in layers),
        num_attention_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=str(model.dtype).removeprefix("torch."),
        rope=RopeSpec(kind, rotary_dim, best, digest, factor),
        constants=_constants(config),
        num_parameters=_num_layer_parameters(model),
    )
    return spec, Rotary(spec.rope, table)


def probe_ids(config: Any) -> list[int]:
    """Return a few tokens spread over the vocabulary."""
    step = max(1, config.vocab_size // (NUM_PROBE_TOKENS + 1))
    return [(i + 1) * step % config.vocab_size for i in range(NUM_PROBE_TOKENS)]


def _probe_error(layers: Any, far: Any, rotary: Rotary) -> float:
    """Largest error, over layers, of keys moved by `PROBE_DISTANCE` and of values left alone."""
    worst = 0.0
    source = torch.arange(NUM_PROBE_TOKENS)
    for (keys, values), (far_keys, far_values) in zip(layers, far, strict=True):
        if rotary.spec.rotary_dim > keys.shape[2]:
            return float("inf")
        moved = move_keys(keys, source, source + PROBE_DISTANCE, rotary)
        for ours, theirs in ((moved, far_keys), (values, far_values)):
            scale = theirs.float().abs().max().clamp_min(1e-30)
            worst = max(worst, float((ours.float() - theirs.float()).abs().max() / scale))
    return worst


def _rotary_module(model: Any) -> Any:
    found = [
        module
        for name, module in model.get_decoder().named_modules()
        if name.split(".")[-1].startswith("rotary_emb") and hasattr(module, "inv_freq")
    ]
    if not found:
        raise _unsupported(model, _why_no_table(model))
    first = found[0]
    if any(not torch.equal(first.inv_freq, other.inv_freq) for other in found[1:]):
        raise _unsupported(model, "its layers have different rotary tables")
    return first


def _why_no_table(model: Any) -> str:
    names = [name for name, _ in model.named_buffers()]
    if any(name.endswith("inv_freq") for name in names) or "rotary_emb" in "".join(names):
        return "its rotary tables differ between layers"
    if any(name.endswith("embed_positions") for name in names):
        return "its rotary table is not made from inverse frequencies"
    return "it has no rotary embedding: positions are learned, or there are none"


def _pairs(table: Tensor, rotary_dim: int) -> Tensor:
    """Return one column per rotated pair from a model's cosines or sines `[tokens, dim]`."""
    if table.is_complex() or table.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise UnsupportedModelError(
            f"the rotary module returns {tuple(table.shape)} {table.dtype}, expected "
            f"{rotary_dim} columns",
            hint=_ERRATUM_HINT,
        )
    if table.shape[-1] == rotary_dim // 2:
        return table.float()
    if torch.equal(table[..., 0::2], table[..., 1::2]):
        return table[..., 0::2].float()
    return table[..., : rotary_dim // 2].float()


def _constants(config: Any) -> tuple[tuple[str, str], ...]:
    """Return the configuration's constants that change K/V or logits, by name."""
    found = {name: getattr(config, name, None) for name in CONSTANTS}
    return tuple((name, str(value)) for name, value in sorted(found.items()) if value is not None)


def _num_layer_parameters(model: Any) -> int:
    embedding = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    embedding |= {id(p) for p in head.parameters()} if head is not None else set()
    return sum(p.numel() for p in model.parameters() if id(p) not in embedding)


def _unsupported(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model.config.model_type!r} is not supported: {reason}", hint=_ERRATUM_HINT
    )

"""The model families that are read from GGUF, and what each of their names means.

Owns every fact about llama.cpp's names, shapes and text rules; reads and writes nothing.
What this page does not know is refused: a forgotten rotary scale would load and answer,
wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvnotes.engine.gguf import GGUFHeader
from kvnotes.errors import SegmentFormatError, UnsupportedModelError

TextRules: TypeAlias = tuple[dict[str, Any] | None, dict[str, Any]]
"""Normalizer and pre-tokenizer, as tokenizer.json writes them."""

_HINT = "use the model's own folder with safetensors weights instead of the GGUF file"


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's GGUF differs from its transformers model.

    Attributes:
        model_type: Name in config.json.
        model_class: Class in config.json.
        constants: What the file does not say because the family fixes it.
        permuted: Rows of q and k are interleaved for llama.cpp's rotary pairs.
        qkv_bias: Query, key and value projections have a bias.
        qk_norm: Queries and keys are normalised per head.
    """

    model_type: str
    model_class: str
    constants: dict[str, Any]
    permuted: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1},
        permuted=True,
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {"attention_dropout": 0.0, "use_sliding_window": False},
        qkv_bias=True,
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {"attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False},
        qk_norm=True,
    ),
}

# The keys below "<architecture>." that are understood; any other is refused.
_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "vocab_size",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, _BYTE_LEVEL | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": steps}


# tokenizer.ggml.pre -> (normalizer, pre_tokenizer) of tokenizer.json. llama.cpp keeps these
# rules in its source, a GGUF only names them; transformers reads "smollm" as plain GPT-2 and
# then splits "\n\n1." otherwise than the model was trained.
_TEXT_RULES: dict[str, TextRules] = {
    "gpt-2": (None, _BYTE_LEVEL | {"use_regex": True}),
    "llama-bpe": (None, _split(_LLAMA3_SPLIT)),
    "qwen2": ({"type": "NFC"}, _split(_QWEN2_SPLIT)),
    "smollm": (
        None,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _BYTE_LEVEL | {"use_regex": True},
            ],
        },
    ),
}


def check_supported(header: GGUFHeader) -> None:
    """Refuse a file that could not be converted exactly.

    Raises:
        SegmentFormatError: A tensor or field is missing or has the wrong shape.
        UnsupportedModelError: The file holds something this version does not know.
    """
    config = model_config(header)
    expected = dict(_expected_tensors(header, config))
    for name, shape in expected.items():
        if name not in header.tensors:
            raise SegmentFormatError(f"{header.path} has no tensor {name!r}", hint=_HINT)
        if header.tensors[name].shape != shape:
            raise SegmentFormatError(
                f"{header.path}: tensor {name!r} has shape {header.tensors[name].shape}, "
                f"its fields say {shape}",
                hint=_HINT,
            )
    if extra := sorted(set(header.tensors) - set(expected)):
        raise UnsupportedModelError(
            f"{header.path} holds tensors that {config['architectures'][0]} does not: "
            + ", ".join(extra[:4]),
            hint=_HINT,
        )
    _check_vocabulary(header, config["vocab_size"])
    text_rules(header)


def model_config(header: GGUFHeader) -> dict[str, Any]:
    """The config.json of a file's model.

    Raises:
        UnsupportedModelError: Another family, or one of its options is not known here.
    """
    arch = header.architecture
    if arch not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path} holds a {arch!r} model; GGUF is read for {', '.join(FAMILIES)}",
            hint=_HINT,
        )
    family = FAMILIES[arch]
    prefix = f"{arch}."
    keys = {key.removeprefix(prefix) for key in header.fields if key.startswith(prefix)}
    if unknown := sorted(keys - _KNOWN_KEYS):
        raise UnsupportedModelError(
            f"{header.path} sets {', '.join(prefix + key for key in unknown)}, not known here",
            hint=_HINT,
        )
    if header.fields.get(prefix + "rope.scaling.type", "none") != "none":
        raise UnsupportedModelError(
            f"{header.path} scales its rotary positions; only plain ones are read from GGUF",
            hint=_HINT,
        )

    hidden, num_heads = (
        header.number(prefix + key) for key in ("embedding_length", "attention.head_count")
    )
    num_kv_heads = (
        header.number(prefix + "attention.head_count_kv")
        if "attention.head_count_kv" in keys
        else num_heads
    )
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise SegmentFormatError(
            f"{header.path}: {num_heads} heads cannot share {num_kv_heads} K/V heads", hint=_HINT
        )
    head_dim = _head_dim(header, keys, hidden // num_heads)
    embedding = header.tensors.get("token_embd.weight")
    config = family.constants | {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "vocab_size": embedding.shape[0] if embedding else 0,
        "hidden_size": hidden,
        "intermediate_size": header.number(prefix + "feed_forward_length"),
        "num_hidden_layers": header.number(prefix + "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": header.number(prefix + "context_length"),
        "rms_norm_eps": _shortest(header.real(prefix + "attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": _shortest(header.real(prefix + "rope.freq_base"))
            if "rope.freq_base" in keys
            else 10000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = _token_id(header, key)
    return dict(sorted(config.items()))


def text_rules(header: GGUFHeader) -> TextRules | None:
    """How text is split before merging, or None where the tokenizer's class fixes it."""
    kind = header.text("tokenizer.ggml.model")
    if kind == "llama":
        return None
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{header.path} has a {kind!r} tokenizer; 'gpt2' and 'llama' are read from GGUF",
            hint=_HINT,
        )
    pre = header.fields.get("tokenizer.ggml.pre", "")
    if not isinstance(pre, str) or pre not in _TEXT_RULES:
        raise UnsupportedModelError(
            f"{header.path} splits text by the rules {pre!r}; known: {', '.join(_TEXT_RULES)}",
            hint=_HINT,
        )
    return _TEXT_RULES[pre]


def _check_vocabulary(header: GGUFHeader, vocab_size: int) -> None:
    tokens = _strings(header, "tokenizer.ggml.tokens")
    num_tokens = len(tokens)
    if not 1 <= num_tokens <= vocab_size:
        raise SegmentFormatError(
            f"{header.path} names {num_tokens} tokens and embeds {vocab_size}", hint=_HINT
        )
    vocabulary = set(tokens)
    if len(vocabulary) != num_tokens:
        raise SegmentFormatError(f"{header.path} names a token twice", hint=_HINT)
    for merge in _strings(header, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise SegmentFormatError(
                f"{header.path}: the merge {merge!r} is not one of two tokens", hint=_HINT
            )
    for name in ("bos", "eos", "padding", "eot", "eom"):
        token_id = _token_id(header, name)
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise SegmentFormatError(
                f"{header.path}: the {name} token is {token_id}, the last one is {num_tokens - 1}",
                hint=_HINT,
            )


def _strings(header: GGUFHeader, key: str) -> list[str]:
    values = header.fields.get(key, [])
    if not isinstance(values, list):
        raise SegmentFormatError(f"{header.path}: field {key!r} is no list", hint=_HINT)
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) != len(values):
        raise SegmentFormatError(f"{header.path}: field {key!r} holds no strings", hint=_HINT)
    return strings


def _head_dim(header: GGUFHeader, keys: set[str], default: int) -> int:
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    stated = {key: header.number(f"{header.architecture}.{key}") for key in names if key in keys}
    if len(set(stated.values())) > 1:
        raise UnsupportedModelError(
            f"{header.path}: keys, values and rotary part differ in width: {stated}", hint=_HINT
        )
    return next(iter(stated.values()), default)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-05, not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _token_id(header: GGUFHeader, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return header.number(key) if key in header.fields else None


def stop_ids(header: GGUFHeader) -> int | list[int] | None:
    """End of text, and end of turn where the file names one of its own."""
    found = {_token_id(header, name) for name in ("eos", "eot", "eom")} - {None}
    ids = sorted(i for i in found if i is not None)
    return ids[0] if len(ids) == 1 else ids or None


def _expected_tensors(
    header: GGUFHeader, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor the family has, with its shape."""
    family = FAMILIES[header.architecture]
    hidden, inner, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    yield "token_embd.weight", (config["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        blk = f"blk.{layer}."
        yield blk + "attn_norm.weight", (hidden,)
        yield blk + "ffn_norm.weight", (hidden,)
        for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
            yield f"{blk}{name}.weight", (rows, hidden)
            if family.qkv_bias:
                yield f"{blk}{name}.bias", (rows,)
        if family.qk_norm:
            yield blk + "attn_q_norm.weight", (head_dim,)
            yield blk + "attn_k_norm.weight", (head_dim,)
        yield blk + "attn_output.weight", (hidden, q_rows)
        yield blk + "ffn_gate.weight", (inner, hidden)
        yield blk + "ffn_up.weight", (inner, hidden)
        yield blk + "ffn_down.weight", (hidden, inner)


def target_name(name: str) -> str:
    """The name in a transformers model of a tensor that `check_supported` let through."""
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, suffix = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{suffix}"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"

"""Writes tiny random models as GGUF files, with llama.cpp's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

NUM_LAYERS, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS = 2, 64, 96, 4, 2
NUM_EXPERTS, EXPERT_INNER = 2, 768
HEAD_DIMS = {"qwen3": 128, "qwen3moe": 128, "gemma3": 32}
# transformers' GGUF reader takes Qwen3's width of a head and of an expert for granted
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3")
CONTROL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> list[str]:
    """One token per byte, spelled as byte-level BPE does."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [spelling[byte] for byte in range(256)]


def layer_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    head_dim = HEAD_DIMS.get(arch, HIDDEN // NUM_HEADS)
    q, kv = NUM_HEADS * head_dim, NUM_KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
    }
    if arch == "phi3":
        return shapes | {
            "attn_qkv.weight": (q + 2 * kv, HIDDEN),
            "ffn_up.weight": (2 * INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
    projections = {"attn_q": q, "attn_k": kv, "attn_v": kv}
    shapes |= {f"{name}.weight": (rows, HIDDEN) for name, rows in projections.items()}
    inner = EXPERT_INNER if arch == "qwen3moe" else INNER
    mlp = {"ffn_gate": (inner, HIDDEN), "ffn_up": (inner, HIDDEN), "ffn_down": (HIDDEN, inner)}
    if arch == "qwen3moe":
        shapes |= {f"{name}_exps.weight": (NUM_EXPERTS, *shape) for name, shape in mlp.items()}
        shapes["ffn_gate_inp.weight"] = (NUM_EXPERTS, HIDDEN)
    else:
        shapes |= {f"{name}.weight": shape for name, shape in mlp.items()}
    if arch == "qwen2":
        shapes |= {f"{name}.bias": (rows,) for name, rows in projections.items()}
    if arch in HEAD_DIMS:
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if arch == "gemma3":
        shapes |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    return shapes


def write_tiny_gguf(
    path: Path,
    arch: str = "llama",
    *,
    quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    pre: str = "smollm",
    seed: int = 0,
    more_fields: dict[str, Any] | None = None,
    more_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a two-layer model with a byte vocabulary; mostly about 100 kB."""
    random = np.random.default_rng(seed)
    tokens = [*CONTROL, *byte_tokens(), "aa", "\u010a\u010a"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch in HEAD_DIMS:
        writer.add_key_length(HEAD_DIMS[arch])
    if arch == "qwen3moe":
        writer.add_expert_count(NUM_EXPERTS)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(EXPERT_INNER)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["a a", "\u010a \u010a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (more_fields or {}).items():
        writer.kv_data[0].pop(key, None)
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)

    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(arch).items()}
    tensors = {
        name: random.normal(size=shape).astype(np.float32) / 8
        for name, shape in shapes.items()
        if name not in without
    }
    for name, values in (tensors | (more_tensors or {})).items():
        if values.ndim > 1:
            data = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, data, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

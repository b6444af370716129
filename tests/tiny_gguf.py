"""Writes tiny random models as GGUF files, with llama.cpp's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

NUM_LAYERS, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS = 2, 64, 96, 4, 2
QWEN3_HEAD_DIM = 128  # transformers' own GGUF reader takes this for granted
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
    """Write a two-layer model with a byte vocabulary; about 100 kB."""
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
    if arch == "qwen3":
        writer.add_key_length(QWEN3_HEAD_DIM)
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
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)

    head_dim = QWEN3_HEAD_DIM if arch == "qwen3" else HIDDEN // NUM_HEADS
    q, kv = NUM_HEADS * head_dim, NUM_KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(NUM_LAYERS):
        names: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            names |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "qwen3":
            names |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
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

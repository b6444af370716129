"""Turning a GGUF file into a plain model folder that every library can load.

Owns the writing: exact dequantised values in float32, one file, flushed to the disk. The
folder does not depend on the installed transformers, which only reads the vocabulary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvnotes.engine.families import FAMILIES, model_config, stop_ids, target_name, text_rules
from kvnotes.engine.gguf import GGUFHeader, GGUFTensor, read_tensor
from kvnotes.engine.quiet import quiet_transformers
from kvnotes.errors import UnsupportedModelError

CONVERTER_VERSION = 1
"""Part of a folder's name: raise it when the same GGUF would give another folder."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


def num_converted_bytes(header: GGUFHeader) -> int:
    """Bytes that the weights take once converted."""
    return sum(4 * int(np.prod(tensor.shape)) for tensor in header.tensors.values())


def convert(header: GGUFHeader, folder: Path, progress: Progress) -> None:
    """Write the model of a checked GGUF file into an existing empty folder."""
    config = model_config(header)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": stop_ids(header)}
    generation["pad_token_id"] = config["pad_token_id"]
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None}
    )
    _write_weights(header, folder / "model.safetensors", progress)
    progress("writing the tokenizer", 0, 1)
    _write_tokenizer(header, folder)
    progress("writing the tokenizer", 1, 1)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is on the disk when this returns."""
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _target_values(
    header: GGUFHeader, tensor: GGUFTensor, config: dict[str, Any]
) -> npt.NDArray[np.float32]:
    values = read_tensor(header, tensor)
    part = tensor.name.split(".")[-2]
    if not FAMILIES[header.architecture].permuted or part not in ("attn_q", "attn_k"):
        return values
    # llama.cpp pairs neighbouring rows (2i, 2i+1), transformers row i with row i + half:
    #   file    head | i | 2      ->   folder   head | 2 | i
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    paired = values.reshape(heads, config["head_dim"] // 2, 2, -1)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def _write_weights(header: GGUFHeader, path: Path, progress: Progress) -> None:
    """Stream the tensors into one safetensors file, sorted by name."""
    config = model_config(header)
    tensors = sorted((target_name(name), tensor) for name, tensor in header.tensors.items())
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, tensor in tensors:
        start, stop = stop, stop + 4 * int(np.prod(tensor.shape))
        entries[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            progress("writing the weights", done, stop)
            values = _target_values(header, tensor, config).astype("<f4", copy=False)
            file.write(values.reshape(-1).view(np.uint8).data)
            done += values.nbytes
        file.flush()
        os.fsync(file.fileno())
    progress("writing the weights", stop, stop)


def _write_tokenizer(header: GGUFHeader, folder: Path) -> None:
    from transformers import AutoTokenizer

    # alone in a folder, so that no other file beside it is read
    with tempfile.TemporaryDirectory(prefix="kvnotes-") as alone, quiet_transformers():
        Path(alone, "model.gguf").symlink_to(header.path.absolute())
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UnsupportedModelError(
                f"transformers cannot read the tokenizer in {header.path}: {error}",
                hint="use the model's own folder with safetensors weights",
            ) from error
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    if rules := text_rules(header):
        data["normalizer"], data["pre_tokenizer"] = rules
    write_json(folder / "tokenizer.json", data)
    config: dict[str, Any] = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    config |= {
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.number(f"{header.architecture}.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", dict(sorted(config.items())))
    if isinstance(tokenizer.chat_template, str):
        _write_text(folder / "chat_template.jinja", tokenizer.chat_template)

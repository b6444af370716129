"""Turning a GGUF file into a plain model folder that every library can load.

transformers reads the file. Owned here: what is refused before that, because transformers
would read it wrongly without a word, and what is written after it. The weights do not
depend on the installed transformers.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvnotes.engine.quiet import quiet_transformers
from kvnotes.errors import KVNotesError, SegmentFormatError, UnsupportedModelError

CONVERTER_VERSION = 1
"""Part of a folder's name: raise it when the same GGUF would give another folder."""

MAX_ITEMS = 4_000_000
"""Of all lists in a header; the largest vocabularies with their merges have 1.5 million."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

_NUM_STEPS = 4
_NEEDED = ("attention.head_count", "block_count", "context_length", "embedding_length")
_NAME = "model.gguf"
_REFETCH = "fetch the file again, or convert the model to a folder with safetensors weights"
_OTHER_SOURCE = "use the model's own folder with safetensors weights instead of the GGUF file"

# tokenizer.ggml.pre of the rules that llama.cpp keeps in its source and transformers lacks
# (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp): those of GPT-2, and
# the same with each digit for itself
_GPT2_RULES = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion")
_DIGIT_RULES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


class _EveryKey:
    """Asks `read_gguf_metadata` for the strings of every list."""

    def __contains__(self, key: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file that is whole.

    Attributes:
        metadata: Its fields.
        sizes: Number of values of each tensor, by llama.cpp's name.
    """

    path: Path
    metadata: dict[str, Any]
    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take once converted."""
        return 4 * sum(self.sizes.values())

    @property
    def architecture(self) -> str:
        """The model family, in llama.cpp's words."""
        return str(self.metadata["general.architecture"])

    def token_id(self, name: str) -> int | None:
        """The id of a special token, if the file names one."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        num_tokens = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
            raise SegmentFormatError(
                f"{self.path}: the {name} token is {value}, there are {num_tokens} tokens",
                hint=_REFETCH,
            )
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and check that all it names is there.

    Raises:
        SegmentFormatError: The file is not GGUF, is damaged, cut short or of a newer format.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        # first, as it fails at the end of the file, where GGUFReader goes on for ever
        metadata, names = read_gguf_metadata(str(path), _EveryKey())
        num_items = sum(len(value) for value in metadata.values() if isinstance(value, list))
        if num_items > MAX_ITEMS:
            raise ValueError(f"its lists have {num_items} items")
        # transformers has a default for what is missing, and makes as many layers as are named
        prefix = f"{metadata['general.architecture']}."
        if missing := [key for key in _NEEDED if prefix + key not in metadata]:
            raise ValueError(f"there is no {prefix}{missing[0]}")
        num_layers = metadata[prefix + "block_count"]
        if not 0 < num_layers <= len(names):
            raise ValueError(f"{num_layers} blocks cannot have {len(names)} tensors")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, of numbers that overflow
            sizes = {tensor.name: tensor.n_elements for tensor in GGUFReader(path).tensors}
    except (ArithmeticError, LookupError, RuntimeWarning, TypeError, ValueError, struct.error) as e:
        raise SegmentFormatError(f"{path} is no whole GGUF file: {e}", hint=_REFETCH) from e
    return GGUFFile(path, metadata, sizes)


def convert(gguf: GGUFFile, folder: Path, progress: Progress) -> None:
    """Write the model of a GGUF file into an existing empty folder.

    Raises:
        SegmentFormatError: The file contradicts itself.
        UnsupportedModelError: transformers cannot read it, or would lose something.
    """
    progress("reading the configuration", 0, _NUM_STEPS)
    # alone in a folder, so that no other file beside it is read
    with tempfile.TemporaryDirectory(prefix="kvnotes-") as alone:
        Path(alone, _NAME).symlink_to(gguf.path.absolute())
        with _explained(gguf, "configuration"):
            config = _checked_config(gguf, alone)
        progress("reading the weights", 1, _NUM_STEPS)
        with _explained(gguf, "weights"):
            model = _read_model(gguf, alone, config)
        progress("writing the weights", 2, _NUM_STEPS)
        _write_configs(gguf, model, folder)
        _write_weights(model, folder / "model.safetensors")
        del model
        progress("writing the tokenizer", 3, _NUM_STEPS)
        _write_tokenizer(gguf, alone, folder)
    progress("writing the tokenizer", _NUM_STEPS, _NUM_STEPS)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is on the disk when this returns."""
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _explained(gguf: GGUFFile, part: str) -> Iterator[None]:
    """Keep transformers quiet, and turn what it raises into one clear line."""
    try:
        # its reader of GGUF draws a bar that no setting of it turns off
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            yield
    except KVNotesError:
        raise
    except Exception as error:  # the class that tokenizers raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(
            f"transformers cannot read the {part} in {gguf.path}: {reason}", hint=_OTHER_SOURCE
        ) from error


def _checked_config(gguf: GGUFFile, alone: str) -> Any:
    """The model's configuration, if nothing of the file would be lost by it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(alone, gguf_file=_NAME, local_files_only=True)
    scaling = gguf.metadata.get(f"{gguf.architecture}.rope.scaling.type", "none")
    if scaling != "none" and "default" in str(getattr(config, "rope_parameters", "default")):
        raise UnsupportedModelError(
            f"{gguf.path} scales its rotary positions ({scaling}), which transformers ignores",
            hint=_OTHER_SOURCE,
        )
    # transformers skips tensors that it does not know, such as Llama 3's rotary factors or
    # biases, so the numbers of values must agree
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shared = dict(skeleton.named_parameters(remove_duplicate=False))
    buffers = [value for name, value in skeleton.state_dict().items() if name not in shared]
    expected = sum(tensor.numel() for tensor in [*skeleton.parameters(), *buffers])
    tied = ("output.weight",) if config.tie_word_embeddings else ()
    found = sum(size for name, size in gguf.sizes.items() if name not in tied)
    if found != expected:
        raise UnsupportedModelError(
            f"{gguf.path} holds {found} values, the {type(skeleton).__name__} that transformers "
            f"makes of it {expected}",
            hint=_OTHER_SOURCE,
        )
    return config


def _read_model(gguf: GGUFFile, alone: str, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        alone,
        gguf_file=_NAME,
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        local_files_only=True,
    )
    if wrong := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        raise SegmentFormatError(
            f"{gguf.path} lacks {len(wrong)} tensors of its model, such as {wrong[0]!r}",
            hint=_REFETCH,
        )
    return model


def _write_configs(gguf: GGUFFile, model: Any, folder: Path) -> None:
    config = _shortest(model.config.to_diff_dict())
    noise = ("_model_name_or_path", "_name_or_path", "quantization_config", "transformers_version")
    for key in (*noise, "unk_token_id"):
        config.pop(key, None)
    # a class's own default would name a token of another vocabulary
    bos, eos, pad = (gguf.token_id(name) for name in ("bos", "eos", "padding"))
    if not isinstance(config.get("eos_token_id"), list):
        config["eos_token_id"] = eos
    config |= {"bos_token_id": bos, "pad_token_id": pad}
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    write_json(folder / "config.json", dict(sorted(config.items())))

    # end of text, and end of turn where the file names one of its own
    stops = {eos, gguf.token_id("eot"), gguf.token_id("eom")}
    if isinstance(config["eos_token_id"], list):
        stops |= set(config["eos_token_id"])
    stop_ids = sorted(token_id for token_id in stops if token_id is not None)
    generation = {
        "bos_token_id": bos,
        "eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids or None,
        "pad_token_id": pad,
    }
    write_json(
        folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None}
    )


def _shortest(value: Any) -> Any:
    """The shortest decimal of each number with its float32 value: 1e-05, not 9.999999747e-06."""
    if isinstance(value, dict):
        return {key: _shortest(item) for key, item in value.items()}
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _write_weights(model: Any, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[int, tuple[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))  # not the tied head
    try:
        save_file(dict(sorted(tensors.values())), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_tokenizer(gguf: GGUFFile, alone: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _explained(gguf, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=_NAME, local_files_only=True)
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        _correct_text_rules(gguf, data)
    write_json(folder / "tokenizer.json", data)
    config: dict[str, Any] = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    config |= {
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.metadata[f"{gguf.architecture}.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", dict(sorted(config.items())))
    if isinstance(tokenizer.chat_template, str):
        _write_text(folder / "chat_template.jinja", tokenizer.chat_template)


def _correct_text_rules(gguf: GGUFFile, data: dict[str, Any]) -> None:
    """Set the rules by which text is split before merging, where transformers has them wrong.

    A GGUF only names them, and transformers takes names that it does not know for GPT-2: then
    two line ends before a digit are split otherwise than SmolLM2 was trained. It also leaves
    out Qwen's normalizer.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if gguf.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    rules = gguf.metadata.get("tokenizer.ggml.pre")
    if rules in _DIGIT_RULES:
        digits = {"type": "Digits", "individual_digits": True}
        steps = [digits, data["pre_tokenizer"]]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    elif rules == "qwen2":
        data["normalizer"] = {"type": "NFC"}
    elif rules not in GGUF_PRE_TOKENIZER_SPLITS and rules not in _GPT2_RULES:
        raise UnsupportedModelError(
            f"{gguf.path} splits text by the rules {rules!r}, which transformers does not know",
            hint=_OTHER_SOURCE,
        )

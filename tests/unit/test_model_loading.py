"""Loading a model's folder, and what is said where that cannot be done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from kvnotes.engine.models import ResolvedModel, load_model_and_tokenizer, resolve_model
from kvnotes.errors import (
    EngineError,
    KVNotesError,
    ModelNotFoundError,
    SegmentFormatError,
    UnsupportedModelError,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted model of its own, to be damaged."""
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    return resolve_model(str(file), progress=lambda what, done, total: None).path


def test_model_is_loaded_for_inference_in_float32_without_a_word(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model, tokenizer = load_model_and_tokenizer(resolve_model(str(folder)))
    assert not model.training
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.float32"}
    assert not any(weight.requires_grad for weight in model.parameters())
    assert tokenizer.eos_token == "<|im_end|>"
    assert capfd.readouterr() == ("", "")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_dtype_is_as_asked_or_refused(folder: Path) -> None:
    resolved = resolve_model(str(folder))
    assert str(load_model_and_tokenizer(resolved, dtype="bfloat16").model.dtype) == "torch.bfloat16"
    with pytest.raises(EngineError, match="no dtype 'bfloat'") as caught:
        load_model_and_tokenizer(resolved, dtype="bfloat")
    assert caught.value.hint == "did you mean 'bfloat16'?"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[KVNotesError], str]] = {
    "short weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        SegmentFormatError,
        "is damaged",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ModelNotFoundError,
        "holds no model.safetensors",
    ),
    "pickled weights": (only_pickled, UnsupportedModelError, "pickled weights only"),
    "a tensor missing": (drop_tensor, SegmentFormatError, "lacks 1 tensors .*'model.norm.weight'"),
    "other shapes": (
        lambda folder: edit_config(folder, intermediate_size=32),
        SegmentFormatError,
        "cannot read the weights",
    ),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        ModelNotFoundError,
        "has no tokenizer",
    ),
    "broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        SegmentFormatError,
        "cannot read the tokenizer",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        ModelNotFoundError,
        "has no config.json",
    ),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{"),
        SegmentFormatError,
        "is not JSON",
    ),
    "config of nothing": (
        lambda folder: (folder / "config.json").write_text("[]"),
        UnsupportedModelError,
        "names no model_type",
    ),
    "unknown model": (
        lambda folder: edit_config(folder, model_type="never-heard-of"),
        UnsupportedModelError,
        "cannot read the configuration",
    ),
    "no text model": (
        lambda folder: edit_config(folder, model_type="vit", architectures=None),
        UnsupportedModelError,
        "does not generate text",
    ),
    "code of its own": (
        lambda folder: edit_config(
            folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"}
        ),
        UnsupportedModelError,
        "cannot read the configuration",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_folder_that_cannot_be_loaded_says_what_is_wrong(damage: str, folder: Path) -> None:
    change, kind, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(kind, match=message) as caught:
        load_model_and_tokenizer(ResolvedModel(folder, "tiny", "folder"))
    assert type(caught.value) is kind
    assert caught.value.hint
    assert "\n" not in caught.value.message

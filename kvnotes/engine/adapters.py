"""LoRA adapters: merged into the weights at load, part of who a model is.

An adapter is a folder as peft writes it. It names the model it stands on; its K/V are those
of the merged weights, and fit neither the base nor another adapter.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from kvnotes.errors import EngineError, ModelNotFoundError, SegmentFormatError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_NO_IDENTITY = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")
"""Entries of a configuration that change nothing of what is computed."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no model of its own."""
    return (folder / CONFIG_NAME).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Return the name of the model that an adapter stands on.

    Raises:
        SegmentFormatError: Its configuration is damaged, or names none.
    """
    name = _config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise SegmentFormatError(
            f"{folder / CONFIG_NAME} names no base model", hint="fetch the adapter again"
        )
    beside = folder / name
    return str(beside) if beside.is_dir() else name


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter: its weights, and what its configuration changes.

    Raises:
        ModelNotFoundError: It has no weights.
        SegmentFormatError: Its configuration is damaged.
    """
    config = {k: v for k, v in _config(folder).items() if k not in _NO_IDENTITY}
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        with (folder / WEIGHTS_NAME).open("rb") as file:
            while chunk := file.read(1 << 20):
                state.update(chunk)
    except OSError as error:
        raise ModelNotFoundError(
            f"{folder} has no {WEIGHTS_NAME}: {error.strerror}", hint="fetch the adapter again"
        ) from error
    return state.hexdigest()


def merged(model: Any, folder: Path) -> Any:
    """Return a model with an adapter merged into its weights.

    Raises:
        EngineError: peft is not installed, or the adapter does not fit the model.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise EngineError(
            f"{folder} is an adapter, and peft, which applies it, is not installed",
            hint='pip install "kvnotes[adapters]"',
        ) from error
    adapter_digest(folder)  # what has none of its own files is refused before peft looks for others
    try:
        with warnings.catch_warnings():
            # adapters whose weights are not found are left out with no more than a warning
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as error:  # third-party code: whatever it is, the adapter is not applied
        reason = next(iter(str(error).strip().splitlines()), "")
        raise EngineError(
            f"peft cannot apply the adapter in {folder}: {type(error).__name__}: {reason}",
            hint="it is damaged, or made for another model than the one that it names: fetch it "
            "again, or train it anew",
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SegmentFormatError(
            f"{path} cannot be read: {error}", hint="fetch the adapter again"
        ) from error
    if not isinstance(found, dict):
        raise SegmentFormatError(f"{path} holds no object", hint="fetch the adapter again")
    return found

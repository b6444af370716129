"""The model that a server serves: who it is, and the rotation of its keys, as a file.

The embedded engine finds both out once, by its probes and its gate; the processes of vLLM read
them. So K/V of both engines carry one fingerprint, and a model that the gate refuses is never
spliced by vLLM either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import kvnotes
from kvnotes.engine.base import engine_versions
from kvnotes.errors import SegmentFormatError
from kvnotes.rope import Rotary
from kvnotes.settings import load_settings, make_private
from kvnotes.spec import ModelIdentity
from kvnotes.store.atomic import write_file

_IDENTITY = TypeAdapter(ModelIdentity)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that passed the gate.

    Args:
        identity: Who it is.
        rotaries: Its rotary embeddings, as tables over all its positions.
    """

    identity: ModelIdentity
    rotaries: tuple[Rotary, ...]


def prepare(name: str, *, dtype: str) -> Path:
    """Return the file that describes a model; make it if it is not there.

    Loads the model in this process once for each version of its files, and runs the gate.

    Args:
        name: As for `kvnotes.load`.
        dtype: That the server uses, `float32`, `bfloat16` or `float16`.

    Raises:
        KVNotesError: The model is not there, or its K/V cannot be moved; as `kvnotes.load`.
    """
    from kvnotes.engine.models import resolve_model
    from kvnotes.session import load

    resolved = resolve_model(name)
    target = load_settings().home / "vllm" / f"{_mark(resolved.path, dtype)}.safetensors"
    if not target.is_file():
        engine = load(name, dtype=dtype).engine
        make_private(target.parent)
        write_file(target, serialized(engine.identity, engine.rotaries))
    return target


def _mark(folder: Path, dtype: str) -> str:
    from kvnotes.engine.weights import weights_digest

    facts = [weights_digest(folder), dtype, kvnotes.__version__, engine_versions()]
    state = hashlib.sha256(json.dumps(facts).encode())
    state.update((folder / "config.json").read_bytes())
    return state.hexdigest()


def serialized(identity: ModelIdentity, rotaries: Sequence[Rotary]) -> bytes:
    """Return the content of the file that describes a model."""
    positions = torch.arange(identity.spec.max_positions)
    tables: dict[str, Tensor] = {}
    for index, rotary in enumerate(rotaries):
        cos, sin = rotary.table(positions)
        tables[f"cos.{index}"] = cos.float().contiguous()
        tables[f"sin.{index}"] = sin.float().contiguous()
    return save(tables, metadata={"identity": _IDENTITY.dump_json(identity).decode()})


def read(path: Path) -> PreparedModel:
    """Read what `prepare` wrote.

    Raises:
        SegmentFormatError: It is not there or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            identity = _IDENTITY.validate_json(file.metadata()["identity"])
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rotaries = tuple(
            Rotary(spec, _Table(tables[f"cos.{index}"], tables[f"sin.{index}"]))
            for index, spec in enumerate(identity.spec.ropes)
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SegmentFormatError(
            f"{path} describes no model: {error}", hint="remove it and start the server again"
        ) from error
    return PreparedModel(identity, rotaries)


@dataclass(frozen=True, slots=True)
class _Table:
    """Cosines and sines by position, float32 `[positions, pairs]`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]

"""From a model on the disk to an engine: weights, what lies on top of them, and who that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvnotes.engine import models
from kvnotes.engine.adapters import adapter_digest
from kvnotes.engine.hf import HFEngine
from kvnotes.engine.quantize import quantize, stored_quantization
from kvnotes.engine.weights import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LoadedEngine(NamedTuple):
    """An engine and the tokenizer of its model."""

    engine: HFEngine
    tokenizer: PreTrainedTokenizerBase


def load_engine(
    resolved: models.ResolvedModel, *, dtype: str | None = None, quantization: str | None = None
) -> LoadedEngine:
    """Load a resolved model as an engine, its adapter and quantization part of who it is.

    Args:
        resolved: What `resolve_model` returned.
        dtype: One of `DTYPES`; float32 by default.
        quantization: One of `QUANTIZATIONS`; None leaves the weights as they are stored.

    Raises:
        ModelNotFoundError: A file of the folder is missing.
        SegmentFormatError: A file of the folder is damaged.
        UnsupportedModelError: Its K/V cannot be edited; the reason is named.
        EngineError: The memory does not hold it, or a package that it needs is not there.
    """
    model, tokenizer = models.load_model_and_tokenizer(resolved, dtype=dtype)
    said = stored_quantization(model) if quantization is None else quantize(model, quantization)
    adapter = "" if resolved.adapter is None else adapter_digest(resolved.adapter)
    digest = weights_digest(resolved.path)
    return LoadedEngine(HFEngine(model, digest, adapter=adapter, quantization=said), tokenizer)

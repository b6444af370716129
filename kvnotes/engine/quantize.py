"""Weights in fewer bits, by torchao: K/V stay in the model's dtype.

Weights alone are quantized, so a pass computes the same whatever stands beside a token, and
moves stay exact; the gate proves it like on any model. Who was quantized otherwise is
another model: its K/V fit nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

from kvnotes.errors import EngineError, nearest

QUANTIZATIONS = ("int8", "int4", "float8")
"""What `quantize` takes; all of weights alone."""

INT4_GROUP = 32
"""Weights of one row that share a scale in 4 bits."""


def quantize(model: Any, name: str) -> str:
    """Quantize the linear layers of a model in place.

    Args:
        model: A transformers model.
        name: One of `QUANTIZATIONS`.

    Returns:
        What its identity says of it.

    Raises:
        EngineError: No such quantization, torchao is not installed or refuses the model.
    """
    if name not in QUANTIZATIONS:
        raise EngineError(f"no quantization {name!r}", hint=nearest(name, QUANTIZATIONS))
    stored = stored_quantization(model)
    if stored:
        raise EngineError(
            f"the weights are quantized already ({stored})", hint="load the model as it is"
        )
    try:
        from torchao.quantization import quantize_
    except ImportError as error:
        raise EngineError(
            "weights are quantized by torchao, which is not installed",
            hint='pip install "kvnotes[quantize]"',
        ) from error
    try:
        quantize_(model, _config(name))
    except Exception as error:  # third-party code: whatever it is, the model is not quantized
        raise EngineError(
            f"torchao cannot quantize this model to {name}: {error}",
            hint="use another quantization, or none",
        ) from error
    group = f" group {INT4_GROUP}" if name == "int4" else ""
    return f"torchao {version('torchao')} {name}{group}"


def stored_quantization(model: Any) -> str:
    """Return what the identity of a model says of weights that were stored quantized."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return ""
    facts = config if isinstance(config, dict) else config.to_dict()
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{facts.get('quant_method', 'unknown')}:{hashlib.sha256(text.encode()).hexdigest()}"


def _config(name: str) -> Any:
    import torch
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup

    if name == "int4":
        dtype = getattr(torch, "int4")  # noqa: B009  # torch's stubs lack it
        return ao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(INT4_GROUP))
    makers = {"int8": ao.Int8WeightOnlyConfig, "float8": ao.Float8WeightOnlyConfig}
    return makers[name]()

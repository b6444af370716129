"""What a model caches, and who it is.

Owns `ModelSpec` and `ModelIdentity`: shapes, layer kinds, the rotary embedding, and the
fingerprint that says whether K/V of one model may enter another. Sees no weights, only
their digest; engines fill it in.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

from kvnotes.errors import SpecMismatchError

LayerKind = Literal["full", "sliding", "latent", "none"]
Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary position embedding.

    Args:
        kind: The scaling as models name it: default, linear, llama3, yarn ...
        rotary_dim: How many leading dimensions of a key are rotated.
        pairing: Which dimensions form a pair: (i, i + rotary_dim/2) or (2i, 2i + 1).
        table_digest: SHA-256 of the inverse frequencies in float32.
        attention_factor: What cosines and sines are multiplied by (YaRN).
    """

    kind: str
    rotary_dim: int
    pairing: Pairing
    table_digest: str
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps per token."""

    kind: LayerKind
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder's cache and how its positions work.

    Args:
        model_type: The architecture's name.
        layers: One entry per layer.
        num_attention_heads: Query heads.
        hidden_size: Width of the residual stream.
        vocab_size: Number of logits.
        max_positions: Longest context, in tokens.
        dtype: Element type of weights and cache, for example `float32`.
        rope: The rotary embedding.
        constants: Numbers and names of the configuration that change what is computed, as
            text: the epsilon of norms, multipliers, the activation.
        num_parameters: Weights outside the embeddings; for cost estimates, no identity.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope: RopeSpec
    constants: tuple[tuple[str, str], ...] = ()
    num_parameters: int = 0

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of K/V that one token takes, at `itemsize` bytes per element."""
        return sum(2 * layer.num_kv_heads * layer.head_dim * itemsize for layer in self.layers)


@dataclass(frozen=True)
class ModelIdentity:
    """Who computed a run of K/V: spec, weights, adapter."""

    spec: ModelSpec
    weights_digest: str
    adapter: str = ""
    quantization: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the K/V, 64 hex digits."""
        text = json.dumps(self._facts(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_dtype(self, dtype: str) -> ModelIdentity:
        """Return the identity of the same model in another dtype."""
        return replace(self, spec=replace(self.spec, dtype=dtype))

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = asdict(self.spec)
        del facts["num_parameters"]
        facts["weights"] = self.weights_digest
        facts["adapter"] = self.adapter
        facts["quantization"] = self.quantization
        return facts

    def check_same(self, other: ModelIdentity, what: str) -> None:
        """Refuse K/V of another model.

        Args:
            other: The identity that `what` was computed with.
            what: Name of the thing, for the message.

        Raises:
            SpecMismatchError: Names the first fields that differ, with both values.
        """
        if other.fingerprint == self.fingerprint:
            return
        mine, theirs = _flat(self._facts()), _flat(other._facts())
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        shown = "; ".join(
            f"{name}: {_short(theirs[name])}, here {_short(mine[name])}"
            for name in differing[:3]
            if name in theirs
        )
        raise SpecMismatchError(
            f"{what} was computed with another model ({shown})",
            hint="compile it again with this model; K/V never fits another model, dtype or rope",
        )


def _flat(facts: object, path: str = "") -> dict[str, str]:
    """Return the leaves of nested facts by path, with the number of items of each list."""
    if isinstance(facts, dict):
        items = [(f"{path}.{name}".lstrip("."), value) for name, value in facts.items()]
    elif isinstance(facts, (list, tuple)):
        items = [(f"{path}[{i}]", value) for i, value in enumerate(facts)]
    else:
        return {path: str(facts)}
    result = {path: str(len(items))} if isinstance(facts, (list, tuple)) else {}
    for name, value in items:
        result.update(_flat(value, name))
    return result


def _short(value: str) -> str:
    return value if len(value) <= 40 else value[:37] + "..."

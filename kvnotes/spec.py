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

LayerKind = Literal["full", "sliding", "chunked", "latent"]
"""What a layer keeps and sees: all tokens; the last `window`; those of its own chunk; all tokens
as one latent vector with a rotated part beside it."""

Pairing = Literal["half", "interleaved"]
TensorName = Literal["keys", "values", "index"]
"""What a layer may cache: keys, values, and the keys of an indexer that chooses tokens. A latent
layer keeps the latent vector as its keys, and the rotated part as its values."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary position embedding.

    Args:
        kind: The scaling as models name it: default, linear, llama3, yarn ...
        rotary_dim: How many dimensions are rotated, from `start` on.
        pairing: Which of them form a pair: (i, i + rotary_dim/2) or (2i, 2i + 1).
        table_digest: SHA-256 of the inverse frequencies in float32.
        attention_factor: What cosines and sines are multiplied by (YaRN).
        start: The first rotated dimension.
        reversed: The angles grow backwards with the position.
    """

    kind: str
    rotary_dim: int
    pairing: Pairing
    table_digest: str
    attention_factor: float = 1.0
    start: int = 0
    reversed: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps per token, and how that moves.

    Args:
        kind: What it sees of earlier tokens.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a key.
        value_dim: Width of a value; None is that of a key.
        index_dim: Width of an indexer's key, 0 where there is none.
        moves: Tensors that carry positions, each with its entry in `ModelSpec.ropes`.
        window: Tokens that a sliding layer sees, the own one included; size of a chunk; tokens
            that an indexer chooses. 0: all.
    """

    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    index_dim: int = 0
    moves: tuple[tuple[TensorName, int], ...] = (("keys", 0),)
    window: int = 0

    def shape(self, name: TensorName, num_tokens: int) -> tuple[int, int, int]:
        """Return the shape of one of its tensors: heads, tokens, width."""
        if name == "index":
            return (1 if self.index_dim else 0, num_tokens, self.index_dim)
        width = self.head_dim if name == "keys" or self.value_dim is None else self.value_dim
        return (self.num_kv_heads, num_tokens, width)

    def rope_of(self, name: TensorName) -> int | None:
        """Return the entry in `ModelSpec.ropes` that moves a tensor; None if it has no position."""
        return dict(self.moves).get(name)


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder's cache and how its positions work.

    Args:
        model_type: The architecture's name.
        layers: One entry per layer that caches something.
        num_attention_heads: Query heads.
        hidden_size: Width of the residual stream.
        vocab_size: Number of logits.
        max_positions: Longest context, in tokens.
        dtype: Element type of weights and cache, for example `float32`.
        ropes: The rotary embeddings that its layers use; none where it has no positions.
        constants: Numbers and names of the configuration that change what is computed, as
            text: the epsilon of norms, multipliers, the activation.
        num_parameters: Weights outside the embeddings; for cost estimates, no identity.
        limit_reason: Why `max_positions` is less than the configuration says; no identity.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    ropes: tuple[RopeSpec, ...]
    constants: tuple[tuple[str, str], ...] = ()
    num_parameters: int = 0
    limit_reason: str = ""

    @property
    def num_layers(self) -> int:
        """Number of layers that cache something."""
        return len(self.layers)

    @property
    def tensor_names(self) -> tuple[TensorName, ...]:
        """Names of what its layers cache."""
        indexed = any(layer.index_dim for layer in self.layers)
        return ("keys", "values", "index") if indexed else ("keys", "values")

    @property
    def chunk_size(self) -> int:
        """Size of the chunks that its layers attend in; 0 where none does."""
        return max((x.window for x in self.layers if x.kind == "chunked"), default=0)

    def nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of K/V that one token takes, at `itemsize` bytes per element."""
        shapes = [layer.shape(name, 1) for layer in self.layers for name in self.tensor_names]
        return itemsize * sum(heads * width for heads, _, width in shapes)


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
        del facts["num_parameters"], facts["limit_reason"]
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

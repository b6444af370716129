"""Cache layers in the shape transformers expects: over our buffers, or for a probe.

Owns which layers of a model cache something, and of what class. Every layer keeps all
tokens: windows and chunks are a matter of masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvnotes.engine.blocks import Reads
from kvnotes.errors import UnsupportedModelError
from kvnotes.segment import Buffer, Tensors
from kvnotes.spec import TensorName

# from transformers 5.20 on
_NOTHING: Any = getattr(cache_utils, "DummyLayer", ())
_INDEXED: Any = getattr(cache_utils, "DynamicIndexedLayer", ())
_STATES: Any = cache_utils.LinearAttentionCacheLayerMixin

NO_WINDOW = 0

Target = tuple[Buffer, slice | Tensor]
"""A buffer, and the slots where a sequence's new tokens go."""


@dataclass(frozen=True, slots=True)
class CachingLayer:
    """One layer of a model that caches something.

    Args:
        window: Tokens it sees; 0 means all.
        chunked: They are those of its own chunk, not the last ones.
        indexed: It caches the keys of an indexer as well.
    """

    window: int
    chunked: bool
    indexed: bool


class CacheForm:
    """What caches of a model are made of.

    Args:
        model: A transformers model.

    Raises:
        UnsupportedModelError: A layer keeps something else than K/V of each token.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        types = getattr(config, "layer_types", None) or ()
        self.layers: list[CachingLayer | None] = []
        for index, layer in enumerate(_own_layers(model)):
            if _NOTHING and isinstance(layer, _NOTHING):
                self.layers.append(None)
                continue
            kind = type(layer)
            window = layer.sliding_window if kind is DynamicSlidingWindowLayer else NO_WINDOW
            named = types[index] if index < len(types) else ""
            chunked = bool(window) and (
                named == "chunked_attention"
                or (not named and getattr(config, "sliding_window", None) is None)
            )
            self.layers.append(CachingLayer(int(window), chunked, kind is _INDEXED))

    def __iter__(self) -> Iterator[CachingLayer]:
        """Iterate over the layers that cache something, in order."""
        return (layer for layer in self.layers if layer is not None)

    def cache(self, layers: Iterable[DynamicLayer]) -> Cache:
        """Return a cache of the layers that keep something; the others get none."""
        given = iter(layers)
        return Cache(layers=[_NOTHING() if own is None else next(given) for own in self.layers])


def _own_layers(model: Any) -> list[Any]:
    """Return the layers of the cache that transformers makes for a model."""
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        raise _unsupported("it keeps its own state instead of per-token K/V")
    try:
        layers: list[Any] = DynamicCache(config=model.config).layers
    except KeyError as error:
        raise _unsupported(f"it brings its own cache layer {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise _unsupported(f"transformers makes no cache for it: {error}") from error
    if not layers:
        raise _unsupported("transformers does not say what its layers cache")
    known = (DynamicLayer, DynamicSlidingWindowLayer, _INDEXED, _NOTHING)
    for index, layer in enumerate(layers):
        if isinstance(layer, _STATES):
            raise _unsupported(
                f"layer {index} keeps a recurrent or convolution state, which holds all earlier "
                "tokens at once"
            )
        if type(layer) not in known:
            raise _unsupported(f"layer {index} keeps {type(layer).__name__}, no per-token K/V")
    return layers


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(reason, hint="use a decoder that caches K/V of each token")


class GrowingLayer(DynamicLayer):
    """Keeps what it is given by concatenation: for probes, and the plain reference."""

    def __init__(self) -> None:
        super().__init__()
        self.index: Tensor | None = None

    def update_indexer(self, index_states: Tensor) -> Tensor:
        """Append the indexer's keys `[1, tokens, width]`; return all of them."""
        held = self.index
        self.index = index_states if held is None else torch.cat([held, index_states], 1)
        return self.index

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention sees, from which one on."""
        return self.num_held + query_length, 0

    @property
    def num_held(self) -> int:
        """Tokens held."""
        held: Tensor | None = self.keys if self.is_initialized else None
        return 0 if held is None or not held.numel() else held.shape[2]

    def fill(self, tensors: dict[TensorName, Tensor]) -> None:
        """Append tokens that were computed elsewhere, each `[kv_heads, tokens, width]`."""
        super().update(tensors["keys"][None], tensors["values"][None])
        if "index" in tensors and tensors["index"].numel():
            self.update_indexer(tensors["index"])

    @property
    def tensors(self) -> dict[TensorName, Tensor]:
        """What it holds, `[kv_heads, tokens, width]`."""
        held: dict[TensorName, Tensor] = {"keys": self.keys[0], "values": self.values[0]}
        if self.index is not None:
            held["index"] = self.index
        return held


class SlotLayer(DynamicLayer):
    """One layer's slots in a buffer: writes where told, returns all slots up to `stop`."""

    def __init__(self, tensors: dict[TensorName, Tensor], slots: slice | Tensor, stop: int) -> None:
        super().__init__()
        self.tensors, self.slots, self.stop = tensors, slots, stop
        self.keys, self.values = tensors["keys"][None], tensors["values"][None]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write keys and values; return those of all slots."""
        keys = self._write("keys", key_states[0])
        return keys[None], self._write("values", value_states[0])[None]

    def update_indexer(self, index_states: Tensor) -> Tensor:
        """Write the indexer's keys; return those of all slots."""
        return self._write("index", index_states)

    def _write(self, name: TensorName, states: Tensor) -> Tensor:
        write(self.tensors[name], self.slots, states)
        return self.tensors[name][:, : self.stop]

    def get_seq_length(self) -> int:
        """Return 0: positions go in by themselves."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention sees, from which one on."""
        return self.stop, 0


class WritingLayer(DynamicLayer):
    """Writes what is new into buffers; attention reads it, and all else, where it stands.

    Args:
        index: Which of the layers that cache something.
        reads: What attention reads in this pass.
        targets: Where each sequence's new tokens go: a buffer, and slots there.
    """

    def __init__(self, index: int, reads: Reads, targets: Sequence[Target]) -> None:
        super().__init__()
        self.index, self.reads, self.targets = index, reads, targets
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write keys and values; return the same."""
        first = 0
        for buffer, slots in self.targets:
            size = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
            for memory, states in ((buffer.keys, key_states), (buffer.values, value_states)):
                write(memory[self.index], slots, states[0, :, first : first + size])
            first += size
        self.reads.written(key_states, self.index)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: positions go in by themselves."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention sees, from which one on."""
        return self.reads.num_keys, 0


class StopForward(Exception):
    """Ends a forward pass after the layers that are wanted."""


class PassingLayer(GrowingLayer):
    """Runs over a prefix without keeping anything, and can end the forward."""

    def __init__(self, tensors: dict[TensorName, Tensor], *, last: bool) -> None:
        super().__init__()
        self.prefix, self.last = tensors, last
        self.fresh: dict[TensorName, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the prefix and what is new behind it."""
        if self.last:
            self.fresh = {"keys": key_states[0], "values": value_states[0]}
            raise StopForward
        return (
            torch.cat([self.prefix["keys"][None], key_states], 2),
            torch.cat([self.prefix["values"][None], value_states], 2),
        )

    def update_indexer(self, index_states: Tensor) -> Tensor:
        """Return the prefix and what is new behind it."""
        return torch.cat([self.prefix["index"], index_states], 1)

    @property
    def num_held(self) -> int:
        """Tokens of the prefix."""
        return self.prefix["keys"].shape[1]


def write(memory: Tensor, slots: slice | Tensor, states: Tensor) -> None:
    """Write `[heads, tokens, width]` to some slots of a layer's memory."""
    if isinstance(slots, slice):
        memory[:, slots] = states
    else:
        memory.index_copy_(1, slots, states)


def slot_layers(tensors: Tensors, slots: slice | Tensor, stop: int) -> list[SlotLayer]:
    """Return one layer for each that caches something."""
    return [SlotLayer(part, slots, stop) for part in by_layer(tensors)]


def by_layer(tensors: Tensors) -> Iterator[dict[TensorName, Tensor]]:
    """Yield the tensors of each layer."""
    names = list(tensors)
    for parts in zip(*tensors.values(), strict=True):
        yield dict(zip(names, parts, strict=True))

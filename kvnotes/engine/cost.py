"""Measure what this machine does, for predicted costs: some 40 ms at load (SmolLM2).

Four samples, each of the very code that a plan runs: a whole pass over a few tokens, which
loading has just made; the first layer over a few and over many tokens; attention over a
cache; a few layers' K/V moved. A matrix product alone would not do: it leaves out what a pass
costs whatever its length (weights read from memory, or unpacked from half precision), which
is most of the time of an edit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvnotes.engine.attention import packed_attention
from kvnotes.plan import CostModel
from kvnotes.rope import Rotary, turn_keys
from kvnotes.spec import ModelSpec

NUM_FEW, NUM_MANY = 16, 128
"""Tokens of the passes over one layer; their difference is what tokens cost. Both have
warm weights, so what a pass costs by itself drops out."""

NUM_QUERIES, NUM_KEYS = 64, 1024
"""Size of the attention sample: a turn over a prompt."""

NUM_MOVED = 1024
"""Tokens of the sample that is moved: more than the second-level cache holds."""

MAX_MOVED_LAYERS = 8
"""Layers that are moved in one call, as a plan moves all: how many numbers a call moves decides
which code does it (`MIN_COMPILED_SIZE` of `rope`)."""

MAX_FIXED_SHARE = 0.875
"""Most of the longer layer pass that counts as fixed cost. A disturbed measurement can
otherwise make tokens free, and then no splice would seem to pay."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What can be timed of a model.

    Args:
        num_tokens: Tokens of a whole pass that has run.
        whole_ms: Its time.
        run_layer: Runs the first layer over a number of tokens.
        layer_share: How much of a whole pass's layers that is.
        tokens_per_pass: Most tokens that the engine computes in one pass.
    """

    num_tokens: int
    whole_ms: float
    run_layer: Callable[[int], None]
    layer_share: float
    tokens_per_pass: int


def measure_cost(
    spec: ModelSpec,
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    passes: Passes,
    *,
    copies: bool,
) -> CostModel:
    """Return the cost model of a model on this machine, at the speed it has now.

    Args:
        spec: The model's shapes.
        rotaries: Its rotary embeddings.
        dtype: Of what it caches.
        passes: What can be timed of it.
        copies: K/V that move are copied; else they are read where they stand, for nothing.
    """
    few = _best_ms(lambda: passes.run_layer(NUM_FEW))
    many = _best_ms(lambda: passes.run_layer(NUM_MANY))
    per_pair = _attention_ms(spec, dtype)
    added = max(many - few, (1 - MAX_FIXED_SHARE) * many) / passes.layer_share
    num_pairs = (NUM_MANY**2 - NUM_FEW**2) / 2
    num_added = NUM_MANY - NUM_FEW
    per_token = max(added - num_pairs * per_pair, added / 2) / num_added
    fixed = passes.whole_ms - passes.num_tokens * per_token
    return CostModel(
        ms_per_token=per_token,
        ms_per_pair=per_pair,
        ms_per_moved_token=_moving_ms(spec, rotaries, dtype) if copies else 0.0,
        ms_per_pass=max(fixed, passes.whole_ms / 2),
        tokens_per_pass=passes.tokens_per_pass,
    )


def _attention_ms(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Time of attention per pair of a query and a key, all layers."""
    layer, heads = spec.layers[0], spec.num_attention_heads
    query = torch.full((1, heads, NUM_QUERIES, layer.head_dim), 0.01, dtype=dtype)
    keys = torch.full((1, layer.num_kv_heads, NUM_KEYS, layer.head_dim), 0.01, dtype=dtype)
    mask = torch.zeros(1, 1, NUM_QUERIES, NUM_KEYS, dtype=dtype)
    module = torch.nn.Module()
    best = _best_ms(lambda: packed_attention(module, query, keys, keys, mask))
    return spec.num_layers * best / (NUM_QUERIES * NUM_KEYS)


def _moving_ms(spec: ModelSpec, rotaries: Sequence[Rotary], dtype: torch.dtype) -> float:
    """Time of moving what is cached of one token, all layers."""
    layer, size = spec.layers[0], min(NUM_MOVED, spec.max_positions // 2)
    num_layers = min(MAX_MOVED_LAYERS, spec.num_layers)
    sources = {
        name: torch.full(layer.shape(name, size), 0.01, dtype=dtype) for name in spec.tensor_names
    }
    targets = {name: torch.empty_like(source) for name, source in sources.items()}
    turns = {
        rope: rotaries[rope].turn(torch.arange(size), torch.arange(size) + 1)
        for _, rope in layer.moves
    }

    def move() -> None:
        for name, source in sources.items():
            rope = layer.rope_of(name)
            if rope is None:
                for _ in range(num_layers):
                    targets[name].copy_(source)
            else:
                layers, outs = [source] * num_layers, [targets[name]] * num_layers
                turn_keys(layers, turns[rope], rotaries[rope].spec, outs)

    return spec.num_layers / num_layers * _best_ms(move) / size


def _best_ms(operation: Callable[[], object], repeats: int = 2) -> float:
    """Return the shortest time, which the least disturbed run has."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        operation()
        times.append((time.perf_counter() - start) * 1e3)
    return max(min(times), 1e-6)

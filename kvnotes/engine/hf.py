"""The embedded engine: a transformers model on this machine.

The only module that calls transformers models and knows their names for caches, masks and
positions. Positions go in as `position_ids`, masks as additive 4-D floats: the one form
that is right for every kernel and every set of computed tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kvnotes.engine.attention import use_packed_attention
from kvnotes.engine.base import Engine, Execution, Executor, SamplingParams, Stopwatch
from kvnotes.engine.cost import Passes, measure_cost
from kvnotes.engine.discover import NUM_PROBE_TOKENS, check_supported, discover
from kvnotes.engine.execute import place, settle, target_buffer
from kvnotes.engine.generate import TokenStream
from kvnotes.errors import EngineError
from kvnotes.plan import Compute, Match, Plan, Run
from kvnotes.segment import Buffer, BufferPool, KVCache, KVSegment
from kvnotes.spec import ModelIdentity, ModelSpec

PREFILL_CHUNK = 512
"""Tokens per forward: activations stay in the cache of the CPU (SmolLM2, 1.5k tokens, one
thread: 4.6 s against 5.0 s at once)."""

NOTE_DEPTH_SHARE = 0.1
"""`note_scores` runs this share of the layers: notes differ from the second layer on, and
the budget of a cheap check leaves no more."""


class _StopForward(Exception):
    """Ends a forward pass after the layers that are wanted."""


class _SlotLayer(DynamicLayer):
    """One layer's slots in a buffer: writes where told, returns all slots up to `stop`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: slice | Tensor, stop: int) -> None:
        super().__init__()
        self.keys, self.values = keys[None], values[None]
        self.slots, self.stop = slots, stop
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if isinstance(self.slots, slice):
            self.keys[:, :, self.slots] = key_states
            self.values[:, :, self.slots] = value_states
        else:
            self.keys.index_copy_(2, self.slots, key_states)
            self.values.index_copy_(2, self.slots, value_states)
        return self.keys[:, :, : self.stop], self.values[:, :, : self.stop]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stop, 0


class _ProbeLayer(DynamicLayer):
    """Runs over a prefix without keeping anything, and can end the forward."""

    def __init__(self, keys: Tensor, values: Tensor, last: bool) -> None:
        super().__init__()
        self.keys, self.values, self.last = keys[None], values[None], last
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if self.last:
            self.values = value_states
            raise _StopForward
        return (
            torch.cat([self.keys, key_states], 2),
            torch.cat([self.values, value_states], 2),
        )


class HFEngine(Engine):
    """Runs plans on a transformers causal language model.

    Args:
        model: The model, in eval mode, on the CPU.
        weights_digest: Digest of its weights (see `weights.weights_digest`).
        adapter: Digest of an adapter on top, if any.
        quantization: How the weights are quantized, if they are.

    Raises:
        UnsupportedModelError: The model has no per-token K/V, or keys that cannot be moved.
    """

    def __init__(
        self, model: Any, weights_digest: str, *, adapter: str = "", quantization: str = ""
    ) -> None:
        self.model = model
        check_supported(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        use_packed_attention(model, self._probe_forward)
        times: list[float] = []

        def timed_forward(ids: list[int], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
            watch = Stopwatch()
            layers = self._probe_forward(ids, positions)
            times.append(watch.elapsed_ms)
            return layers

        spec, self.rotary = discover(model, timed_forward)
        self.identity = ModelIdentity(spec, weights_digest, adapter, quantization)
        passes = Passes(
            NUM_PROBE_TOKENS, min(times), self._run_layer, _layer_share(spec), PREFILL_CHUNK
        )
        self.cost = measure_cost(spec, self.rotary, model.dtype, passes)
        self._pool = BufferPool(spec, model.dtype)
        self._depth = max(1, round(NOTE_DEPTH_SHARE * spec.num_layers))

    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        ids, preamble = tuple(token_ids), tuple(preamble_ids)
        if not ids:
            raise EngineError("nothing to compile: the segment has no tokens", hint="give it text")
        whole = (*preamble, *ids)
        self.check_length(len(whole), "the segment")
        buffer = self._new_buffer(len(whole))
        self._compute(list(range(len(whole))), whole, buffer)
        run = Run(whole).cut(len(preamble), len(whole))
        part = buffer.segment(run, len(preamble), self.identity)
        if not preamble:
            return KVSegment(run, self.identity, part.keys, part.values)
        keys = tuple(layer.clone() for layer in part.keys)
        values = tuple(layer.clone() for layer in part.values)
        return KVSegment(run, self.identity, keys, values, preamble_ids=preamble)

    def execute(
        self,
        plan: Plan,
        *,
        base: KVCache | None = None,
        segments: Iterable[KVSegment] = (),
        consume: bool = False,
        executor: Executor = "fast",
    ) -> Execution:
        watch = Stopwatch()
        sources = self.sources_of(plan, base, segments)
        if executor == "loop":
            buffer, logits = self._run_loop(plan, sources)
        else:
            target = target_buffer(plan, base, sources, consume=consume)
            buffer = target.buffer or self._pool.take(len(plan.token_ids))
            for view in target.missing:
                place(view, sources, buffer, self.rotary)
            positions = [
                position
                for step in plan.steps
                if isinstance(step, Compute)
                for position in range(step.target_start, step.target_stop)
            ]
            logits = self._compute(positions, plan.token_ids, buffer)
        cache = settle(plan, sources, buffer, self.identity)
        return Execution(cache, logits if plan.yields_logits else None, watch.elapsed_ms)

    def generate(
        self, start: Execution, params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> TokenStream:
        num_tokens = start.cache.length + params.max_new_tokens
        self.check_length(num_tokens, "prompt and new tokens")
        return TokenStream(self, start, params, stop_ids)

    def score(self, start: Execution, choices: Sequence[Sequence[int]]) -> tuple[float, ...]:
        if not choices or not all(choices):
            raise EngineError(
                "a choice to score has no tokens", hint="give at least one non-empty choice"
            )
        first = torch.log_softmax(start.last_logits(), -1)
        totals = [float(first[choice[0]]) for choice in choices]
        fed = [(index, i) for index, choice in enumerate(choices) for i in range(len(choice) - 1)]
        if not fed:
            return tuple(totals)
        length = start.cache.length
        self.check_length(length + max(len(c) for c in choices), "prompt and choices")
        owner = torch.tensor([index for index, _ in fed])
        depth = torch.tensor([i for _, i in fed])
        own = (owner[:, None] == owner[None]) & (depth[None] <= depth[:, None])
        visible = torch.cat([torch.ones(len(fed), length, dtype=torch.bool), own], 1)
        buffer = self.writable_buffer(start.cache, length + len(fed))
        logits = self._forward(
            [choices[index][i] for index, i in fed],
            depth + length,
            buffer,
            slice(length, length + len(fed)),
            length + len(fed),
            self._additive(visible),
            logits_to_keep=len(fed),
        )
        logprobs = torch.log_softmax(logits, -1)
        for row, (index, i) in enumerate(fed):
            totals[index] += float(logprobs[row, choices[index][i + 1]])
        return tuple(totals)

    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        start = next((m.num_tokens for m in matches if m.source_start == m.target_start == 0), 0)
        new = list(token_ids[start:])
        if not new:
            return []
        layers = [
            _ProbeLayer(
                cache.buffer.keys[i][:, :start], cache.buffer.values[i][:, :start], i == self._depth
            )
            for i in range(self.spec.num_layers)
        ]
        positions = torch.arange(start, start + len(new))
        mask = self._causal(positions, start + len(new))
        with suppress(_StopForward):
            self._call(new, positions, Cache(layers=layers), mask, 1)
        fresh = layers[self._depth].values[0]
        held = cache.buffer.values[self._depth]
        scores: list[tuple[int, float]] = []
        for match in matches:
            skip = max(0, start - match.target_start)
            low, size = match.target_start + skip, match.num_tokens - skip
            if size <= 0:
                continue
            source = held[:, match.source_start + skip : match.source_start + match.num_tokens]
            gap = (fresh[:, low - start : low - start + size].float() - source.float()).pow(2)
            scores.extend(zip(range(low, low + size), gap.sum((0, 2)).tolist(), strict=True))
        return scores

    @property
    def note_score_share(self) -> float:
        return (self._depth + 1) / self.spec.num_layers

    def masked_forward(
        self,
        token_ids: Sequence[int],
        positions: Int[Tensor, " tokens"],
        visible: Bool[Tensor, "tokens tokens"],
        rows: Sequence[int],
    ) -> Float[Tensor, "rows vocab"]:
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([list(token_ids)]),
                position_ids=positions[None],
                attention_mask=self._additive(visible),
                use_cache=False,
                logits_to_keep=torch.tensor(list(rows)),
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def writable_buffer(self, cache: KVCache, num_tokens: int) -> Buffer:
        """Return a buffer that holds `cache` and may be written from its end on."""
        buffer = cache.buffer
        if buffer.capacity >= num_tokens and buffer.writable(cache.length):
            return buffer
        copy = self._pool.take(num_tokens)
        for i in range(self.spec.num_layers):
            copy.keys[i][:, : cache.length] = buffer.keys[i][:, : cache.length]
            copy.values[i][:, : cache.length] = buffer.values[i][:, : cache.length]
        return copy

    def step(self, token_id: int, position: int, buffer: Buffer) -> Float[Tensor, " vocab"]:
        """Compute one token at the end of a buffer and return the logits after it."""
        return self._compute([position], {position: token_id}, buffer)

    def _compute(self, positions: list[int], ids: Any, buffer: Buffer) -> Tensor:
        """Compute tokens at slots = positions, in order, chunk by chunk; return last logits."""
        logits = torch.empty(0)
        for first in range(0, len(positions), PREFILL_CHUNK):
            chunk = positions[first : first + PREFILL_CHUNK]
            start, stop = chunk[0], chunk[-1] + 1
            places = torch.tensor(chunk)
            dense = stop - start == len(chunk)
            slots: slice | Tensor = slice(start, stop) if dense else places
            mask = None if dense and start == 0 else self._causal(places, stop)
            logits = self._forward([ids[p] for p in chunk], places, buffer, slots, stop, mask)[-1]
        return logits

    def _forward(
        self,
        ids: list[int],
        positions: Tensor,
        buffer: Buffer,
        slots: slice | Tensor,
        stop: int,
        mask: Tensor | None,
        *,
        logits_to_keep: int = 1,
    ) -> Tensor:
        layers = [
            _SlotLayer(k, v, slots, stop) for k, v in zip(buffer.keys, buffer.values, strict=True)
        ]
        return self._call(ids, positions, Cache(layers=layers), mask, logits_to_keep)

    def _call(
        self, ids: list[int], positions: Tensor, cache: Cache, mask: Tensor | None, keep: int
    ) -> Tensor:
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: cache},
            )
        logits: Tensor = output.logits[0].float()
        return logits

    def _probe_forward(self, ids: list[int], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        layers = [DynamicLayer() for _ in range(self.model.config.num_hidden_layers)]
        mask = self._causal(torch.arange(len(ids)), len(ids))
        self._call(ids, positions, Cache(layers=layers), mask, 1)
        return [(layer.keys[0], layer.values[0]) for layer in layers]

    def _run_layer(self, num_tokens: int) -> None:
        """Run the first layer, and the second up to its keys, over some tokens."""
        layers = [
            _ProbeLayer(
                torch.empty(layer.num_kv_heads, 0, layer.head_dim, dtype=self.model.dtype),
                torch.empty(layer.num_kv_heads, 0, layer.head_dim, dtype=self.model.dtype),
                i == 1,
            )
            for i, layer in enumerate(self.spec.layers)
        ]
        ids = [i % self.spec.vocab_size for i in range(num_tokens)]
        positions = torch.arange(num_tokens)
        with suppress(_StopForward):
            self._call(ids, positions, Cache(layers=layers), self._causal(positions, num_tokens), 1)

    def _run_loop(self, plan: Plan, sources: list[KVSegment]) -> tuple[Buffer, Tensor]:
        """The plain reference: steps left to right, one cache that grows by concatenation."""
        layers = [DynamicLayer() for _ in range(self.spec.num_layers)]
        cache = Cache(layers=layers)
        logits = torch.empty(0)
        for step in plan.steps:
            if isinstance(step, Compute):
                positions = torch.arange(step.target_start, step.target_stop)
                mask = self._causal(positions, step.target_stop)
                logits = self._call(list(step.token_ids), positions, cache, mask, 1)[-1]
                continue
            piece = self._new_buffer(step.num_tokens)
            place(step, sources, piece, self.rotary, slot=0)
            for i, layer in enumerate(layers):
                layer.update(piece.keys[i][None], piece.values[i][None])
        buffer = self._new_buffer(len(plan.token_ids))
        for i, layer in enumerate(layers):
            buffer.keys[i].copy_(layer.keys[0])
            buffer.values[i].copy_(layer.values[0])
        return buffer, logits

    def _new_buffer(self, num_tokens: int) -> Buffer:
        return Buffer.allocate(self.spec, num_tokens, self.model.dtype)

    def _causal(self, positions: Tensor, num_keys: int) -> Tensor:
        return self._additive(torch.arange(num_keys)[None] <= positions[:, None])

    def _additive(self, visible: Tensor) -> Tensor:
        """Additive mask [1, 1, queries, keys] in the model's dtype, from a boolean one."""
        lowest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(visible.shape, dtype=self.model.dtype)
        return mask.masked_fill_(~visible, lowest)[None, None]


def _layer_share(spec: ModelSpec) -> float:
    """How much of all layers the first one is, with the next one's queries, keys and values."""
    if spec.num_layers == 1:
        return 1.0
    layer = spec.layers[1]
    num_columns = (spec.num_attention_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return 1 / spec.num_layers + spec.hidden_size * num_columns / max(1, spec.num_parameters)

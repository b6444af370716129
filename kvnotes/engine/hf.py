"""The embedded engine: a transformers model on this machine.

The only module that calls transformers models and knows their names for caches, masks and
positions. Positions go in as `position_ids`; masks are the model's own, made for our
positions (see `masks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvnotes.engine.attention import use_packed_attention
from kvnotes.engine.base import Engine, Execution, Executor, SamplingParams, Stopwatch
from kvnotes.engine.cost import Passes, measure_cost
from kvnotes.engine.discover import NUM_PROBE_TOKENS, Held, check_supported, discover
from kvnotes.engine.execute import place, settle, target_buffer
from kvnotes.engine.generate import TokenStream
from kvnotes.engine.images import Images, has_images
from kvnotes.engine.masks import Visibility, seeing
from kvnotes.engine.places import Places
from kvnotes.engine.slots import (
    GrowingLayer,
    PassingLayer,
    StopForward,
    by_layer,
    slot_layers,
)
from kvnotes.errors import EngineError, UnsupportedModelError
from kvnotes.plan import Compute, Match, Plan, Reuse, Run
from kvnotes.segment import Buffer, BufferPool, KVCache, KVSegment, Tensors, empty_tensors
from kvnotes.spec import ModelIdentity, ModelSpec, TensorName

PREFILL_CHUNK = 512
"""Tokens per forward: activations stay in the cache of the CPU (SmolLM2, 1.5k tokens, one
thread: 4.6 s against 5.0 s at once)."""

NOTE_DEPTH_SHARE = 0.1
"""`note_scores` runs this share of the layers: notes differ from the second layer on, and
the budget of a cheap check leaves no more."""


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
        self._images = Images(model) if Images.are_taken_by(model) else None
        self._places = Places(self._images)
        self._form = check_supported(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps_logits = "logits_to_keep" in names
        self._own_attention = model.config._attn_implementation
        use_packed_attention(model, self._form, self._probe_forward)
        times: list[float] = []

        def timed_forward(ids: list[int], positions: Tensor) -> list[Held]:
            watch = Stopwatch()
            layers = self._probe_forward(ids, positions)
            times.append(watch.elapsed_ms)
            return layers

        found = discover(model, self._form, timed_forward)
        spec, self.rotaries = found.spec, found.rotaries
        self.identity = ModelIdentity(spec, weights_digest, adapter, quantization)
        passes = Passes(
            NUM_PROBE_TOKENS, min(times), self._run_layer, _layer_share(spec), PREFILL_CHUNK
        )
        self.cost = measure_cost(spec, self.rotaries, model.dtype, passes)
        self._pool = BufferPool(spec, model.dtype)
        deepest = spec.num_layers - 1
        self._depth = min(max(1, round(NOTE_DEPTH_SHARE * spec.num_layers)), deepest)

    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        ids, preamble = tuple(token_ids), tuple(preamble_ids)
        if not ids:
            raise EngineError("nothing to compile: the segment has no tokens", hint="give it text")
        whole = (*preamble, *ids)
        self.check_length(len(whole), "the segment")
        buffer = self._new_buffer(len(whole))
        self._compute(list(range(len(whole))), whole, buffer, self._places.of(whole))
        run = Run(whole).cut(len(preamble), len(whole))
        part = buffer.part(len(preamble), len(whole))
        if preamble:  # else it is the whole memory
            part = {name: tuple(x.clone() for x in layers) for name, layers in part.items()}
        return KVSegment(run, self.identity, part, preamble_ids=preamble)

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
            axes = self._places.of(plan.token_ids)
            target = target_buffer(
                plan, base, sources, consume=consume, stays=self._places.stays(axes, base)
            )
            buffer = target.buffer or self._pool.take(len(plan.token_ids))
            for view in target.missing:
                place(view, sources, buffer, self.rotaries, turns=self._places.turns(axes))
            positions = [
                position
                for step in plan.steps
                if isinstance(step, Compute)
                for position in range(step.target_start, step.target_stop)
            ]
            logits = self._compute(positions, plan.token_ids, buffer, axes)
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
        allowed = torch.cat([torch.ones(len(fed), length, dtype=torch.bool), own], 1)
        places = depth + length
        next_ = self.place_after(start.cache.token_ids)
        seen = Visibility(
            places,
            torch.cat([torch.arange(length), places]),
            allowed,
            places=None if next_ == length else (depth + next_).expand(3, -1),
        )
        stop = length + len(fed)
        buffer = self.writable_buffer(start.cache, stop)
        layers = slot_layers(buffer.tensors, slice(length, stop), stop)
        ids = [choices[index][i] for index, i in fed]
        logits = self._call(ids, seen, self._form.cache(layers), len(fed))
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
            PassingLayer(part, last=i == self._depth)
            for i, part in enumerate(by_layer(cache.buffer.part(0, start)))
        ]
        positions = torch.arange(start, start + len(new))
        seen = self._seeing(positions, len(token_ids), self._places.of(token_ids))
        with suppress(StopForward):
            self._call(new, seen, self._form.cache(layers), 1)
        # what carries no position: the same token has the same there, wherever it stands
        moves = self.spec.layers[self._depth].rope_of("values") is not None
        name: TensorName = "keys" if moves else "values"
        fresh = layers[self._depth].fresh[name]
        held = cache.buffer.tensors[name][self._depth]
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
        places = positions - positions.min().clamp(max=0)
        if has_images(token_ids) and self._images is not None:
            places = self._images.row_places(token_ids, positions, visible, rows[-1])
        if self.spec.chunk_size:  # what was moved to before the start shared the first chunk
            positions = positions.clamp(min=0)
        seen = Visibility(positions, positions, visible, places=places)
        return self._call(list(token_ids), seen, None, rows)

    def own_forward(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        ours = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._own_attention)
        try:
            with torch.inference_mode():
                keep = {"logits_to_keep": 1} if self._keeps_logits else {}
                output = self.model(input_ids=torch.tensor([list(token_ids)]), **keep)
        finally:
            self.model.set_attn_implementation(ours)
        logits: Tensor = output.logits[0, -1].float()
        return logits

    def writable_buffer(self, cache: KVCache, num_tokens: int) -> Buffer:
        """Return a buffer that holds `cache` and may be written from its end on."""
        buffer = cache.buffer
        if buffer.capacity >= num_tokens and buffer.writable(cache.length):
            return buffer
        copy = self._pool.take(num_tokens)
        _copy(buffer.part(0, cache.length), copy.part(0, cache.length))
        return copy

    def step(self, token_id: int, slot: int, buffer: Buffer, place: int) -> Float[Tensor, " vocab"]:
        """Compute one token at the end of a buffer and return the logits after it."""
        seen = Visibility(
            torch.tensor([slot]),
            torch.arange(slot + 1),
            places=None if place == slot else torch.full((3, 1), place),
        )
        cache = self._form.cache(slot_layers(buffer.tensors, slice(slot, slot + 1), slot + 1))
        return self._call([token_id], seen, cache, 1)[-1]

    def _compute(
        self, new: list[int], ids: Sequence[int], buffer: Buffer, axes: Tensor | None
    ) -> Tensor:
        """Compute tokens of a prompt, in order, chunk by chunk; return the last logits.

        Args:
            new: Which of its tokens.
            ids: The prompt.
            buffer: Where their K/V go, and those of the others stand.
            axes: Positions of the whole prompt, where images stand in it.
        """
        logits = torch.empty(0)
        for first in range(0, len(new), PREFILL_CHUNK):
            chunk = new[first : first + PREFILL_CHUNK]
            start, stop = chunk[0], chunk[-1] + 1
            at = torch.tensor(chunk)
            dense = stop - start == len(chunk)
            seen = self._seeing(at, stop, axes, in_order=dense and start == 0)
            slots: slice | Tensor = slice(start, stop) if dense else at
            cache = self._form.cache(slot_layers(buffer.tensors, slots, stop))
            logits = self._call([ids[slot] for slot in chunk], seen, cache, 1)[-1]
        return logits

    def _call(
        self, ids: list[int], seen: Visibility, cache: Cache | None, keep: int | Sequence[int]
    ) -> Tensor:
        """Run the model over new tokens; return logits of the last ones, or of some rows.

        Without a cache every token is new, and masks are made for all of them.
        """
        options: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        if cache is None:
            # without one transformers takes gaps between positions for packed sequences
            options["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        if self._keeps_logits:
            options["logits_to_keep"] = keep if isinstance(keep, int) else torch.tensor(list(keep))
        if self._images is not None:
            ids, more = self._images.inputs(ids)
            options |= more
        with torch.inference_mode(), seeing(seen):
            output = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=seen.position_ids,
                use_cache=cache is not None,
                **options,
            )
        logits: Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits[-keep:] if isinstance(keep, int) else logits[list(keep)]
        return logits.float()

    def _probe_forward(self, ids: list[int], positions: Tensor) -> list[Held]:
        layers = [GrowingLayer() for _ in self._form]
        seen = Visibility(positions, positions, in_order=True)
        self._call(ids, seen, self._form.cache(layers), 1)
        return [layer.tensors for layer in layers]

    def _run_layer(self, num_tokens: int) -> None:
        """Run the first layer, and the second up to its keys, over some tokens."""
        nothing = empty_tensors(self.spec, 0, self.model.dtype)
        layers = [PassingLayer(part, last=i == 1) for i, part in enumerate(by_layer(nothing))]
        ids = [i % self.spec.vocab_size for i in range(num_tokens)]
        seen = Visibility(torch.arange(num_tokens), torch.arange(num_tokens))
        with suppress(StopForward):
            self._call(ids, seen, self._form.cache(layers), 1)

    def _run_loop(self, plan: Plan, sources: list[KVSegment]) -> tuple[Buffer, Tensor]:
        """The plain reference: steps left to right, one cache that grows by concatenation."""
        layers = [GrowingLayer() for _ in self._form]
        cache = self._form.cache(layers)
        logits, axes = torch.empty(0), self._places.of(plan.token_ids)
        for step in plan.steps:
            if isinstance(step, Compute):
                at = torch.arange(step.target_start, step.target_stop)
                seen = self._seeing(at, step.target_stop, axes)
                logits = self._call(list(step.token_ids), seen, cache, 1)[-1]
                continue
            piece = self._new_buffer(step.num_tokens)
            place(step, sources, piece, self.rotaries, slot=0, turns=self._places.turns(axes))
            for layer, part in zip(layers, by_layer(piece.tensors), strict=True):
                layer.fill(part)
        buffer = self._new_buffer(len(plan.token_ids))
        for layer, part in zip(layers, by_layer(buffer.tensors), strict=True):
            for name, tensor in layer.tensors.items():
                part[name].copy_(tensor)
        return buffer, logits

    # -- positions where images stand ----------------------------------------------------------

    def add_image(
        self, pixels: Float[Tensor, "patches ..."], grid: tuple[int, int, int]
    ) -> tuple[int, ...]:
        if self._images is None and hasattr(getattr(self.model, "model", None), "get_rope_index"):
            raise UnsupportedModelError(
                f"model type {self.spec.model_type!r} takes images, but the installed transformers "
                "cannot give it features that are there already",
                hint="upgrade transformers: pip install 'transformers>=5.24,<5.25'",
            )
        if self._images is None:
            return super().add_image(pixels, grid)
        return self._images.add(pixels, grid)

    def probe_image(self) -> tuple[int, ...] | None:
        return None if self._images is None else self._images.probe()

    def place_after(self, token_ids: Sequence[int]) -> int:
        return self._places.after(token_ids)

    def unmovable(self, plan: Plan) -> tuple[Reuse, ...]:
        """Beside what chunks forbid: what keeps its slots and not its positions."""
        return (*super().unmovable(plan), *self._places.stuck(plan))

    @staticmethod
    def _seeing(
        new: Tensor, stop: int, axes: Tensor | None, *, in_order: bool = False
    ) -> Visibility:
        """Return what new tokens of a prompt see: all slots before their own.

        Args:
            new: Their slots.
            stop: One past the last slot.
            axes: Positions of the whole prompt, where images stand in it.
            in_order: See `Visibility`.
        """
        places = None if axes is None else axes[:, new]
        return Visibility(new, torch.arange(stop), in_order=in_order, places=places)

    def _new_buffer(self, num_tokens: int) -> Buffer:
        return Buffer.allocate(self.spec, num_tokens, self.model.dtype)


def _copy(source: Tensors, target: Tensors) -> None:
    for name, layers in source.items():
        for layer, to_layer in zip(layers, target[name], strict=True):
            to_layer.copy_(layer)


def _layer_share(spec: ModelSpec) -> float:
    """How much of all layers the first one is, with the next one's queries, keys and values."""
    if spec.num_layers == 1:
        return 1.0
    layer = spec.layers[1]
    num_columns = (spec.num_attention_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return 1 / spec.num_layers + spec.hidden_size * num_columns / max(1, spec.num_parameters)

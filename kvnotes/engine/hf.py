"""The embedded engine: a transformers model on this machine.

The only module that calls transformers models and knows their names for caches, masks and
positions. Positions go in as `position_ids`; masks are the model's own, made for our
positions (see `masks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from kvnotes.engine.attention import CHECK_TOLERANCE, AttentionNames, use_packed_attention
from kvnotes.engine.base import (
    Engine,
    Execution,
    Executor,
    Fed,
    Generation,
    SamplingParams,
    Stopwatch,
)
from kvnotes.engine.blocks import Reading, Reads
from kvnotes.engine.cost import Passes, measure_cost
from kvnotes.engine.discover import NUM_PROBE_TOKENS, Held, check_supported, discover
from kvnotes.engine.execute import (
    Arrangement,
    arrange_in_place,
    arrange_over_views,
    place,
    settle,
)
from kvnotes.engine.generate import TokenStream, together
from kvnotes.engine.images import Images, has_images
from kvnotes.engine.masks import Visibility, seeing
from kvnotes.engine.places import Places
from kvnotes.engine.slots import (
    GrowingLayer,
    PassingLayer,
    StopForward,
    Target,
    WritingLayer,
    by_layer,
    slot_layers,
)
from kvnotes.errors import EngineError, UnsupportedModelError
from kvnotes.plan import Compute, Match, Plan, Reuse, Run
from kvnotes.segment import (
    Buffer,
    BufferPool,
    KVCache,
    KVSegment,
    Piece,
    Pieces,
    clip_pieces,
    empty_tensors,
    join_pieces,
)
from kvnotes.spec import ModelIdentity, ModelSpec, TensorName

PREFILL_CHUNK = 512
"""Tokens per forward: activations stay in the cache of the CPU (SmolLM2, 1.5k tokens, one
thread: 4.6 s against 5.0 s at once)."""

NUM_TRIAL_TOKENS = 4
"""Tokens of each of the three stretches by which loading finds out whether a model can read K/V
where they stand."""

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
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps_logits = "logits_to_keep" in names
        self._own_attention = AttentionNames.of(model)
        self.copies_because = ""
        if not use_packed_attention(model, self._form, self._probe_forward):
            self.copies_because = "its attention is its own"
        times: list[float] = []

        def timed_forward(ids: list[int], positions: Tensor) -> list[Held]:
            watch = Stopwatch()
            layers = self._probe_forward(ids, positions)
            times.append(watch.elapsed_ms)
            return layers

        found = discover(model, self._form, timed_forward)
        spec, self.rotaries = found.spec, found.rotaries
        self.identity = ModelIdentity(spec, weights_digest, adapter, quantization)
        self._ropes = tuple(layer.rope_of("keys") for layer in spec.layers)
        self._pool = BufferPool(spec, model.dtype)
        self.copies_because = self._why_it_copies()
        passes = Passes(
            NUM_PROBE_TOKENS, min(times), self._run_layer, _layer_share(spec), PREFILL_CHUNK
        )
        self.cost = measure_cost(
            spec, self.rotaries, model.dtype, passes, copies=bool(self.copies_because)
        )
        deepest = spec.num_layers - 1
        self._depth = min(max(1, round(NOTE_DEPTH_SHARE * spec.num_layers)), deepest)

    def _why_it_copies(self) -> str:
        """Return why K/V cannot be read where they stand; "" if a trial shows that they can.

        A segment between other tokens is read in a pass, and copied there by the reference.
        """
        if self.copies_because:
            return self.copies_because
        if any(layer.kind == "latent" for layer in self.spec.layers):
            return "its layers make keys from a latent vector"
        size = NUM_TRIAL_TOKENS
        ids = tuple(i % self.spec.vocab_size for i in range(3 * size))
        first, middle, last = ids[:size], ids[size : 2 * size], ids[2 * size :]
        self.copies_because = "this is being tried"
        moves = not self.spec.chunk_size or 2 * size <= self.spec.chunk_size
        segment = self.compile(middle, () if moves else first)
        view = segment.run.whole(size)
        plan = Plan(ids, (Compute(0, first), view, Compute(2 * size, last)))
        copied = self.execute(plan, segments=[segment]).last_logits()
        buffer = self._new_buffer(2 * size)
        ends = Piece(buffer, 0, 0, size), Piece(buffer, size, 2 * size, size)
        arrangement = Arrangement(buffer, ((ends[0],), (segment.piece(view),), (ends[1],)), ())
        self.copies_because = ""
        try:
            new = _New.of(plan, arrangement)
            read = self._compute(ids, new, arrangement.all_pieces, None)
        except Exception as error:  # third-party code: whatever it is, it cannot read so
            said = getattr(error, "message", f"{type(error).__name__}: {error}")
            return f"its attention does not read what it is told to: {said}"
        gap = float((read - copied).abs().max() / copied.abs().max())
        if not gap <= CHECK_TOLERANCE[self.model.dtype]:
            return f"what it reads where it stands is off by {gap:.0e}"
        return ""

    def compile(self, token_ids: Sequence[int], preamble_ids: Sequence[int] = ()) -> KVSegment:
        ids, preamble = tuple(token_ids), tuple(preamble_ids)
        if not ids:
            raise EngineError("nothing to compile: the segment has no tokens", hint="give it text")
        whole = (*preamble, *ids)
        self.check_length(len(whole), "the segment")
        buffer = self._new_buffer(len(whole))
        piece = Piece(buffer, 0, 0, len(whole))
        new = _New(list(range(len(whole))), list(range(len(whole))), buffer)
        self._compute(whole, new, (piece,), self._places.of(whole))
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
        reserve: int = 0,
        executor: Executor = "fast",
    ) -> Execution:
        watch = Stopwatch()
        sources = self.sources_of(plan, base, segments)
        axes = self._places.of(plan.token_ids)
        turns = self._places.turns(axes)
        over_views = executor in ("fast", "view") and not self.copies_because
        arrangement = None
        if over_views:
            arrangement = arrange_over_views(
                plan,
                base,
                sources,
                self._pool.take,
                consume=consume,
                reserve=reserve,
                turns=turns,
                always=executor == "view",
            )
        if arrangement is None:
            arrangement = arrange_in_place(
                plan,
                base if executor != "loop" else None,
                sources,
                self._pool.take,
                consume=consume,
                reserve=reserve,
                stays=self._places.stays(axes, base),
            )
        if executor == "loop":
            logits = self._run_loop(plan, sources, arrangement.buffer)
        else:
            for view, slot in arrangement.copies:
                place(view, sources, arrangement.buffer, self.rotaries, slot=slot, turns=turns)
            new = _New.of(plan, arrangement)
            pieces = arrangement.all_pieces
            logits = self._compute(plan.token_ids, new, pieces, axes, over_views=over_views)
        cache = settle(plan, sources, arrangement, self.identity)
        return Execution(cache, logits if plan.yields_logits else None, watch.elapsed_ms)

    def generate(
        self, start: Execution, params: SamplingParams, stop_ids: frozenset[int] = frozenset()
    ) -> TokenStream:
        num_tokens = start.cache.length + params.max_new_tokens
        self.check_length(num_tokens, "prompt and new tokens")
        return TokenStream(self, start, params, stop_ids)

    def together(self, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
        streams = [stream for stream in generations if isinstance(stream, TokenStream)]
        if len(streams) != len(generations) or any(s.engine is not self for s in streams):
            raise EngineError(
                "a reply that is to be generated with others is of another engine",
                hint="generate together what one loaded model generates",
            )
        return together(streams)

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
        ids = [choices[index][i] for index, i in fed]
        logits = self._call_behind(start.cache, ids, depth, own)
        logprobs = torch.log_softmax(logits, -1)
        for row, (index, i) in enumerate(fed):
            totals[index] += float(logprobs[row, choices[index][i + 1]])
        return tuple(totals)

    def _call_behind(self, cache: KVCache, ids: list[int], depth: Tensor, own: Tensor) -> Tensor:
        """Return logits after tokens that stand behind a cache side by side.

        Args:
            cache: The cache.
            ids: The tokens.
            depth: How many tokens behind the cache each of them stands.
            own: Which of them each of them sees.
        """
        cache = self.room_for(cache, len(ids))
        length, end, buffer = cache.length, cache.end, cache.buffer
        queries, next_ = depth + length, self.place_after(cache.token_ids)
        places = None if next_ == length else (depth + next_).expand(3, -1)
        slots = slice(end, end + len(ids))
        if self.copies_because:
            keys = torch.cat([torch.arange(length), queries])
            allowed = torch.cat([own.new_ones(len(ids), length), own], 1)
            seen = Visibility(queries, keys, allowed, places=places)
            layers = slot_layers(buffer.tensors, slots, end + len(ids))
            return self._call(ids, seen, self._form.cache(layers), len(ids))
        new = [Piece(buffer, end + i, p, 1) for i, p in enumerate(queries.tolist())]
        reading = Reading(queries, (*cache.pieces, *new), own)
        return self._call_reading(ids, [reading], [(buffer, slots)], places, len(ids))

    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        start = next((m.num_tokens for m in matches if m.source_start == m.target_start == 0), 0)
        new = list(token_ids[start:])
        if not new:
            return []
        memory = self.gathered(cache).buffer
        layers = [
            PassingLayer(part, last=i == self._depth)
            for i, part in enumerate(by_layer(memory.part(0, start)))
        ]
        positions = torch.arange(start, start + len(new))
        seen = self._seeing(positions, len(token_ids), self._places.of(token_ids))
        with suppress(StopForward):
            self._call(new, seen, self._form.cache(layers), 1)
        # what carries no position: the same token has the same there, wherever it stands
        moves = self.spec.layers[self._depth].rope_of("values") is not None
        name: TensorName = "keys" if moves else "values"
        fresh = layers[self._depth].fresh[name]
        held = memory.tensors[name][self._depth]
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
        chunk, first = self.spec.chunk_size, int(positions.min().clamp(max=0))
        if chunk and first % chunk == 0:  # moved by whole chunks: so is everything else then
            positions = positions - first
        elif chunk:  # what was moved to before the start shared the first chunk
            positions = positions.clamp(min=0)
        seen = Visibility(positions, positions, visible, places=places)
        return self._call(list(token_ids), seen, None, rows)

    def own_forward(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        with self.own_attention(), torch.inference_mode():
            keep = {"logits_to_keep": 1} if self._keeps_logits else {}
            output = self.model(input_ids=torch.tensor([list(token_ids)]), **keep)
        logits: Tensor = output.logits[0, -1].float()
        return logits

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Have the model use its own attention: it is then as transformers loads it."""
        ours = AttentionNames.of(self.model)
        self._own_attention.set()
        try:
            yield
        finally:
            ours.set()

    def room_for(self, cache: KVCache, num_tokens: int) -> KVCache:
        buffer, end = cache.buffer, cache.end
        usable = not self.copies_because or cache.in_place
        if usable and buffer.capacity - end >= num_tokens and buffer.writable(end):
            return cache
        plan = Plan(cache.token_ids, cache.layout, "room", base=cache.layout)
        return self.execute(plan, base=cache, reserve=num_tokens).cache

    def gathered(self, cache: KVCache) -> KVCache:
        if cache.in_place:
            return cache
        plan = Plan(cache.token_ids, cache.layout, "gather", base=cache.layout)
        return self.execute(plan, base=cache, executor="copy").cache

    def step(self, rows: Sequence[Fed]) -> Float[Tensor, "rows vocab"]:
        if self.copies_because:
            return torch.cat([self._step_in_place(row) for row in rows])
        readings, targets = [], []
        for row in rows:
            cache, slot = row.cache, row.cache.end + row.num_fed
            new = Piece(cache.buffer, cache.end, cache.length, row.num_fed + 1)
            at = torch.tensor([cache.length + row.num_fed])
            readings.append(Reading(at, join_pieces((*cache.pieces, new))))
            targets.append((cache.buffer, slice(slot, slot + 1)))
        axes = None
        if any(row.place != row.cache.length + row.num_fed for row in rows):
            axes = torch.tensor([row.place for row in rows]).expand(3, -1)
        ids = [row.token_id for row in rows]
        return self._call_reading(ids, readings, targets, axes, len(ids))

    def _step_in_place(self, row: Fed) -> Tensor:
        slot, buffer = row.cache.length + row.num_fed, row.cache.buffer
        seen = Visibility(
            torch.tensor([slot]),
            torch.arange(slot + 1),
            places=None if row.place == slot else torch.full((3, 1), row.place),
        )
        cache = self._form.cache(slot_layers(buffer.tensors, slice(slot, slot + 1), slot + 1))
        return self._call([row.token_id], seen, cache, 1)

    def _compute(
        self,
        ids: Sequence[int],
        new: _New,
        pieces: Pieces,
        axes: Tensor | None,
        *,
        over_views: bool = True,
    ) -> Tensor:
        """Compute tokens of a prompt, in order, chunk by chunk; return the last logits.

        Args:
            ids: The prompt.
            new: Which of its tokens, and where they go.
            pieces: Where all of its tokens stand.
            axes: Positions of the whole prompt, where images stand in it.
            over_views: Read the others where they stand; else they are in place.
        """
        logits = torch.empty(0)
        for first in range(0, len(new.positions), PREFILL_CHUNK):
            chunk = new.positions[first : first + PREFILL_CHUNK]
            at, stop = torch.tensor(chunk), chunk[-1] + 1
            slots = _as_slice(new.slots[first : first + PREFILL_CHUNK])
            tokens = [ids[position] for position in chunk]
            if over_views and not self.copies_because:
                reading = Reading(at, clip_pieces(pieces, 0, stop))
                places = None if axes is None else axes[:, at]
                targets = [(new.buffer, slots)]
                logits = self._call_reading(tokens, [reading], targets, places, 1)[-1]
                continue
            in_order = chunk[0] == 0 and stop == len(chunk)
            seen = self._seeing(at, stop, axes, in_order=in_order)
            cache = self._form.cache(slot_layers(new.buffer.tensors, slots, stop))
            logits = self._call(tokens, seen, cache, 1)[-1]
        return logits

    def _call_reading(
        self,
        ids: list[int],
        readings: Sequence[Reading],
        targets: Sequence[Target],
        places: Tensor | None,
        keep: int,
    ) -> Tensor:
        """Run the model over new tokens of some sequences, reading the others where they stand.

        Args:
            ids: The new tokens, sequence after sequence.
            readings: What those of each sequence may see.
            targets: Where their K/V go.
            places: Their positions, where images stand among them.
            keep: Of how many of the last ones logits are wanted.
        """
        reads = Reads(readings, self.rotaries, self._ropes)
        seen = Visibility(reads.queries, reads.queries, places=places, reads=reads)
        layers = [WritingLayer(i, reads, targets) for i in range(self.spec.num_layers)]
        return self._call(ids, seen, self._form.cache(layers), keep)

    def _call(
        self, ids: list[int], seen: Visibility, cache: Cache | None, keep: int | Sequence[int]
    ) -> Tensor:
        """Run the model over new tokens; return logits of the last ones, or of some rows.

        Without a cache every token is new, and masks are made for all of them.
        """
        options: dict[str, Any] = {} if cache is None else {self.cache_name: cache}
        if cache is None:
            # without one transformers takes gaps between positions for packed sequences
            options["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        if self._keeps_logits:
            if isinstance(keep, int) and seen.reads is not None:
                # as a number it lets some models leave out queries, which reads count on
                keep = range(len(ids) - keep, len(ids))
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

    def _run_loop(self, plan: Plan, sources: list[KVSegment], buffer: Buffer) -> Tensor:
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
        target = buffer.part(0, len(plan.token_ids))
        for layer, part in zip(layers, by_layer(target), strict=True):
            for name, tensor in layer.tensors.items():
                part[name].copy_(tensor)
        return logits

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


@dataclass(frozen=True, slots=True)
class _New:
    """Tokens to be computed: their positions, and their slots in a buffer."""

    positions: list[int]
    slots: list[int]
    buffer: Buffer

    @classmethod
    def of(cls, plan: Plan, arrangement: Arrangement) -> _New:
        """Return what a plan computes."""
        made = [
            piece
            for step, pieces in zip(plan.steps, arrangement.pieces, strict=True)
            for piece in pieces
            if isinstance(step, Compute)
        ]
        positions = [position for p in made for position in range(p.start, p.stop)]
        slots = [slot for p in made for slot in range(p.slot, p.slot_stop)]
        return cls(positions, slots, arrangement.buffer)


def _as_slice(slots: list[int]) -> slice | Tensor:
    """Return slots as a slice, if they follow each other."""
    first, stop = slots[0], slots[-1] + 1
    return slice(first, stop) if stop - first == len(slots) else torch.tensor(slots)


def _layer_share(spec: ModelSpec) -> float:
    """How much of all layers the first one is, with the next one's queries, keys and values."""
    if spec.num_layers == 1:
        return 1.0
    layer = spec.layers[1]
    num_columns = (spec.num_attention_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return 1 / spec.num_layers + spec.hidden_size * num_columns / max(1, spec.num_parameters)

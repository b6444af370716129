"""The embedded engine: a transformers model on this machine.

Owns how plans become passes: what stands where, what is computed in which order, what comes
back. The model itself is called by its `runner`; masks are the model's own, made for our
positions (see `masks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvnotes.engine.attention import CHECK_TOLERANCE
from kvnotes.engine.base import (
    Engine,
    Execution,
    Executor,
    Fed,
    Generation,
    SamplingParams,
    Stopwatch,
)
from kvnotes.engine.blocks import Reading
from kvnotes.engine.cost import Passes, measure_cost
from kvnotes.engine.discover import NUM_PROBE_TOKENS, Held, discover
from kvnotes.engine.execute import (
    Arrangement,
    Start,
    arrange_in_place,
    arrange_over_views,
    place,
    settle,
)
from kvnotes.engine.generate import TokenStream, together
from kvnotes.engine.images import Images, has_images
from kvnotes.engine.loop import run_loop
from kvnotes.engine.masks import Visibility, see_before
from kvnotes.engine.notes import NOTE_DEPTH_SHARE, deviations
from kvnotes.engine.places import Places
from kvnotes.engine.runner import ModelRunner
from kvnotes.engine.slots import Target
from kvnotes.errors import EngineError, UnsupportedModelError
from kvnotes.plan import Compute, Match, Plan, Reuse, Run
from kvnotes.segment import (
    Buffer,
    BufferPool,
    KVCache,
    KVSegment,
    Piece,
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
        self._images = Images(model) if Images.are_taken_by(model) else None
        self._places = Places(self._images)
        self.runner = ModelRunner(model, self._images)
        times: list[float] = []

        def timed_probe(ids: list[int], positions: Tensor) -> list[Held]:
            watch = Stopwatch()
            layers = self.runner.probe(ids, positions)
            times.append(watch.elapsed_ms)
            return layers

        found = discover(model, self.runner.form, timed_probe)
        spec, self.rotaries = found.spec, found.rotaries
        self.identity = ModelIdentity(spec, weights_digest, adapter, quantization)
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

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.runner.model

    def _why_it_copies(self) -> str:
        """Return why K/V cannot be read where they stand; "" if a trial shows that they can.

        A segment between other tokens is read in a pass, and copied there by the reference.
        """
        if not self.runner.is_packed:
            return "its attention is its own"
        if any(layer.kind == "latent" for layer in self.spec.layers):
            return "its layers make keys from a latent vector"
        size = NUM_TRIAL_TOKENS
        ids = tuple(i % self.spec.vocab_size for i in range(3 * size))
        first, middle, last = ids[:size], ids[size : 2 * size], ids[2 * size :]
        moves = not self.spec.chunk_size or 2 * size <= self.spec.chunk_size
        self.copies_because = "this is being tried"
        segment = self.compile(middle, () if moves else first)
        plan = Plan(ids, (Compute(0, first), segment.run.whole(size), Compute(2 * size, last)))
        copied = self.execute(plan, segments=[segment]).last_logits()
        self.copies_because = ""
        try:
            read = self.execute(plan, segments=[segment], executor="view").last_logits()
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
        plan = Plan.prefill(whole)
        made = arrange_in_place(plan, Start(self._new_buffer))
        self._compute(plan, made, self._places.of(whole))
        run = Run(whole).cut(len(preamble), len(whole))
        part = made.buffer.part(len(preamble), len(whole))
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
        turns, stays = self._places.turns(axes), self._places.stays(axes, base)
        over_views = executor in ("fast", "view") and not self.copies_because
        owned = None if executor == "loop" else base
        start = Start(self._pool.take, owned, sources, consume, reserve)
        made = None
        if over_views:
            made = arrange_over_views(plan, start, turns=turns, always=executor == "view")
        if made is None:
            made = arrange_in_place(plan, start, stays=stays)
        if executor == "loop":
            logits = run_loop(
                self.runner,
                plan,
                sources,
                made.buffer,
                self._new_buffer,
                self.rotaries,
                axes=axes,
                turns=turns,
            )
        else:
            for view, slot in made.copies:
                place(view, sources, made.buffer, self.rotaries, slot=slot, turns=turns)
            logits = self._compute(plan, made, axes, in_place=not over_views)
        cache = settle(plan, sources, made, self.identity)
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
        queries, next_ = depth + cache.length, self.place_after(cache.token_ids)
        places = None if next_ == cache.length else (depth + next_).expand(3, -1)
        new = [
            Piece(cache.buffer, cache.end + index, position, 1)
            for index, position in enumerate(queries.tolist())
        ]
        reading = Reading(queries, (*cache.pieces, *new), own)
        target = cache.buffer, slice(cache.end, cache.end + len(ids))
        return self._pass(ids, [reading], [target], places, len(ids))

    def note_scores(
        self, cache: KVCache, token_ids: Sequence[int], matches: Sequence[Match]
    ) -> list[tuple[int, float]]:
        start = next((m.num_tokens for m in matches if m.source_start == m.target_start == 0), 0)
        new = list(token_ids[start:])
        if not new:
            return []
        memory = self.gathered(cache).buffer
        positions = torch.arange(start, start + len(new))
        seen = see_before(positions, len(token_ids), self._places.of(token_ids))
        computed = self.runner.first_layers(new, seen, memory.part(0, start), self._depth)
        # what carries no position: the same token has the same there, wherever it stands
        moves = self.spec.layers[self._depth].rope_of("values") is not None
        name: TensorName = "keys" if moves else "values"
        fresh = computed[name]
        return deviations(fresh, memory.tensors[name][self._depth], matches, start)

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
        return self.runner.call(token_ids, seen, None, rows)

    def own_forward(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        return self.runner.own(token_ids)

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
        if self.copies_because and len(rows) > 1:  # nothing is shared
            return torch.cat([self.step([row]) for row in rows])
        readings, targets = [], []
        for row in rows:
            cache, slot = row.cache, row.cache.end + row.num_fed
            new = Piece(cache.buffer, cache.end, cache.length, row.num_fed + 1)
            at = torch.tensor([cache.length + row.num_fed])
            readings.append(Reading(at, join_pieces((*cache.pieces, new))))
            targets.append((cache.buffer, slice(slot, slot + 1)))
        places = None
        if any(row.place != row.cache.length + row.num_fed for row in rows):
            places = torch.tensor([row.place for row in rows]).expand(3, -1)
        return self._pass([row.token_id for row in rows], readings, targets, places, len(rows))

    def _compute(
        self, plan: Plan, made: Arrangement, axes: Tensor | None, *, in_place: bool = False
    ) -> Tensor:
        """Compute the tokens of a plan, in order, chunk by chunk; return the last logits.

        Args:
            plan: The plan.
            made: Where its tokens stand, and where those go.
            axes: Positions of the whole prompt, where images stand in it.
            in_place: Hand everything over in one buffer, also if it could be read.
        """
        computed = [
            (position, piece.slot + position - piece.start)
            for step, pieces in zip(plan.steps, made.pieces, strict=True)
            if isinstance(step, Compute)
            for piece in pieces
            for position in range(piece.start, piece.stop)
        ]
        logits, all_pieces = torch.empty(0), made.all_pieces
        for first in range(0, len(computed), PREFILL_CHUNK):
            positions, slots = zip(*computed[first : first + PREFILL_CHUNK], strict=True)
            at = torch.tensor(positions)
            reading = Reading(at, clip_pieces(all_pieces, 0, positions[-1] + 1))
            tokens = [plan.token_ids[position] for position in positions]
            places = None if axes is None else axes[:, at]
            target = made.buffer, _as_slice(slots)
            logits = self._pass(tokens, [reading], [target], places, 1, in_place=in_place)[-1]
        return logits

    def _pass(
        self,
        ids: Sequence[int],
        readings: Sequence[Reading],
        targets: Sequence[Target],
        places: Tensor | None,
        keep: int,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """Run the model over new tokens, reading others where they stand if it can.

        Args:
            ids: The new tokens, sequence after sequence.
            readings: What those of each sequence may see.
            targets: Where their K/V go.
            places: Their positions, where images stand among them.
            keep: Of how many of the last ones logits are wanted.
            in_place: Everything stands in one buffer, and is to be handed over.
        """
        run = self.runner
        if in_place or self.copies_because:
            (reading,), (target,) = readings, targets
            return run.in_place(ids, reading, target, places=places, keep=keep)
        spec, rotaries = self.spec, self.rotaries
        return run.reading(ids, readings, targets, spec, rotaries, places=places, keep=keep)

    def _run_layer(self, num_tokens: int) -> None:
        """Run the first layer, and the second up to its keys, over some tokens."""
        nothing = empty_tensors(self.spec, 0, self.model.dtype)
        ids = [i % self.spec.vocab_size for i in range(num_tokens)]
        seen = Visibility(torch.arange(num_tokens), torch.arange(num_tokens))
        self.runner.first_layers(ids, seen, nothing, 1)

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

    def _new_buffer(self, num_tokens: int) -> Buffer:
        return Buffer.allocate(self.spec, num_tokens, self.model.dtype)


def _as_slice(slots: Sequence[int]) -> slice | Tensor:
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

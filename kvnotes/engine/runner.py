"""Passes of a transformers model: the only calls of one, with its names for what goes in.

Owns `ModelRunner`: new tokens of some sequences, over K/V that are read where they stand or handed
over in one buffer. Knows no plans.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache

from kvnotes.engine.attention import AttentionNames, use_packed_attention
from kvnotes.engine.blocks import Reading, Reads
from kvnotes.engine.discover import Held, check_supported
from kvnotes.engine.images import Images
from kvnotes.engine.masks import Visibility, seeing
from kvnotes.engine.slots import (
    GrowingLayer,
    PassingLayer,
    StopForward,
    Target,
    WritingLayer,
    by_layer,
    slot_layers,
)
from kvnotes.rope import Rotary
from kvnotes.segment import Tensors, side_by_side
from kvnotes.spec import ModelSpec


class ModelRunner:
    """Runs a transformers causal language model over new tokens.

    Args:
        model: The model, in eval mode, on the CPU.
        images: The images that may stand in prompts; None where it takes none.

    Raises:
        UnsupportedModelError: It keeps something else than K/V of each token.
    """

    def __init__(self, model: Any, images: Images | None) -> None:
        self.model = model
        self.form = check_supported(model)
        self._images = images
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps_logits = "logits_to_keep" in names
        self._own_attention = AttentionNames.of(model)
        self.is_packed = use_packed_attention(model, self.form, self.probe)

    def reading(
        self,
        ids: Sequence[int],
        readings: Sequence[Reading],
        targets: Sequence[Target],
        spec: ModelSpec,
        rotaries: Sequence[Rotary],
        *,
        places: Tensor | None,
        keep: int,
    ) -> Float[Tensor, "rows vocab"]:
        """Compute new tokens of some sequences, whose K/V are read where they stand.

        Args:
            ids: The new tokens, sequence after sequence.
            readings: What those of each sequence may see.
            targets: Where their K/V go.
            spec: The model's shapes.
            rotaries: Its rotary embeddings.
            places: Positions of the new tokens, where images stand among them.
            keep: Of how many of the last ones logits are wanted.
        """
        ropes = [layer.rope_of("keys") for layer in spec.layers]
        reads = Reads(readings, rotaries, ropes)
        seen = Visibility(reads.queries, reads.queries, places=places, reads=reads)
        layers = [WritingLayer(i, reads, targets) for i in range(spec.num_layers)]
        return self.call(ids, seen, self.form.cache(layers), keep)

    def in_place(
        self,
        ids: Sequence[int],
        reading: Reading,
        target: Target,
        *,
        places: Tensor | None,
        keep: int,
    ) -> Float[Tensor, "rows vocab"]:
        """Compute new tokens of one sequence, all of whose K/V are handed over in one buffer.

        Args:
            ids: The new tokens.
            reading: What they may see: it stands in the target's buffer from its first slot on.
            target: That buffer, and the slots where their K/V go.
            places: Positions of the new tokens, where images stand among them.
            keep: Of how many of the last ones logits are wanted.
        """
        (found,) = side_by_side(reading.pieces)
        queries, allowed = reading.queries, None
        keys = torch.cat([torch.arange(piece.start, piece.stop) for piece in found])
        if reading.own is not None:
            before = reading.own.new_ones(len(queries), len(keys) - reading.own.shape[1])
            allowed = torch.cat([before, reading.own], 1)
        in_order = allowed is None and torch.equal(queries, keys)
        seen = Visibility(queries, keys, allowed, in_order=in_order, places=places)
        buffer, slots = target
        layers = slot_layers(buffer.tensors, slots, found[-1].slot_stop)
        return self.call(ids, seen, self.form.cache(layers), keep)

    def call(
        self,
        ids: Sequence[int],
        seen: Visibility,
        cache: Cache | None,
        keep: int | Sequence[int],
    ) -> Float[Tensor, "rows vocab"]:
        """Run the model over new tokens; return logits of the last ones, or of some rows.

        Without a cache every token is new, and masks are made for all of them.
        """
        ids = list(ids)
        options: dict[str, Any] = {} if cache is None else {self.cache_name: cache}
        if cache is None:
            # without one transformers takes gaps between positions for packed sequences
            options["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        if self._keeps_logits:
            if isinstance(keep, int):
                keep = range(len(ids) - keep, len(ids))
            options["logits_to_keep"] = _rows(keep)
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

    def own(self, token_ids: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Return the logits after a prompt as the model alone computes them, by its defaults."""
        with self.own_attention(), torch.inference_mode():
            keep = {"logits_to_keep": _rows([len(token_ids) - 1])} if self._keeps_logits else {}
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

    def probe(self, ids: list[int], positions: Tensor) -> list[Held]:
        """Return what each layer caches of some tokens at some positions."""
        layers = [GrowingLayer() for _ in self.form]
        seen = Visibility(positions, positions, in_order=True)
        self.call(ids, seen, self.form.cache(layers), 1)
        return [layer.tensors for layer in layers]

    def first_layers(
        self, ids: Sequence[int], seen: Visibility, prefix: Tensors, depth: int
    ) -> Held:
        """Run the layers before one over a prefix; return what that one would cache.

        Args:
            ids: New tokens.
            seen: What they may see: the prefix, and each other.
            prefix: K/V of the prefix.
            depth: The layer; of it only keys and values are computed.
        """
        layers = [PassingLayer(part, last=i == depth) for i, part in enumerate(by_layer(prefix))]
        with suppress(StopForward):
            self.call(ids, seen, self.form.cache(layers), 1)
        return layers[depth].fresh if depth < len(layers) else {}


def _rows(rows: Iterable[int]) -> Tensor:
    """Return the rows whose logits are wanted, as models take them.

    A number in their place lets some models leave out queries, which reads count on, and makes of
    the last row a view: PyTorch then copies the whole output matrix (SmolLM2 in bfloat16: 190 ms).
    """
    return torch.tensor(list(rows))

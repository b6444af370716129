"""Token by token: sampling and the stream of generated ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.base import Execution, SamplingParams
from kvnotes.plan import Run
from kvnotes.segment import Buffer, KVCache


@runtime_checkable
class Stepper(Protocol):
    """What a stream needs of its engine."""

    def writable_buffer(self, cache: KVCache, num_tokens: int) -> Buffer:
        """Return a buffer that holds `cache` and may be written from its end on."""

    def place_after(self, token_ids: Sequence[int]) -> int:
        """Return the position of the next token."""

    def step(self, token_id: int, slot: int, buffer: Buffer, place: int) -> Tensor:
        """Compute one token and return the logits after it."""


class Sampler:
    """Chooses tokens from logits; the same seed gives the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = torch.Generator().manual_seed(params.seed)

    def choose(self, logits: Float[Tensor, " vocab"]) -> int:
        """Return one token id."""
        params = self._params
        if params.temperature == 0:
            return int(logits.argmax())
        scaled = logits.double()
        scaled = (scaled - scaled.max()) / params.temperature  # no overflow, however cold
        if params.top_k and params.top_k < scaled.numel():
            lowest = scaled.topk(params.top_k).values[-1]
            scaled[scaled < lowest] = -torch.inf
        probs, order = torch.softmax(scaled, -1).sort(descending=True, stable=True)
        if params.top_p < 1:
            probs[probs.cumsum(0) - probs >= params.top_p] = 0
        return int(order[torch.multinomial(probs, 1, generator=self._random)])


class TokenStream:
    """Generated token ids, one forward each. Iterate it once.

    The last token yielded has not been fed back: the next turn computes it.
    """

    def __init__(
        self,
        engine: Stepper,
        start: Execution,
        params: SamplingParams,
        stop_ids: frozenset[int],
    ) -> None:
        self._engine = engine
        self._start = start
        self._params = params
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._num_fed = 0
        self._buffer = start.cache.buffer

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens yielded so far, the stop token included."""
        return tuple(self._ids)

    def __iter__(self) -> Iterator[int]:
        base, params = self._start.cache, self._params
        logits = self._start.last_logits()
        self._buffer = self._engine.writable_buffer(base, base.length + params.max_new_tokens)
        self._buffer.read_until(self, base.length + params.max_new_tokens)
        sampler, place = Sampler(params), self._engine.place_after(base.token_ids)
        try:
            while True:
                token_id = sampler.choose(logits)
                self._ids.append(token_id)
                yield token_id
                if token_id in self._stop_ids or len(self._ids) >= params.max_new_tokens:
                    return
                logits = self._engine.step(
                    token_id, base.length + self._num_fed, self._buffer, place + self._num_fed
                )
                self._num_fed += 1
        finally:
            self._buffer.read_until(self, base.length + self._num_fed)

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and the tokens fed back so far."""
        base = self._start.cache
        fed = tuple(self._ids[: self._num_fed])
        if not fed:
            return base
        run = Run(fed, base.length, base.canonical_layout)
        segment = self._buffer.segment(run, base.length, base.identity)
        return base.moved_to(self._buffer).appended(segment)

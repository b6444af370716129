"""Token by token: sampling and the stream of generated ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvnotes.engine.base import Execution, Fed, SamplingParams
from kvnotes.plan import Run
from kvnotes.segment import KVCache


@runtime_checkable
class Stepper(Protocol):
    """What a stream needs of its engine."""

    def room_for(self, cache: KVCache, num_tokens: int) -> KVCache:
        """Return the same cache with room for so many tokens behind it."""

    def place_after(self, token_ids: Sequence[int]) -> int:
        """Return the position of the next token."""

    def step(self, rows: Sequence[Fed]) -> Tensor:
        """Compute one token of each sequence; return the logits after them."""


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
    """Generated token ids, one forward each. Iterate it once, alone or with others.

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
        self._cache = start.cache
        self._closed = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens yielded so far, the stop token included."""
        return tuple(self._ids)

    def __iter__(self) -> Iterator[int]:
        for _, token_id in together([self]):
            yield token_id

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and the tokens fed back so far."""
        fed = tuple(self._ids[: self._num_fed])
        if not fed:
            return self._start.cache
        run = Run(fed, self._cache.length, self._cache.canonical_layout)
        return self._cache.appended(run, self._cache.end)

    def close(self) -> None:
        """End it: memory that was kept for further tokens is free again."""
        self._closed = True
        self._cache.buffer.read_until(self, self._cache.end + self._num_fed)

    @property
    def is_open(self) -> bool:
        """Whether another token may come."""
        ended = self._ids and self._ids[-1] in self._stop_ids
        return not (self._closed or ended or len(self._ids) >= self._params.max_new_tokens)

    def begin(self) -> Tensor:
        """Make room for all tokens; return the logits of the first."""
        logits = self._start.last_logits()
        limit = self._params.max_new_tokens
        self._cache = self._engine.room_for(self._start.cache, limit)
        self._cache.buffer.read_until(self, self._cache.end + limit)
        self._sampler = Sampler(self._params)
        self._place = self._engine.place_after(self._cache.token_ids)
        return logits

    def choose(self, logits: Float[Tensor, " vocab"]) -> int:
        """Choose the next token."""
        self._ids.append(self._sampler.choose(logits))
        return self._ids[-1]

    @property
    def fed(self) -> Fed:
        """The last token, to be fed back."""
        return Fed(self._cache, self._num_fed, self._ids[-1], self._place + self._num_fed)

    def has_fed(self) -> None:
        """Say that the last token stands in memory."""
        self._num_fed += 1

    @property
    def engine(self) -> Stepper:
        """What computes it."""
        return self._engine


def together(streams: Sequence[TokenStream]) -> Iterator[tuple[int, int]]:
    """Generate several streams of one engine at once: each pass computes a token of each.

    A stream may be closed while this runs; it then gets no further token.

    Yields:
        Which stream, and its token.
    """
    try:
        rows = {index: stream.begin() for index, stream in enumerate(streams)}
        while rows:
            for index, logits in rows.items():
                if streams[index].is_open:
                    yield index, streams[index].choose(logits)
            still = [index for index in rows if streams[index].is_open]
            if not still:
                return
            logits = streams[still[0]].engine.step([streams[index].fed for index in still])
            for index in still:
                streams[index].has_fed()
            rows = dict(zip(still, logits, strict=True))
    finally:
        for stream in streams:
            stream.close()

"""What transformers does by itself, to be compared with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, StaticCache

from kvnotes.engine.hf import HFEngine
from kvnotes.segment import Tensors


def own_tokenizer(folder: Path) -> Any:
    """Return a model's tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(folder)


class OwnGeneration:
    """Generation by transformers alone, on the model of an engine, with its own attention.

    Args:
        engine: Whose model it is.
        held: K/V of the tokens, each at the slot of its position.
        token_ids: The tokens that are cached.
        num_tokens: How many are generated behind them.
    """

    def __init__(
        self, engine: HFEngine, held: Tensors, token_ids: tuple[int, ...], num_tokens: int
    ) -> None:
        self._engine, self._held, self._ids = engine, held, token_ids
        self._num_tokens = num_tokens

    def static(self) -> float:
        """Return the time per token over a cache of fixed length."""
        model, size = self._engine.model, len(self._ids)
        cache = StaticCache(config=model.config, max_cache_len=size + self._num_tokens)
        self._fill(cache, size)
        token = self._ids[-1]
        with self._engine.runner.own_attention(), torch.inference_mode():
            begun = time.perf_counter()
            for step in range(self._num_tokens):
                output = model(
                    input_ids=torch.tensor([[token]]),
                    position_ids=torch.tensor([[size + step]]),
                    logits_to_keep=1,
                    use_cache=True,
                    **{self._engine.runner.cache_name: cache},
                )
                token = int(output.logits[0, -1].argmax())
            return (time.perf_counter() - begun) * 1e3 / self._num_tokens

    def generate(self) -> float:
        """Return the time per token of `generate()`, as a user calls it."""
        cache = DynamicCache(config=self._engine.model.config)
        self._fill(cache, len(self._ids) - 1)
        clock = _Clock()
        with self._engine.runner.own_attention(), torch.inference_mode():
            self._engine.model.generate(
                torch.tensor([self._ids]),
                attention_mask=torch.ones(1, len(self._ids), dtype=torch.long),
                max_new_tokens=self._num_tokens + 1,
                min_new_tokens=self._num_tokens + 1,
                do_sample=False,
                streamer=clock,
                **{self._engine.runner.cache_name: cache},
            )
        return (clock.times[-1] - clock.times[-1 - self._num_tokens]) * 1e3 / self._num_tokens

    def _fill(self, cache: Any, size: int) -> None:
        pairs = zip(self._held["keys"], self._held["values"], strict=True)
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys[None, :, :size].clone(), values[None, :, :size].clone(), layer)


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: object) -> None:
        """Take a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Take the end."""

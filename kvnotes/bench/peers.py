"""Other ways to use a compiled segment, written again here or taken from their packages.

    naive        keys turned back and forth and joined to the cache, in plain torch
    epic         copied segments whose first k tokens are recomputed (EPIC, LegoLink)
    cacheblend   copied segments, and the share of tokens recomputed whose keys deviate most
    kvboost      the package of that name, as it is used
    llama.cpp    a sequence shifted to its place, by llama-cpp-python

What is written again uses this engine's forward, so that only the method differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvnotes.bench.text import BenchText
from kvnotes.engine.base import Engine, Execution, Executor
from kvnotes.engine.own import own_tokenizer
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.rope import Rotary
from kvnotes.segment import KVCache, KVSegment

CHUNK_TOKENS = 512
"""Tokens of a chunk, where a document is cut into chunks that are compiled alone."""


@dataclass(frozen=True)
class Spliced:
    """A cached header, and segments that follow it.

    Args:
        engine: The engine that has compiled them.
        head: The header's cache.
        segments: Compiled each alone.
    """

    engine: Engine
    head: KVCache
    segments: tuple[KVSegment, ...]

    @classmethod
    def of(
        cls, engine: Engine, text: BenchText, length: int, part_tokens: int | None = None
    ) -> Spliced:
        """Compile the beginning of a text behind its header.

        Args:
            engine: The engine.
            text: Header and text.
            length: How many tokens of the text.
            part_tokens: Tokens of each segment; None makes one of all.
        """
        body, size = text.segment(length), part_tokens or length
        parts = [engine.compile(body[i : i + size]) for i in range(0, length, size)]
        return cls(engine, engine.prefill(text.header).cache, tuple(parts))

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Tokens of the header and all segments."""
        return self.head.token_ids + tuple(i for s in self.segments for i in s.run.token_ids)

    def plan(self, request: Sequence[int], num_seam_tokens: int) -> Plan:
        """Return the plan of a request: everything spliced, the first tokens of each computed."""
        splices, at = [], self.head.length
        for number, segment in enumerate(self.segments):
            splices.append(Splice(f"part {number}", segment.run, 0, segment.num_tokens, at))
            at += segment.num_tokens
        ids = (*self.context_ids, *request)
        ideal = plan_compose(ids, splices, num_seam_tokens=num_seam_tokens)
        matches = [Match(0, 0, self.head.length)]
        return plan_keep(self.head.layout, matches, ideal, strategy="compose")

    def execute(self, plan: Plan, executor: Executor = "fast") -> Execution:
        """Run a plan of it."""
        run = self.engine.execute
        return run(plan, base=self.head, segments=self.segments, executor=executor)

    def joined(self, executor: Executor = "fast") -> Execution:
        """Splice everything, and compute nothing."""
        plan = Plan(self.context_ids, self.plan((0,), 0).steps[:-1], "compose")
        return self.execute(plan, executor)


def naive_splice(spliced: Spliced) -> list[tuple[Tensor, Tensor]]:
    """Turn keys back to position 0 and on to their place, and join them to the cache.

    The straightforward method with torch alone, layer by layer.
    """
    engine = spliced.engine
    held = engine.gathered(spliced.head).buffer.part(0, spliced.head.length)
    result = []
    for layer, spec in enumerate(engine.spec.layers):
        rope = spec.rope_of("keys")
        keys, values = [held["keys"][layer]], [held["values"][layer]]
        at = spliced.head.length
        for segment in spliced.segments:
            own = segment.keys[layer]
            source = torch.arange(segment.num_tokens)
            if rope is not None:
                own = _turned(own, engine.rotaries[rope], source, backwards=True)
                own = _turned(own, engine.rotaries[rope], source + at)
            keys.append(own)
            values.append(segment.values[layer])
            at += segment.num_tokens
        result.append((torch.cat(keys, 1), torch.cat(values, 1)))
    return result


def _turned(keys: Tensor, rotary: Rotary, places: Tensor, *, backwards: bool = False) -> Tensor:
    cos, sin = rotary.table(places)
    sin = -sin if backwards else sin
    first, half = rotary.spec.start, rotary.spec.rotary_dim // 2
    rest = keys[..., first + 2 * half :]
    if rotary.spec.pairing == "half":
        a, b = keys[..., first : first + half], keys[..., first + half : first + 2 * half]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = keys[..., first : first + 2 * half : 2], keys[..., first + 1 : first + 2 * half : 2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([keys[..., :first], turned.to(keys.dtype), rest], -1)


def epic(spliced: Spliced, num_tokens: int, request: Sequence[int]) -> Execution:
    """Copy all segments to their places, and compute the first tokens of each again."""
    return spliced.execute(spliced.plan(request, num_tokens), "copy")


def cacheblend(spliced: Spliced, share: float, request: Sequence[int]) -> tuple[Execution, float]:
    """Copy all segments, and compute the tokens again whose keys deviate most.

    The first tenth of the layers is run over all of them to see which; the last token of what is
    spliced is computed in any case, so that every plan ends alike.

    Returns:
        The result, and the whole time in milliseconds.
    """
    start = time.perf_counter()
    engine, context, first = spliced.engine, spliced.context_ids, spliced.head.length
    cache = spliced.joined("copy").cache
    size = len(context) - first
    scores = engine.note_scores(cache, context, [Match(0, 0, first), Match(first, first, size)])
    count = max(1, round(share * size))
    worst = sorted(sorted(scores, key=lambda item: -item[1])[:count])
    plan = plan_keep(
        cache.layout,
        [Match(0, 0, len(context))],
        Plan.prefill((*context, *request)),
        strategy="selective",
        recompute=tuple(position for position, _ in worst),
    )
    result = engine.execute(plan, base=cache, consume=True, executor="copy")
    return result, (time.perf_counter() - start) * 1e3


class KVBoostPeer:
    """The package kvboost, with the header and the text warmed apart.

    Its chunks lie on a grid from the start of the prompt, and it never turns keys: it has to be
    told where the text will stand. Time is taken until its first token, by our clock.

    Args:
        engine: The engine whose model it runs.
        folder: The model's folder, for its tokenizer.
        header: Tokens of the header: one chunk.
        text: Tokens of the text.

    Raises:
        ImportError: It is not installed.
    """

    def __init__(
        self, engine: Any, folder: Path, header: Sequence[int], text: Sequence[int]
    ) -> None:
        from kvboost import GenerationMode, KVBoost

        self._mode = GenerationMode.CHUNK_KV_REUSE
        self._engine, self._ids = engine, (*header, *text)
        self._boost = KVBoost(
            engine.model,
            own_tokenizer(folder),
            max_cache_bytes=4 * 1024**3,
            chunk_size=len(header),
            max_chunks=4096,
            device="cpu",
            recompute_strategy="selective",
        )
        self._boost._encode = list  # its texts are tokens here
        with engine.runner.own_attention():
            self._boost.warm(list(header))
            self._boost.warm(list(text), position_offset=len(header))

    def run(self, request: Sequence[int]) -> tuple[float, Tensor]:
        """Return the time to the first token, in milliseconds, and its logits."""
        first: list[float] = []
        with self._engine.runner.own_attention():
            start = time.perf_counter()
            result = self._boost.generate(
                [*self._ids, *request],
                max_new_tokens=1,
                mode=self._mode,
                cacheable_prefix_len=0,
                on_token=lambda _: first.append(time.perf_counter()),
            )
        return (first[0] - start) * 1e3, torch.from_numpy(result.first_token_logits).float()

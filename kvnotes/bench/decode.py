"""Time per generated token: over views, in one piece, and by transformers' own caches.

All arms generate the same number of tokens behind the same cached tokens, on the same loaded
model; transformers' arms use its own attention, as it is loaded.
"""

from __future__ import annotations

import time
from typing import Any

from kvnotes.bench.options import BenchOptions, Say
from kvnotes.bench.peers import Spliced
from kvnotes.bench.result import BenchResult, Panel, Table, growths, machine, series
from kvnotes.bench.text import BenchText
from kvnotes.bench.timing import interleaved
from kvnotes.engine.base import Engine, Execution, SamplingParams
from kvnotes.engine.own import OwnGeneration
from kvnotes.fidelity import prefix_hit
from kvnotes.session import Model

NUM_TOKENS = 16
"""Tokens of one run; the first is not timed, it comes from the prompt's own pass."""

ARMS = ("views", "one piece", "StaticCache", "generate()")

NOTE = (
    "ms for each token. views: header and tail in one buffer, the segment where it was compiled. "
    "one piece: the same engine, everything in one buffer. StaticCache: transformers, the cache "
    "as long as it has to be, with the mask that it makes. generate(): transformers, DynamicCache."
)


def run(model: Model, text: BenchText, options: BenchOptions, say: Say) -> BenchResult:
    """Measure every length."""
    engine: Any = model.engine
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        say(f"{length} tokens: prefill")
        rows.append(_measure(engine, text, length, options))
    panel = Panel("decode", "tokens of the segment", "ms per token", series(rows, "segment", ARMS))
    exponents = growths(rows, "segment", ARMS, "segment tokens")
    return BenchResult(
        "decode", machine(model), [Table("time per token", rows, NOTE)], [panel], exponents
    )


def _measure(engine: Any, text: BenchText, length: int, options: BenchOptions) -> dict[str, Any]:
    spliced = Spliced.of(engine, text, length)
    request = text.request(0, options.new_tokens[0])
    views = spliced.execute(spliced.plan(request, 1))
    whole = engine.prefill(spliced.context_ids)
    piece = prefix_hit(engine, whole.cache, (*spliced.context_ids, *request))
    held = engine.gathered(piece.cache).buffer.part(0, piece.cache.length)
    own = OwnGeneration(engine, held, views.cache.token_ids, NUM_TOKENS)
    times = interleaved(
        {
            "views": lambda: _ours(engine, views),
            "one piece": lambda: _ours(engine, piece),
            "StaticCache": own.static,
            "generate()": own.generate,
        },
        options.runs,
    )
    static, dynamic = times["StaticCache"]["median"], times["generate()"]["median"]
    return {
        "segment": length,
        **times,
        "views / StaticCache": round(times["views"]["median"] / static, 3),
        "views / generate()": round(times["views"]["median"] / dynamic, 3),
    }


def _ours(engine: Engine, start: Execution) -> float:
    """Return the time per token of a stream."""
    stream = engine.generate(start, SamplingParams(NUM_TOKENS + 1))
    running = iter(stream)
    next(running)
    begun = time.perf_counter()
    for _ in range(NUM_TOKENS):
        next(running)
    elapsed = time.perf_counter() - begun
    stream.close()
    return elapsed * 1e3 / NUM_TOKENS

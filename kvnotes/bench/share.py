"""Conversations that share a segment: time of a common step, and bytes of K/V."""

from __future__ import annotations

import time
from typing import Any

from kvnotes.bench.options import BenchOptions, Say
from kvnotes.bench.peers import Spliced
from kvnotes.bench.result import BenchResult, Panel, Point, Table, growths, machine, series
from kvnotes.bench.text import BenchText
from kvnotes.bench.timing import Summary, interleaved
from kvnotes.engine.base import Engine, Execution, SamplingParams
from kvnotes.session import Model

NUM_TOKENS = 8
"""Common steps of one run; the first is not timed."""

ARMS = ("together", "one by one")

NOTE = (
    "ms for one token of every conversation, together and one after the other. MB: all K/V that "
    "they hold, buffers whole. added: what the second one adds, as a share of the first."
)


def run(model: Model, text: BenchText, options: BenchOptions, say: Say) -> BenchResult:
    """Measure every length and number of conversations."""
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        say(f"{length} tokens: prefill")
        rows += _measure(model.engine, text, length, options)
    last = [row for row in rows if row["segment"] == options.lengths[-1]]
    title = f"over one segment of {options.lengths[-1]} tokens"
    timed = series(last, "conversations", ARMS)
    held = {"K/V": [Point(r["conversations"], r["MB"], r["MB"], r["MB"]) for r in last]}
    panels = [
        Panel(title, "conversations", "ms for a token of each", timed),
        Panel(title, "conversations", "MB of K/V", held),
    ]
    exponents = growths(last, "conversations", ARMS, "conversations")
    return BenchResult(
        "share", machine(model), [Table("conversations", rows, NOTE)], panels, exponents
    )


def _measure(
    engine: Engine, text: BenchText, length: int, options: BenchOptions
) -> list[dict[str, Any]]:
    spliced = Spliced.of(engine, text, length)
    num_new = options.new_tokens[0]
    starts: list[Execution] = []
    rows: list[dict[str, Any]] = []
    for number in options.sessions:
        while len(starts) < number:
            plan = spliced.plan(text.request(len(starts), num_new), 1)
            starts.append(spliced.execute(plan))
        chosen = starts[:number]

        def together(chosen: list[Execution] = chosen) -> float:
            return _step_ms(engine, chosen)

        def one_by_one(chosen: list[Execution] = chosen) -> float:
            return sum(_step_ms(engine, [start]) for start in chosen)

        times = interleaved({"together": together, "one by one": one_by_one}, options.runs)
        row: dict[str, Any] = {"segment": length, "conversations": number, **times}
        row["MB"] = round(held_nbytes(chosen) / 1e6, 1)
        first = rows[0] if rows else row
        row["MB / one"] = round(row["MB"] / first["MB"], 3)
        if number > 1:
            row["added time"] = _added(row["together"], first["together"], number)
        rows.append(row)
    return rows


def held_nbytes(executions: list[Execution]) -> int:
    """Return the bytes of all memory that caches hold, each counted once."""
    memories = {id(p.memory): p.memory for e in executions for p in e.cache.pieces}
    return sum(memory.nbytes for memory in memories.values())


def _added(all_of_them: Summary, one: Summary, number: int) -> float:
    """Return what each further conversation adds, as a share of the first."""
    return round((all_of_them["median"] / one["median"] - 1) / (number - 1), 3)


def _step_ms(engine: Engine, starts: list[Execution]) -> float:
    """Return the time of a common step."""
    generations = [engine.generate(start, SamplingParams(NUM_TOKENS + 1)) for start in starts]
    steps = engine.together(generations)
    for _ in starts:
        next(steps)
    begun = time.perf_counter()
    for _ in range(NUM_TOKENS * len(starts)):
        next(steps)
    elapsed = time.perf_counter() - begun
    for generation in generations:
        generation.close()
    return elapsed * 1e3 / NUM_TOKENS

"""Time to first token after an edit, by strategy, and after many edits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvnotes.bench.options import BenchOptions, Say
from kvnotes.bench.result import BenchResult, Panel, Table, growths, machine, series
from kvnotes.bench.text import QUESTIONS, BenchText
from kvnotes.bench.timing import interleaved
from kvnotes.fidelity import prefix_hit
from kvnotes.plan import Plan
from kvnotes.session import Model, Session

STRATEGIES = ("erratum", "refresh", "refresh+erratum", "selective", "suffix")

EDITS = (1, 2, 4, 8, 16)
"""Edits one after the other, each with a turn."""

VALUES = ("pending", "shipped", "returned", "cancelled")

NOTE = (
    "A whole session turn with one edit before it: rendering, tokenizing, planning, computing. "
    "The field stands before the text. hit: the engine's exact prefix hit with the new tokens of "
    "the erratum's turn. reprefill: everything is computed."
)


def run(model: Model, text: BenchText, options: BenchOptions, say: Say) -> BenchResult:
    """Measure every length; many edits at the first."""
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        say(f"{length} tokens: prefill")
        rows += _measure(model, text, length, options)
    say(f"{options.lengths[0]} tokens: many edits")
    many = _many(model, text, options)
    arms = ("hit", *STRATEGIES, "reprefill")
    wide = [{"segment": row["segment"], row["strategy"]: row["time"]} for row in rows]
    timed = series(wide, "segment", arms)
    panels = [
        Panel("after one edit", "tokens of the text", "ms", timed, log_x=True, log_y=True),
        Panel("the same field edited again", "edits", "ms", series(many, "edits", ("time",))),
    ]
    exponents = growths(wide, "segment", arms, "text tokens")
    again = [{"edits": row["edits"], "refresh+erratum": row["time"]} for row in many]
    exponents |= growths(again, "edits", ("refresh+erratum",), "number of edits")
    tables = [Table("after one edit", rows, NOTE), Table("many edits", many)]
    return BenchResult("edit", machine(model), tables, panels, exponents)


def _session(model: Model, text: BenchText, length: int) -> Session:
    body = model.tokenizer.decode(text.segment(length))
    return Session(
        model,
        text="order_status: {{status}}\n\n" + body.replace("{{", "{ {") + "\n",
        fields={"status": VALUES[0]},
        splice="never",
    )


def _measure(
    model: Model, text: BenchText, length: int, options: BenchOptions
) -> list[dict[str, Any]]:
    talk = _session(model, text, length)
    talk.decide(["yes", "no"])
    plans: dict[str, Plan] = {}

    def edited(strategy: str) -> float:
        fork = talk.fork()
        fork.edit(status=VALUES[1], strategy=strategy)
        turn = fork.user(QUESTIONS[0], decide=["yes", "no"])
        plans[strategy] = turn.plan
        assert turn.ttft_ms is not None
        return turn.ttft_ms

    edited("erratum")
    engine, ids = model.engine, plans["erratum"].token_ids
    kept = plans["erratum"].tokens
    exact = engine.prefill(ids[: kept.total - kept.computed]).cache
    arms: dict[str, Callable[[], float]] = {
        "hit": lambda: prefix_hit(engine, exact, ids).elapsed_ms,
        **{name: partial(edited, name) for name in STRATEGIES},
    }
    times = interleaved(arms, options.runs)
    if options.full:
        times |= interleaved({"reprefill": lambda: edited("reprefill")}, max(3, options.runs // 2))
    return [
        {
            "segment": length,
            "strategy": name,
            "plan": plans[name].shape if name in plans else "R C",
            "computed": plans[name].tokens.computed if name in plans else len(ids) - exact.length,
            "time": value,
            "time / hit": round(value["median"] / times["hit"]["median"], 3),
        }
        for name, value in times.items()
    ]


def _many(model: Model, text: BenchText, options: BenchOptions) -> list[dict[str, Any]]:
    """Edit the same field again and again; the last turn is timed."""
    arms: dict[str, Callable[[], float]] = {}
    for number in EDITS:
        talk = _session(model, text, options.lengths[0])
        talk.decide(["yes", "no"])
        for index in range(number - 1):
            talk.edit(status=VALUES[(index + 1) % len(VALUES)], strategy="refresh+erratum")
            talk.decide(["yes", "no"])

        def last(talk: Session = talk, number: int = number) -> float:
            fork = talk.fork()
            fork.edit(status=VALUES[number % len(VALUES)], strategy="refresh+erratum")
            turn = fork.decide(["yes", "no"])
            assert turn.ttft_ms is not None
            return turn.ttft_ms

        arms[str(number)] = last
    times = interleaved(arms, options.runs)
    return [{"edits": int(name), "time": value} for name, value in times.items()]

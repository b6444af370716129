"""What `kvnotes bench` measures, on a tiny model: that arms do what they say, not how fast."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import kv_gap
from helpers_session import tiny_model

from kvnotes.bench import compose, decode, edit, share, store
from kvnotes.bench.options import BenchOptions
from kvnotes.bench.peers import CHUNK_TOKENS, Spliced, cacheblend, epic, naive_splice
from kvnotes.bench.result import BenchResult
from kvnotes.bench.text import BenchText, bench_text
from kvnotes.bench.timing import Probe, growth_exponent, interleaved
from kvnotes.errors import PlanError
from kvnotes.fidelity import prefix_hit
from kvnotes.segment import Buffer

OPTIONS = BenchOptions(lengths=(96, 192), new_tokens=(8, 3), runs=2, sessions=(1, 2, 3))
GAP = 1e-5
"""Rounding of keys turned twice in float32, relative to the largest of a layer."""


@pytest.fixture(scope="module")
def text() -> BenchText:
    return bench_text(tiny_model(), [], 1200)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these: nothing here depends on times."""
    monkeypatch.setattr(Probe, "busy", lambda self: False)


def spliced_of(text: BenchText, num_tokens: int = 96) -> Spliced:
    return Spliced.of(tiny_model().engine, text, num_tokens)


def quiet(_: str) -> None:
    pass


# -- text and times ------------------------------------------------------------------------


def test_invented_text_is_as_long_as_is_asked_and_the_same_each_time(text: BenchText) -> None:
    assert len(text.text) >= 1200
    assert bench_text(tiny_model(), [], 1200) == text
    lines = tiny_model().tokenizer.decode(text.text).splitlines()
    assert len(set(lines)) > 0.9 * len(lines)


def test_a_request_has_exactly_so_many_tokens_and_ends_in_its_question(text: BenchText) -> None:
    for size in (1, 8, 60):
        request = text.request(3, size)
        assert len(request) == size
        assert request[-8:] == text.questions[3][-8:][-size:]
    assert text.request(0, 60) != text.request(1, 60)


def test_a_text_that_is_too_short_is_refused() -> None:
    short = bench_text(tiny_model(), ["Just this."], 500)
    with pytest.raises(PlanError, match=r"500 tokens is asked for, the text has \d+"):
        short.segment(500)


def test_an_exponent_is_that_of_the_power_law() -> None:
    assert growth_exponent([(x, 3 * x**1.5) for x in (1, 2, 5, 9)]) == 1.5
    assert growth_exponent([(1, 4.0), (10, 4.0)]) == 0.0
    assert growth_exponent([(1, 4.0)]) is None
    assert growth_exponent([(2, 4.0), (2, 5.0)]) is None


def test_a_block_that_was_disturbed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True, True, False, False, False, False])
    monkeypatch.setattr(Probe, "busy", lambda self: next(answers))
    calls: list[int] = []

    def arm() -> float:
        calls.append(0)
        return float(len(calls))

    times = interleaved({"arm": arm}, 2)
    assert len(calls) == 1 + 4, "a warm-up, two disturbed blocks, two good ones"
    assert times["arm"] == {"median": 4.5, "min": 4.0, "max": 5.0}


# -- methods -------------------------------------------------------------------------------


def test_the_naive_splice_gives_the_k_v_that_a_copy_gives(text: BenchText) -> None:
    engine = tiny_model().engine
    spliced = Spliced.of(engine, text, 1100, CHUNK_TOKENS)
    assert [s.num_tokens for s in spliced.segments] == [512, 512, 76]
    held = spliced.joined("copy").cache.buffer.part(0, len(spliced.context_ids))
    for layer, (keys, values) in enumerate(naive_splice(spliced)):
        assert kv_gap([keys], [held["keys"][layer]]) < GAP
        assert torch.equal(values, held["values"][layer])


def test_epic_computes_the_first_tokens_of_each_chunk_and_equals_our_splice(
    text: BenchText,
) -> None:
    engine = tiny_model().engine
    spliced = Spliced.of(engine, text, 1100, CHUNK_TOKENS)
    request = text.request(0, 8)
    plan = spliced.plan(request, 4)
    assert plan.tokens.computed == 3 * 4 + 8
    copied = epic(spliced, 4, request)
    read = spliced.execute(plan)
    scale = copied.last_logits().abs().max()
    assert (copied.last_logits() - read.last_logits()).abs().max() < GAP * scale
    assert copied.cache.in_place and not read.cache.in_place


def test_cacheblend_computes_its_share_and_all_of_it_is_a_prefill(text: BenchText) -> None:
    engine, spliced, request = tiny_model().engine, spliced_of(text), text.request(0, 8)
    some, _ = cacheblend(spliced, 0.25, request)
    assert sum(view.num_tokens for view in some.cache.layout if view.moved) == 96 - 24
    exact = engine.prefill(spliced.context_ids).cache
    reference = prefix_hit(engine, exact, (*spliced.context_ids, *request)).last_logits()
    whole, _ = cacheblend(spliced, 1.0, request)
    scale = reference.abs().max()
    assert (whole.last_logits() - reference).abs().max() < GAP * scale
    assert (some.last_logits() - reference).abs().max() > GAP * scale


# -- benchmarks ----------------------------------------------------------------------------


def test_compose_measures_every_length_and_says_what_is_not_installed(text: BenchText) -> None:
    small = replace(OPTIONS, peers=True)
    result = compose.run(tiny_model(), text, small, quiet)
    times, alone, parts, methods = result.tables
    assert [(r["segment"], r["new"]) for r in times.rows] == [(96, 8), (96, 3), (192, 8), (192, 3)]
    assert all({"hit", "splice", "copy", "compute"} <= set(r) for r in times.rows)
    assert [r["segment"] for r in alone.rows] == [96, 192]
    assert [r["segments"] for r in parts.rows] == [1, 2, 4, 8]
    by_name = {r["method"]: r for r in methods.rows}
    for seam in compose.SEAMS:
        ours, theirs = by_name[f"splice, chunks, {seam}"], by_name[f"EPIC, {seam}"]
        assert math.isclose(ours["KL mean"], theirs["KL mean"], rel_tol=0.05, abs_tol=1e-9)
        assert ours["recomputed"] == theirs["recomputed"] == seam
    assert by_name["splice, 64"]["KL mean"] < by_name["splice, 0"]["KL mean"]
    assert "Not measured, kvboost" in methods.note and "llama.cpp" in methods.note
    assert result.exponents["splice, by segment tokens"] is not None


def test_shared_memory_is_counted_once(text: BenchText) -> None:
    options = replace(OPTIONS, lengths=(192,))
    rows = share.run(tiny_model(), text, options, quiet).tables[0].rows
    assert [r["conversations"] for r in rows] == [1, 2, 3]
    spliced = spliced_of(text, 192)
    made = [spliced.execute(spliced.plan(text.request(0, 8), 1)) for _ in range(2)]
    memories = {id(p.memory): p.memory for e in made for p in e.cache.pieces}
    assert share.held_nbytes(made) == sum(m.nbytes for m in memories.values())
    assert sum(not isinstance(m, Buffer) for m in memories.values()) == 1


@pytest.mark.parametrize("bench", [decode, edit, store], ids=lambda bench: bench.__name__)
def test_every_benchmark_writes_what_it_measured(
    bench: Any, text: BenchText, tmp_path: Path
) -> None:
    result: BenchResult = bench.run(tiny_model(), text, replace(OPTIONS, full=False), quiet)
    assert all(table.rows for table in result.tables)
    assert {row["segment"] for row in result.tables[0].rows} == {96, 192}
    written = result.write(tmp_path / "new")
    assert [path.suffix for path in written] == [".json", ".png", ".svg"]
    data = json.loads(written[0].read_text())
    assert data["bench"] == result.name and data["machine"]["torch"] == torch.__version__
    assert data["tables"][0]["rows"] == result.tables[0].rows
    assert written[1].read_bytes().startswith(b"\x89PNG") and b"<svg" in written[2].read_bytes()


def test_without_matplotlib_the_numbers_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvnotes.bench.plots", None)
    machine = {"dtype": "float32", "threads": 1}
    assert BenchResult("store", machine, [], []).write(tmp_path) == [
        tmp_path / "store-float32-1t.json"
    ]

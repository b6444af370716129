"""Time to first token of a splice, beside an exact prefix hit, a full prefill and other methods.

The standard point: a cached header, one compiled segment, some new tokens behind it. `hit`
continues an exact cache of all tokens before the new ones: no splice can be faster. `full` is the
engine's prefill, `full, own` transformers' forward at once; the speed of the faster one is stated
beside that of plain matrix products of its shapes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from kvnotes.bench.options import BenchOptions, Say
from kvnotes.bench.peers import (
    CHUNK_TOKENS,
    KVBoostPeer,
    Spliced,
    cacheblend,
    epic,
    naive_splice,
)
from kvnotes.bench.result import BenchResult, Panel, Point, Table, growths, machine, series
from kvnotes.bench.text import BenchText
from kvnotes.bench.timing import Summary, elapsed_ms, interleaved, summary
from kvnotes.engine.base import Engine, Execution
from kvnotes.engine.models import resolve_model
from kvnotes.fidelity import FidelityReport, compare, prefix_hit
from kvnotes.segment import KVCache
from kvnotes.session import Model

SEAMS = (0, 1, 4, 16, 64)
"""Recomputed tokens of the curves."""

SHARES = (0.05, 0.15, 0.3)
"""Recomputed shares of CacheBlend; 0.15 is what it recommends."""

NUM_REQUESTS = 16
"""Requests whose distance from a full prefill is averaged."""

PARTS = (1, 2, 4, 8)
"""Into how many segments the text is cut, for the cost of their number."""

SHORT = 512
"""Up to this length the segment is also computed behind the header: where a splice pays."""


def run(model: Model, text: BenchText, options: BenchOptions, say: Say) -> BenchResult:
    """Measure every length; other methods and the number of segments at the first."""
    engine = model.engine
    rows: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for length in options.lengths:
        say(f"{length} tokens: prefill")
        spliced = Spliced.of(engine, text, length)
        alone.append(_alone(spliced, options))
        rows += _length(text, spliced, options, say)
    first = options.lengths[0]
    tables = [Table("time to first token", rows, NOTE), Table("the splice alone", alone, ALONE)]
    tables.append(Table("number of segments", _parts(engine, text, options, say), PARTS_NOTE))
    say(f"{first} tokens: distance from a full prefill")
    curve = _curve(engine, text, options)
    note = CURVE
    if options.peers:
        say(f"{first} tokens: other methods")
        others, missing = _peers(model, text, options, say)
        curve += others
        note = " ".join([CURVE, *(f"Not measured, {why}." for why in missing)])
    tables.append(Table(f"methods at {first} tokens", curve, note))
    return BenchResult(
        "compose", machine(model), tables, _panels(rows, curve), _exponents(tables, options)
    )


NOTE = (
    "hit: an exact prefix hit with the same new tokens. splice: the segment is read where it was "
    "compiled, one seam token computed. copy: it is copied and moved first. full: cold prefill, by "
    "the engine and by transformers; the faster one counts."
)
ALONE = (
    "What a splice costs before the forward pass. naive: keys turned back and forth and joined to "
    "the cache, in plain torch."
)
PARTS_NOTE = "The same text as one segment and as several, each with a seam token."
CURVE = (
    "Recomputed tokens, time to first token, and KL of the next token from a full prefill (nats), "
    f"over {NUM_REQUESTS} requests. What is cut into chunks of 512 tokens is compiled chunk by "
    "chunk."
)


def _length(
    text: BenchText, spliced: Spliced, options: BenchOptions, say: Say
) -> list[dict[str, Any]]:
    """Measure one length, for each number of new tokens."""
    engine, length = spliced.engine, spliced.segments[0].num_tokens
    exact = engine.prefill(spliced.context_ids).cache
    rows = []
    for num_new in options.new_tokens:
        say(f"{length} tokens + {num_new} new")
        request = text.request(0, num_new)
        ids, plan = (*spliced.context_ids, *request), spliced.plan(request, 1)
        arms: dict[str, Callable[[], float]] = {
            "hit": partial(_ms, prefix_hit, engine, exact, ids),
            "splice": partial(_ms, spliced.execute, plan),
            "copy": partial(_ms, spliced.execute, plan, "copy"),
        }
        if length <= SHORT:
            arms["compute"] = partial(_ms, prefix_hit, engine, spliced.head, ids)
        row: dict[str, Any] = {"segment": length, "new": num_new}
        row |= interleaved(arms, options.runs)
        row["splice / hit"] = _ratio(row["splice"], row["hit"])
        if options.full and num_new == options.new_tokens[0]:
            own = partial(elapsed_ms, partial(engine.own_forward, ids))
            full = {"full": partial(_ms, engine.prefill, ids), "full, own": own}
            row |= interleaved(full, max(3, options.runs // 2))
            fastest = min(row["full"], row["full, own"], key=itemgetter("median"))
            row["full / splice"] = _ratio(fastest, row["splice"])
            row["GFLOP/s"] = round(_prefill_flops(engine, len(ids)) / fastest["median"] / 1e6)
            row["of matmul"] = round(_matmul_gflops(engine))
        rows.append(row)
    return rows


def _alone(spliced: Spliced, options: BenchOptions) -> dict[str, Any]:
    """Measure what a splice costs without any forward pass."""
    times = interleaved(
        {
            "read in place": partial(_ms, spliced.joined),
            "copied": partial(_ms, spliced.joined, "copy"),
            "naive": partial(elapsed_ms, partial(naive_splice, spliced)),
        },
        options.runs,
    )
    ratio = _ratio(times["naive"], times["read in place"])
    return {"segment": len(spliced.segments[0].run), **times, "naive / read in place": ratio}


def _parts(
    engine: Engine, text: BenchText, options: BenchOptions, say: Say
) -> list[dict[str, Any]]:
    """Measure the same text in several segments."""
    length, request = options.lengths[0], text.request(0, options.new_tokens[0])
    arms: dict[str, Callable[[], float]] = {}
    for number in PARTS:
        say(f"{length} tokens in {number} segments")
        spliced = Spliced.of(engine, text, length, -(-length // number))
        arms[str(number)] = partial(_ms, spliced.execute, spliced.plan(request, 1))
    times = interleaved(arms, options.runs)
    return [{"segments": int(name), "splice": value} for name, value in times.items()]


class _Judge:
    """Times methods, and compares what they give with an exact prefix hit, request by request."""

    def __init__(
        self, engine: Engine, exact: KVCache, text: BenchText, options: BenchOptions
    ) -> None:
        self._runs = options.runs
        self._requests = [text.request(i, options.new_tokens[0]) for i in range(NUM_REQUESTS)]
        self._references = [
            prefix_hit(engine, exact, (*exact.token_ids, *request)).last_logits()
            for request in self._requests
        ]

    def row(
        self,
        name: str,
        computed: int,
        once: Callable[[Sequence[int]], tuple[Execution, float]],
    ) -> dict[str, Any]:
        """Return a method's time and distance.

        Args:
            name: The method, and how much it recomputes.
            computed: How many tokens that is, beside the request.
            once: Runs it on a request; returns the result and the time in ms.
        """
        pairs = zip(self._requests, self._references, strict=True)
        reports = [compare(once(request)[0].last_logits(), ref) for request, ref in pairs]
        times = interleaved({"time": lambda: once(self._requests[0])[1]}, self._runs)
        return {"method": name, "recomputed": computed, **times, **_distance(reports)}


def _curve(engine: Engine, text: BenchText, options: BenchOptions) -> list[dict[str, Any]]:
    """Measure this engine over the number of seam tokens, as one segment and in chunks."""
    whole = Spliced.of(engine, text, options.lengths[0])
    cut = Spliced.of(engine, text, options.lengths[0], CHUNK_TOKENS)
    judge = _Judge(engine, engine.prefill(whole.context_ids).cache, text, options)
    rows = []
    for name, spliced in (("splice", whole), ("splice, chunks", cut)):
        for seam in SEAMS:
            computed = seam * len(spliced.segments)
            once = partial(_timed, _splice, spliced, seam)
            rows.append(judge.row(f"{name}, {seam}", computed, once))
    return rows


def _timed(method: Callable[..., Execution], *arguments: Any) -> tuple[Execution, float]:
    found = method(*arguments)
    return found, found.elapsed_ms


def _splice(spliced: Spliced, seam: int, request: Sequence[int]) -> Execution:
    return spliced.execute(spliced.plan(request, seam))


def _distance(reports: Sequence[FidelityReport]) -> dict[str, Any]:
    return {
        "KL mean": float(f"{statistics.fmean(r.kl_nats for r in reports):.3g}"),
        "KL max": float(f"{max(r.kl_nats for r in reports):.3g}"),
        "top-1 equal": f"{sum(r.top1_agree for r in reports)} / {len(reports)}",
    }


def _peers(
    model: Model, text: BenchText, options: BenchOptions, say: Say
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure methods that others have published, and packages that are installed.

    Returns:
        Their rows, and what was not measured and why.
    """
    engine: Any = model.engine
    length = options.lengths[0]
    spliced = Spliced.of(engine, text, length, CHUNK_TOKENS)
    judge = _Judge(engine, engine.prefill(spliced.context_ids).cache, text, options)
    rows = []
    for number in SEAMS:
        once = partial(_timed, epic, spliced, number)
        rows.append(judge.row(f"EPIC, {number}", number * len(spliced.segments), once))
    for share in SHARES:
        say(f"CacheBlend, {share:.0%}")
        blended = partial(cacheblend, spliced, share)
        rows.append(judge.row(f"CacheBlend, {share:.0%}", round(share * length), blended))
    missing = []
    for name, package in (("kvboost", _kvboost), ("llama.cpp", _llama)):
        say(name)
        try:
            rows += package(model, text, options)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return rows, missing


def _kvboost(model: Model, text: BenchText, options: BenchOptions) -> list[dict[str, Any]]:
    """Measure kvboost, whose header has to fill a chunk of its own."""
    if find_spec("kvboost") is None:
        raise ImportError("not installed, pip install --no-deps kvboost")
    engine: Any = model.engine
    header = (text.header * (KVBOOST_CHUNK // len(text.header) + 1))[:KVBOOST_CHUNK]
    body = text.segment(options.lengths[0] // KVBOOST_CHUNK * KVBOOST_CHUNK)
    peer = KVBoostPeer(engine, resolve_model(model.name).path, header, body)
    exact = engine.prefill((*header, *body)).cache
    reports, times = [], []
    for index in range(options.runs + 1):
        request = text.request(index, options.new_tokens[0])
        elapsed, logits = peer.run(request)
        times.append(elapsed)
        reference = prefix_hit(engine, exact, (*exact.token_ids, *request))
        reports.append(compare(logits, reference.last_logits()))
    row = {"method": f"kvboost, {KVBOOST_CHUNK}", "recomputed": len(body)}
    return [row | {"time": summary(times[1:]), **_distance(reports)}]


def _llama(model: Model, text: BenchText, options: BenchOptions) -> list[dict[str, Any]]:
    """Measure llama.cpp, which shifts keys and recomputes nothing; its own prefill judges it."""
    from kvnotes.bench.llama_cpp import LlamaPeer

    if find_spec("llama_cpp") is None:
        raise ImportError("not installed, pip install llama-cpp-python")
    if options.gguf is None:
        raise ImportError("it needs the model as a file, --gguf FILE")
    body, header = text.segment(options.lengths[0]), text.header
    with tempfile.TemporaryDirectory() as scratch:
        peer = LlamaPeer(options.gguf, Path(scratch), torch.get_num_threads(), body)
        reports, times, full = [], [], []
        for index in range(options.runs + 1):
            request = text.request(index, options.new_tokens[0])
            elapsed, logits = peer.run(header, request)
            own_ms, own = peer.full((*header, *body, *request))
            times.append(elapsed)
            full.append(own_ms)
            reports.append(compare(torch.from_numpy(logits), torch.from_numpy(own)))
    row = {"method": "llama.cpp, 0", "recomputed": 0, "time": summary(times[1:])}
    whole = {"method": "llama.cpp, full", "recomputed": len(body), "time": summary(full[1:])}
    return [row | _distance(reports), whole]


KVBOOST_CHUNK = 64
"""Tokens of kvboost's chunks, and of its header: smaller ones it does not take."""


def _panels(rows: list[dict[str, Any]], curve: list[dict[str, Any]]) -> list[Panel]:
    new = rows[0]["new"]
    points = [row for row in rows if row["new"] == new]
    names = ("full", "copy", "splice", "hit", "compute")
    timed = series(points, "segment", names)
    ratio = [
        Point(row["segment"], row["splice / hit"], row["splice / hit"], row["splice / hit"])
        for row in points
    ]
    methods: dict[str, list[Point]] = {}
    for row in curve:
        if "KL mean" in row:
            name = row["method"].rsplit(",", 1)[0]
            t = row["time"]
            methods.setdefault(name, []).append(
                Point(row["KL mean"], t["median"], t["min"], t["max"])
            )
    title = f"time to first token, {new} new tokens"
    return [
        Panel(title, "tokens of the segment", "ms", timed, log_x=True, log_y=True),
        Panel("splice / exact prefix hit", "tokens of the segment", "ratio", {"splice": ratio}),
        Panel("methods", "KL from a full prefill (nats)", "ms", methods, log_x=True, log_y=True),
    ]


def _exponents(tables: Sequence[Table], options: BenchOptions) -> dict[str, float | None]:
    """Return how the costs grow with what they depend on."""
    rows, alone, parts, _ = (table.rows for table in tables)
    new = options.new_tokens[0]

    by_length = [row for row in rows if row["new"] == new]
    by_new = [row for row in rows if row["segment"] == options.lengths[0]]
    splice = ("splice",)
    return {
        **growths(by_length, "segment", ("hit", "splice", "copy", "full"), "segment tokens"),
        **growths(by_new, "new", splice, "new tokens"),
        **growths(alone, "segment", ("read in place", "copied", "naive"), "segment tokens, alone"),
        **growths(parts, "segments", splice, "number of segments"),
    }


def _ms(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Run something that returns an execution; return what it took."""
    elapsed: float = call(*arguments, **options).elapsed_ms
    return elapsed


def _ratio(one: Summary, other: Summary) -> float:
    return round(one["median"] / other["median"], 3)


def _prefill_flops(engine: Engine, num_tokens: int) -> float:
    spec = engine.spec
    attention = 2 * spec.num_attention_heads * sum(x.head_dim for x in spec.layers)
    return 2.0 * spec.num_parameters * num_tokens + attention * num_tokens**2


def _matmul_gflops(engine: Any, rows: int = 512) -> float:
    """Speed of plain products of the shapes of the model's layers."""
    weights = [p for p in engine.model.get_decoder().layers[0].parameters() if p.dim() == 2]
    inputs = [torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights]
    best = float("inf")
    with torch.inference_mode():
        for _ in range(10):
            best = min(best, elapsed_ms(lambda: _products(inputs, weights)))
    flops: float = 2e-6 * rows * sum(w.numel() for w in weights) / best
    return flops


def _products(inputs: Sequence[Any], weights: Sequence[Any]) -> None:
    for x, w in zip(inputs, weights, strict=True):
        torch.nn.functional.linear(x, w)

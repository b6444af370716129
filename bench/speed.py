"""TTFT of a splice, an erratum and a refresh, beside an exact prefix hit and a full prefill.

The protocol of MEASURING.md: 33 header tokens cached, one segment, some new tokens, arms
interleaved in one process. `hit` continues an exact cache of all tokens before the new
ones; `full` is the engine's own prefill, whose speed is stated as a share of a plain matrix
product of the same shapes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import arguments, header_ids, interleaved, load, policy_ids, save

from kvnotes.engine.execute import place
from kvnotes.fidelity import prefix_hit
from kvnotes.plan import Match, Plan, Reuse, Splice, plan_compose, plan_keep
from kvnotes.segment import Buffer

SHORT = 512
"""Up to this length the segment is also computed behind the cached header: the break-even."""


def main() -> None:
    """Run the benchmark."""
    parser = arguments("TTFT of splices and edits")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1536, 3072, 6144, 7500])
    parser.add_argument("--new", type=int, nargs="+", default=[32, 1, 128])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-full", action="store_true", help="skip the full prefill")
    parser.add_argument("--name", default="speed", help="first part of the result's file name")
    args = parser.parse_args()
    model = load(args)
    rows = [row for length in args.lengths for row in measure(model, length, args)]
    save(f"{args.name}-{args.dtype}-{args.threads}t", args, {"rows": rows})
    for row in rows:
        print(_line(row))


def measure(model: Any, length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one segment length; the full prefill with the first number of new tokens only."""
    engine = model.engine
    header, text = header_ids(model), policy_ids(model, length)
    segment = engine.compile(text)
    head = engine.prefill(header).cache
    exact = engine.prefill((*header, *text)).cache
    buffer = Buffer.allocate(engine.spec, len(header) + length, engine.model.dtype)
    rows = []
    for num_new in args.new:
        ids = (*header, *text, *policy_ids(model, 1500)[-num_new:])
        ideal = plan_compose(ids, [Splice("policy", segment.run, 0, length, len(header))])
        splice = plan_keep(head.layout, [Match(0, 0, len(header))], ideal, strategy="compose")
        refresh = _refresh_plan(exact, ids)
        arms = {
            "hit": partial(_ms, prefix_hit, engine, exact, ids),
            "splice": partial(_ms, engine.execute, splice, base=head, segments=[segment]),
            "refresh": partial(_ms, engine.execute, refresh, base=exact),
            "copy": partial(_copy_ms, segment, buffer),
            "move": partial(_move_ms, engine, segment, buffer),
        }
        if length <= SHORT:
            arms["compute"] = partial(_ms, prefix_hit, engine, head, ids)
        row = {"segment_tokens": length, "new_tokens": num_new, "plan": splice.shape}
        row |= interleaved(arms, args.runs)
        if not args.no_full and num_new == args.new[0]:
            full = {"full": partial(_ms, engine.prefill, ids)}
            row |= interleaved(full, max(3, args.runs // 2))
        rows.append(row | _ratios(row, engine, len(ids)))
    return rows


def _ms(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Run something that returns an execution; return what it took."""
    elapsed: float = call(*arguments, **options).elapsed_ms
    return elapsed


def _ratios(row: dict[str, Any], engine: Any, num_tokens: int) -> dict[str, Any]:
    """Return the figures that are judged, from the medians."""
    median = {name: value["median"] for name, value in row.items() if isinstance(value, dict)}
    ratios: dict[str, Any] = {
        "splice_over_hit": round(median["splice"] / median["hit"], 3),
        "move_over_copy": round(median["move"] / median["copy"], 3),
    }
    if "full" in median:
        ratios["full_over_splice"] = round(median["full"] / median["splice"], 1)
        ratios["full_gflops"] = round(_prefill_flops(engine, num_tokens) / median["full"] / 1e6)
        ratios["matmul_gflops"] = round(_matmul_gflops(engine))
    return ratios


def _refresh_plan(cache: Any, ids: tuple[int, ...]) -> Plan:
    """A field of eight tokens in the middle takes a value of the same length."""
    before = cache.length
    middle = before // 2
    changed = (*ids[:middle], *ids[:8], *ids[middle + 8 :])
    matches = [Match(0, 0, middle), Match(middle + 8, middle + 8, before - middle - 8)]
    return plan_keep(cache.layout, matches, Plan.prefill(changed), strategy="refresh")


def _copy_ms(segment: Any, buffer: Any) -> float:
    """Copy a segment's bytes once, into the slots where the move puts them."""
    start = time.perf_counter()
    slots = slice(buffer.capacity - segment.num_tokens, buffer.capacity)
    for keys, values, to_keys, to_values in zip(
        segment.keys, segment.values, buffer.keys, buffer.values, strict=True
    ):
        to_keys[:, slots].copy_(keys)
        to_values[:, slots].copy_(values)
    return (time.perf_counter() - start) * 1e3


def _move_ms(engine: Any, segment: Any, buffer: Any) -> float:
    """Copy and move a segment into the same memory."""
    start = time.perf_counter()
    target = buffer.capacity - segment.num_tokens
    place(Reuse(segment.run, 0, segment.num_tokens, target), [segment], buffer, engine.rotaries)
    return (time.perf_counter() - start) * 1e3


def _prefill_flops(engine: Any, num_tokens: int) -> float:
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
            start = time.perf_counter()
            for x, w in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
    return 2e-9 * rows * sum(w.numel() for w in weights) / best


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['segment_tokens']} + {row['new_tokens']} new"]
    parts += [
        f"{name} {row[name]['median']:.1f} ms"
        for name in ("hit", "splice", "compute", "refresh", "full", "copy", "move")
        if name in row
    ]
    parts += [
        f"{name} {row[name]}"
        for name in (
            "splice_over_hit",
            "full_over_splice",
            "move_over_copy",
            "full_gflops",
            "matmul_gflops",
        )
        if name in row
    ]
    return "  ".join(parts)


if __name__ == "__main__":
    main()

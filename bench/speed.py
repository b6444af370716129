"""TTFT of a splice, an erratum and a refresh, beside an exact prefix hit and a full prefill.

The protocol of MEASURING.md: 33 header tokens cached, one segment, some new tokens, arms
interleaved in one process. `hit` continues an exact cache of all tokens before the new
ones; `full` is the engine's own prefill, whose speed is stated as a share of a plain matrix
product of the same shapes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import arguments, header_ids, interleaved, load, policy_ids, save

from kvnotes.engine.execute import place
from kvnotes.plan import Compute, Match, Plan, Reuse, Splice, plan_compose, plan_keep
from kvnotes.segment import Buffer


def main() -> None:
    """Run the benchmark."""
    parser = arguments("TTFT of splices and edits")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1536, 3072, 6144, 7500])
    parser.add_argument("--new", type=int, nargs="+", default=[32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-full", action="store_true", help="skip the full prefill")
    args = parser.parse_args()
    model = load(args)
    rows = [measure(model, length, new, args) for length in args.lengths for new in args.new]
    name = f"speed-{args.dtype}-{args.threads}t"
    save(name, args, {"rows": rows})
    for row in rows:
        print(_line(row))


def measure(model: Any, length: int, num_new: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one segment length."""
    engine = model.engine
    header = header_ids(model)
    segment_ids = policy_ids(model, length)
    new = policy_ids(model, 400)[-num_new:]
    ids = (*header, *segment_ids, *new)
    before = len(ids) - num_new
    segment = engine.compile(segment_ids)
    head = engine.prefill(header).cache
    exact = engine.prefill(ids[:before]).cache
    hit_plan = Plan(ids, (*exact.layout, Compute(before, new)))
    splice = Splice("policy", segment.run, 0, length, len(header))
    ideal = plan_compose(ids, [splice], num_seam_tokens=1)
    splice_plan = plan_keep(head.layout, [Match(0, 0, len(header))], ideal, strategy="compose")
    refresh_plan = _refresh_plan(exact, ids, before)
    buffer = Buffer.allocate(engine.spec, len(header) + length, engine.model.dtype)

    def full() -> float:
        return engine.prefill(ids).elapsed_ms

    def hit() -> float:
        return engine.execute(hit_plan, base=exact).elapsed_ms

    def spliced() -> float:
        return engine.execute(splice_plan, base=head, segments=[segment]).elapsed_ms

    def refreshed() -> float:
        return engine.execute(refresh_plan, base=exact).elapsed_ms

    def copied() -> float:
        return _copy_ms(segment, buffer)

    def moved() -> float:
        return _move_ms(engine, segment, buffer)

    arms = {"hit": hit, "splice": spliced, "refresh": refreshed, "copy": copied, "move": moved}
    result = interleaved(arms, args.runs)
    if not args.no_full:
        result |= interleaved({"full": full, "hit_beside_full": hit}, max(2, args.runs // 2))
    row = {"segment_tokens": length, "new_tokens": num_new, "plan": splice_plan.shape, **result}
    row["splice_over_hit"] = round(result["splice"]["median"] / result["hit"]["median"], 3)
    row["move_over_copy"] = round(result["move"]["median"] / result["copy"]["median"], 3)
    if "full" in result:
        row["full_over_splice"] = round(result["full"]["median"] / result["splice"]["median"], 1)
        row["full_gflops"] = round(
            _prefill_flops(engine, len(ids)) / result["full"]["median"] / 1e6
        )
        row["matmul_gflops"] = round(_matmul_gflops(engine))
    return row


def _refresh_plan(cache: Any, ids: tuple[int, ...], before: int) -> Plan:
    """A field of eight tokens in the middle takes a value of the same length."""
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
    place(Reuse(segment.run, 0, segment.num_tokens, target), [segment], buffer, engine.rotary)
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
        f"{name} {row[name]['median']:.0f} ms"
        for name in ("hit", "splice", "refresh", "full", "copy", "move")
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

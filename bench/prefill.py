"""The fastest exact prefill: chunk sizes and attention kernels, the baseline of all ratios.

`packed` is the engine's attention, `sdpa` is what transformers calls itself; `at once` is one
forward without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common import arguments, interleaved, load, policy_ids, save

from kvnotes.engine import hf
from kvnotes.engine.masks import PACKED_NAME

CHUNKS = (128, 256, 512, 1024)


def main() -> None:
    """Run the benchmark."""
    parser = arguments("speed of exact prefills")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1536, 3072])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    model = load(args)
    rows = []
    for length in args.lengths:
        ids = policy_ids(model, length)
        arms: dict[str, Callable[[], float]] = {
            f"{kernel}, {'at once' if chunk >= length else chunk}": partial(
                prefill_ms, model.engine, ids, kernel, chunk
            )
            for kernel in (PACKED_NAME, "sdpa")
            for chunk in (*CHUNKS, length)
        }
        rows.append({"tokens": length, "arms": interleaved(arms, args.runs)})
        print(rows[-1])
    save(f"prefill-{args.dtype}-{args.threads}t", args, {"rows": rows})


def prefill_ms(engine: Any, ids: tuple[int, ...], kernel: str, chunk: int) -> float:
    """Prefill in chunks with one kernel; the engine is left as it was."""
    usual = hf.PREFILL_CHUNK
    engine.model.set_attn_implementation(kernel)
    hf.PREFILL_CHUNK = chunk
    try:
        elapsed: float = engine.prefill(ids).elapsed_ms
        return elapsed
    finally:
        hf.PREFILL_CHUNK = usual
        engine.model.set_attn_implementation(PACKED_NAME)


if __name__ == "__main__":
    main()

"""TTFT of a session's turn after an erratum, beside an exact prefix hit of the same tokens."""

from __future__ import annotations

from typing import Any

from common import arguments, interleaved, load, policy_ids, save

import kvnotes
from kvnotes.fidelity import prefix_hit

QUESTION = "Please tell me what the status of my order is now, and what I can do about it today."


def main() -> None:
    """Run the benchmark."""
    parser = arguments("TTFT after an erratum")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1536, 3072, 6144])
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    model = load(args)
    rows = [measure(model, length, args.runs) for length in args.lengths]
    save(f"erratum-{args.dtype}", args, {"rows": rows})
    for row in rows:
        print(row)


def measure(model: Any, length: int, runs: int) -> dict[str, Any]:
    """Measure one length of the cached policy."""
    talk = kvnotes.Session(
        model,
        messages=[
            {"role": "system", "segment": "policy"},
            {"role": "system", "content": "order_status: {{order_status}}\n"},
        ],
        fields={"order_status": "pending"},
        segments={"policy": model.tokenizer.decode(policy_ids(model, length))},
        strategy="erratum",
        splice="never",
    )
    talk.user(QUESTION, decide=["yes", "no"])
    ids: list[tuple[int, ...]] = []
    start: list[int] = []

    def session() -> float:
        fork = talk.fork()
        known = fork.num_cached_tokens
        fork.edit(order_status="shipped")
        turn = fork.user(QUESTION, decide=["yes", "no"])
        ids.append(turn.plan.token_ids)
        start.append(known)
        assert turn.ttft_ms is not None and turn.plan.shape == "R C"
        return turn.ttft_ms

    session()
    prompt, cut = ids[0], start[0]
    exact = model.engine.prefill(prompt[:cut]).cache

    def hit() -> float:
        return prefix_hit(model.engine, exact, prompt).elapsed_ms

    result = interleaved({"session": session, "hit": hit}, runs)
    ratio = result["session"]["median"] / result["hit"]["median"]
    return {
        "segment_tokens": cut,
        "new_tokens": len(prompt) - cut,
        **result,
        "session_over_hit": round(ratio, 3),
    }


if __name__ == "__main__":
    main()

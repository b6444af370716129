"""Splice fidelity on the real retail policy, and the mechanical gaps to the masked forward.

A header of about 33 tokens, the whole policy, each of the 114 customer requests as a user
turn. The policy stands in one of two forms: `inline`, in the header's own system message, or
`message`, as a system message of its own, with role header and end token. `same_tokens` is an
exact prefix hit over a cold prefill of header and policy; its own distance from a one-shot
prefill is the floor, measured on every 19th request.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from common import DATA, HEADERS, arguments, header_ids, load, policy_ids, save

from kvnotes.fidelity import compare, mask_reference, prefix_hit
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep

SEAMS = (0, 1, 2, 4, 16, 64)
FORMS = ("inline", "message")


def main() -> None:
    """Run the benchmark."""
    parser = arguments("KL and top-1 of a spliced policy")
    parser.add_argument("--requests", type=int, default=114)
    parser.add_argument("--mechanical", type=int, default=3, help="requests for mask_reference")
    args = parser.parse_args()
    model = load(args)
    requests = [
        task["user_scenario"]["instructions"]["reason_for_call"]
        for task in json.loads((DATA / "tau2_retail_tasks.json").read_text())
    ][: args.requests]
    tables, floors, gaps = [], [], []
    for form in FORMS:
        for index in range(len(HEADERS)):
            parts = prompt_parts(model, form, index)
            rows, floor = curve(model, parts, requests, SEAMS if index == 0 else (1,))
            tables.append({"form": form, "header_tokens": len(parts.header), "rows": rows})
            floors += floor
    parts = prompt_parts(model, "inline", 0)
    segment = model.engine.compile(parts.policy)
    for request in requests[: args.mechanical]:
        ids = (*parts.header, *parts.policy, *turn_ids(model, parts, request))
        gaps.append(mechanical(model.engine, ids, len(parts.header), segment))
    floor_kl = {"median": statistics.median(floors), "max": max(floors), "num": len(floors)}
    body = {"headers": tables, "floor_kl": floor_kl, "mechanical": gaps}
    save(f"fidelity-{args.dtype}", args, body)
    print(json.dumps(body, indent=1))


@dataclass(frozen=True, slots=True)
class Parts:
    """Tokens before the turn, and the text that closes the policy."""

    header: tuple[int, ...]
    policy: tuple[int, ...]
    closing: str


def prompt_parts(model: Any, form: str, index: int) -> Parts:
    """Return header and policy in one of the two forms."""
    if form == "inline":
        return Parts(header_ids(model, index), policy_ids(model), "<|im_end|>\n")
    encode = model.tokenizer.encode
    text = (DATA / "tau2_retail_policy.md").read_text()
    return Parts(
        encode(HEADERS[index].rstrip() + "<|im_end|>\n"),
        encode(f"<|im_start|>system\n{text}<|im_end|>\n"),
        "",
    )


def turn_ids(model: Any, parts: Parts, request: str) -> tuple[int, ...]:
    """Return the tokens of a customer's turn behind the policy."""
    text = f"{parts.closing}<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
    ids: tuple[int, ...] = model.tokenizer.encode(text)
    return ids


def curve(
    model: Any, parts: Parts, requests: list[str], seams: tuple[int, ...]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return a row per number of seam tokens, and the floor on every 19th request."""
    engine = model.engine
    segment = engine.compile(parts.policy)
    prefix = engine.prefill((*parts.header, *parts.policy)).cache
    reports: dict[int, list[Any]] = {seam: [] for seam in seams}
    floors: list[float] = []
    for index, request in enumerate(requests):
        ids = (*parts.header, *parts.policy, *turn_ids(model, parts, request))
        exact = prefix_hit(engine, prefix, ids).last_logits()
        if index % 19 == 0:
            floors.append(compare(exact, engine.prefill(ids).last_logits()).kl_nats)
        splice = Splice("policy", segment.run, 0, segment.num_tokens, len(parts.header))
        for seam in seams:
            plan = plan_compose(ids, [splice], num_seam_tokens=seam)
            result = engine.execute(plan, segments=[segment])
            reports[seam].append(compare(result.last_logits(), exact))
    return [summarize(seam, reports[seam]) for seam in seams], floors


def summarize(seam: int, reports: list[Any]) -> dict[str, Any]:
    """Return one row of the curve."""
    kls = sorted(r.kl_nats for r in reports)
    return {
        "num_seam_tokens": seam,
        "num_requests": len(reports),
        "kl_mean": statistics.fmean(kls),
        "kl_median": statistics.median(kls),
        "kl_max": kls[-1],
        "top1_equal": sum(r.top1_agree for r in reports),
        "cosine_min": min(r.cosine for r in reports),
    }


def mechanical(engine: Any, ids: tuple[int, ...], start: int, segment: Any) -> dict[str, float]:
    """Gap to `mask_reference`, relative to the logit scale, of the four kinds of plan."""
    size = segment.num_tokens
    spliced = engine.execute(
        plan_compose(ids, [Splice("policy", segment.run, 0, size, start)], num_seam_tokens=1),
        segments=[segment],
    )
    plans = {"splice": None}
    live = spliced.cache
    middle = start + size // 2
    scattered = tuple(range(start + 40, start + size, 97))
    same = [Match(0, 0, len(ids))]
    plans["scattered"] = plan_keep(
        live.layout, same, Plan.prefill(ids), strategy="selective", recompute=scattered
    )
    shorter = (*ids[: middle - 20], *ids[middle:])
    plans["delete"] = plan_keep(
        live.layout,
        [Match(0, 0, middle - 20), Match(middle, middle - 20, len(ids) - middle)],
        Plan.prefill(shorter),
        strategy="refresh",
    )
    longer = (*ids[:middle], *ids[:7], *ids[middle + 3 :])
    plans["length_changing_edit"] = plan_keep(
        live.layout,
        [Match(0, 0, middle), Match(middle + 3, middle + 7, len(ids) - middle - 3)],
        Plan.prefill(longer),
        strategy="refresh",
    )
    gaps = {}
    for name, plan in plans.items():
        result = spliced if plan is None else engine.execute(plan, base=live)
        reference = mask_reference(engine, result.cache.layout)
        gaps[name] = compare(result.last_logits(), reference).max_logit_gap
    return gaps


if __name__ == "__main__":
    main()

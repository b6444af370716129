"""Tools in every order, and tools taken back: does a moved tool decide like a computed one?

Compares the decision between tool names with a full prefill of the same prompt: after every
permutation (each tool compiled alone, then moved), and after one tool is retracted exactly or
by an erratum. A decision is between the names of all tools, scored as the next words.
"""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import arguments, load, save

import kvnotes
from kvnotes.engine.base import Stopwatch
from kvnotes.fidelity import compare, floor
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS, Reuse
from kvnotes.session.reply import decide

TOOLS = Path(__file__).resolve().parents[1] / "examples" / "tools.json"
HEADER = "You serve an online shop. Call one of these tools; answer with its name alone.\n"
QUESTIONS = {
    "get_order_details": (
        "Please tell me where order #W2378156 is.",
        "What is the status of my order #W4817420?",
        "Show me the details of order #W9911714.",
    ),
    "cancel_pending_order": (
        "Please cancel order #W2378156, I ordered it by mistake.",
        "I no longer need order #W4817420. Cancel it.",
        "Cancel my pending order #W9911714.",
    ),
    "find_user_id_by_email": (
        "My email is ann@example.com. Who am I in your system?",
        "Find the user with the email bob@example.com.",
        "Look up the user id for carl@example.com.",
    ),
    "calculate": (
        "What is 129.50 + 3 * 45.10?",
        "Calculate the sum of 19.99 and 54.04.",
        "How much is (200 - 35) / 3?",
    ),
}


def main() -> None:
    """Run the benchmark."""
    parser = arguments("Decisions after tools are permuted and retracted")
    parser.add_argument("--seam", type=int, default=DEFAULT_NUM_SEAM_TOKENS)
    args = parser.parse_args()
    model = load(args)
    tools = json.loads(TOOLS.read_text())
    names = [tool["function"]["name"] for tool in tools]
    result = {
        "num_seam_tokens": args.seam,
        "orders": orders(model, tools, names, args.seam),
        "retracted": retracted(model, tools, names, args.seam),
    }
    save(f"tools-{args.dtype}-seam{args.seam}", args, result)
    print(json.dumps(result, indent=1))


def session_of(model: kvnotes.Model, tools: list[dict[str, Any]], seam: int) -> kvnotes.Session:
    """A session that offers the tools and was asked nothing."""
    messages = [{"role": "system", "content": HEADER}]
    session = kvnotes.Session(model, messages=messages, num_seam_tokens=seam)
    for tool in tools:
        session.add_tool(tool)
    return session


def orders(
    model: kvnotes.Model, tools: list[dict[str, Any]], names: list[str], seam: int
) -> dict[str, Any]:
    """Every order of the tools, every question: ours against a full prefill."""
    rows = []
    floor_kl: list[float] = []
    for order in permutations(names):
        session = session_of(model, tools, seam)
        session.decide(names)
        session.reorder_tools(order)
        for wanted, questions in QUESTIONS.items():
            for question in questions:
                fork = session.fork()
                fork.add("user", question)
                rows.append({"wanted": wanted, **judged(model, fork, names)})
        ids = fork.render(add_generation_prompt=True).token_ids
        floor_kl += floor(model.engine, ids, ())
    return {
        "num_decisions": len(rows),
        "decides_as_full": mean(row["agree"] for row in rows),
        "top1_agree": mean(row["top1"] for row in rows),
        "kl_nats_median": median(row["kl"] for row in rows),
        "kl_nats_max": max(row["kl"] for row in rows),
        "floor_kl_nats_max": max(floor_kl),
        "right": mean(row["ours"] == row["wanted"] for row in rows),
        "full_right": mean(row["full"] == row["wanted"] for row in rows),
        "least_share_kept": min(row["kept"] for row in rows),
    }


def judged(model: kvnotes.Model, session: kvnotes.Session, names: list[str]) -> dict[str, Any]:
    """Decide, and compare with a full prefill of the same tokens."""
    execution, prompt, turn = session._talk.run((), None, Stopwatch())
    full = model.engine.prefill(prompt.token_ids)
    spans = [(s.start, s.stop) for s in prompt.segments]
    kept = [(s.target_start, s.target_stop) for s in turn.plan.steps if isinstance(s, Reuse)]
    inside = sum(max(0, min(b, d) - max(a, c)) for a, b in spans for c, d in kept)
    report = compare(execution.last_logits(), full.last_logits())
    ours, theirs = (decide(model, e, names).chosen for e in (execution, full))
    return {
        "ours": ours,
        "full": theirs,
        "agree": ours == theirs,
        "top1": report.top1_agree,
        "kl": report.kl_nats,
        "kept": inside / sum(b - a for a, b in spans),
    }


def retracted(
    model: kvnotes.Model, tools: list[dict[str, Any]], names: list[str], seam: int
) -> dict[str, Any]:
    """One tool is taken back, and what it was for is asked: is it still chosen?

    Each way is also judged by a full prefill of the tokens it leaves: what the prompt itself
    makes of them.
    """
    rows = []
    for wanted, questions in QUESTIONS.items():
        for question in questions:
            chosen = {}
            for strategy in (None, "auto", "erratum", "refresh+erratum"):
                session = session_of(model, tools, seam)
                session.decide(names)
                if strategy is not None:
                    session.retract_tool(wanted, strategy=strategy)
                turn = session.user(question, decide=names)
                assert turn.decision is not None
                name = strategy or "offered"
                chosen[name] = turn.decision.chosen == wanted
                full = model.engine.prefill(turn.plan.token_ids)
                chosen[f"{name}, full prefill"] = decide(model, full, names).chosen == wanted
            rows.append(chosen)
    return {
        "num_questions": len(rows),
        "still_chosen": {name: sum(row[name] for row in rows) for name in rows[0]},
    }


if __name__ == "__main__":
    main()

"""How far predicted times are from measured ones, turn by turn of a scenario.

Each run loads the model anew, so that the cost model is measured as users have it: once, at
load. Beside TTFT the full prefill of each turn is predicted and measured. Turns with a verify
are left out: their TTFT holds a check that depends on the outcome.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import arguments, load, save, summary

import kvnotes
from kvnotes.cli.check import Prepared, prepare
from kvnotes.cli.run import new_session, run_turn
from kvnotes.cli.source import read_source
from kvnotes.plan import Plan

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the benchmark."""
    parser = arguments("predicted against measured times")
    parser.add_argument("--scenario", default=str(ROOT / "examples" / "retail.yaml"))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    prepared = prepare(read_source(args.scenario))
    runs = [measure(load(args), prepared) for _ in range(args.runs)]
    rows = [_over([run[index] for run in runs]) for index in range(len(runs[0]))]
    name = f"predict-{Path(args.scenario).stem}-{args.dtype}-{args.threads}t"
    save(name, args, {"scenario": Path(args.scenario).name, "rows": rows})
    for row in rows:
        print(_line(row))


def measure(model: kvnotes.Model, prepared: Prepared) -> list[dict[str, Any]]:
    """Run the scenario once; return predicted and measured times of each turn that computes."""
    session, cost = new_session(prepared, model), model.engine.cost
    rows = []
    for index, spec in enumerate(prepared.scenario.turns):
        turn = run_turn(session, index, spec, compare=False)
        if turn.ttft_ms is None or turn.verification is not None:
            continue
        full = Plan.prefill(turn.plan.token_ids)
        rows.append(
            {
                "turn": index + 1,
                "plan": turn.plan.shape,
                "computed": turn.plan.tokens.computed,
                "moved": turn.plan.tokens.moved,
                "predicted_ms": cost.predict_ms(turn.plan),
                "measured_ms": turn.ttft_ms,
                "full_predicted_ms": cost.predict_ms(full),
                "full_measured_ms": model.engine.prefill(full.token_ids).elapsed_ms,
            }
        )
    return rows


def _over(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, smallest and largest time of one turn over the runs, and of their ratios."""
    result = {key: rows[0][key] for key in ("turn", "plan", "computed", "moved")}
    for name in ("predicted_ms", "measured_ms", "full_predicted_ms", "full_measured_ms"):
        result[name] = summary([row[name] for row in rows])
    for name in ("", "full_"):
        ratios = [row[f"{name}predicted_ms"] / row[f"{name}measured_ms"] for row in rows]
        result[f"{name}ratio"] = summary(ratios)
    return result


def _line(row: dict[str, Any]) -> str:
    parts = [f"turn {row['turn']:>2}  {row['plan']:<10} {row['computed']:>4} computed"]
    for name, title in (("", "ttft"), ("full_", "full")):
        predicted, measured = row[f"{name}predicted_ms"], row[f"{name}measured_ms"]
        ratio = row[f"{name}ratio"]
        parts.append(
            f"{title}: predicted {predicted['median']:,.0f}, measured {measured['median']:,.0f} "
            f"ms, ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        )
    return "  ".join(parts)


if __name__ == "__main__":
    main()

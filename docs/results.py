"""Pictures of what was measured: times, divergences and recoveries from bench/results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from svg import COLORS, SEEN, Drawing

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


def measured() -> dict[str, Drawing]:
    """Return the pictures of results, by name."""
    return {
        "speed": speed(_result("cli/compose-float32-1t")),
        "seam": seam(_result("fidelity-float32")),
        "recovery": recovery(_result("recovery-capitals12")),
    }


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def speed(result: dict[str, Any]) -> Drawing:
    """Time to the first token behind segments of some lengths, on a scale of powers of ten."""
    arms = (("full", "full prefill"), ("splice", "splice"), ("hit", "exact prefix hit"))
    colors = {"full": COLORS["C"], "splice": COLORS["R'"], "hit": COLORS["R"]}
    rows = [row for row in result["tables"][0]["rows"] if "full" in row]
    drawing = Drawing(860, 96 + 84 * len(rows), "Time to the first token, SmolLM2-135M")
    drawing.text(40, 52, _source(result), size=11)

    def place(value: float) -> float:
        return 190 + 560 * (math.log10(value) - 2) / 2.6

    low = 66 + 84 * len(rows)
    for tick in (100, 1_000, 10_000):
        drawing.line(place(tick), 66, place(tick), low, color="#d0cec8")
        name = f"{tick // 1000} s" if tick >= 1000 else f"{tick} ms"
        drawing.text(place(tick), low + 16, name, anchor="middle", size=11)
    for i, row in enumerate(rows):
        y = 76 + 84 * i
        drawing.text(40, y + 32, f"{row['segment']:,} tokens", bold=True)
        for j, (arm, name) in enumerate(arms):
            value = row[arm]["median"]
            top = y + 22 * j
            drawing.text(182, top + 13, name, anchor="end", size=11)
            drawing.rect(190, top, place(value) - 190, 17, colors[arm])
            shown = f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms"
            drawing.text(place(value) + 6, top + 13, shown, size=11)
    return drawing


def seam(result: dict[str, Any]) -> Drawing:
    """Divergence of a splice by the number of seam tokens, and behind other headers."""
    first, *others = result["headers"]
    rows = [(str(row["num_seam_tokens"]), row) for row in first["rows"]]
    rows += [(f"{head['rows'][0]['num_seam_tokens']}", head["rows"][0]) for head in others]
    drawing = Drawing(860, 120 + 30 * len(rows), "KL divergence of a spliced policy, in nats")
    drawing.text(40, 52, _source(result), size=11)
    drawing.text(182, 74, "seam tokens", anchor="end", size=11)
    drawing.text(190, 74, "mean (bar) and largest (line) of 114 requests", size=11)
    largest = max(row["kl_max"] for _, row in rows)
    for i, (name, row) in enumerate(rows):
        y = 84 + 30 * i
        drawing.text(182, y + 14, name, anchor="end")
        mean, most = (500 * row[key] / largest for key in ("kl_mean", "kl_max"))
        drawing.rect(190, y, mean, 20, COLORS["R'"])
        drawing.line(190 + mean, y + 10, 190 + most, y + 10, width=1.5)
        drawing.line(190 + most, y + 5, 190 + most, y + 15, width=1.5)
        text = f"{row['kl_mean']:.4f}, largest {row['kl_max']:.4f}"
        drawing.text(200 + most, y + 14, text, size=11)
    y = 84 + 30 * len(first["rows"])
    drawing.line(60, y - 5, 800, y - 5, color="#d0cec8")
    drawing.text(40, y + 12, "other headers", size=11)
    floor = f"{result['floor_kl']['median']:.0e}"
    text = f"floor between exact computations: {floor}"
    drawing.text(40, drawing.height - 14, text, size=11)
    return drawing


def recovery(result: dict[str, Any]) -> Drawing:
    """Decision recovery by strategy, with intervals."""
    rows = list(result["strategies"].items())
    drawing = Drawing(860, 110 + 28 * len(rows), "How much of a decision an edit recovers")
    drawing.text(40, 52, _source(result), size=11)

    def place(value: float) -> float:
        return 200 + 330 * value

    low = 70 + 28 * len(rows)
    for tick, name in ((0.0, "0 as stale"), (1.0, "1 as a clean prefill")):
        drawing.line(place(tick), 66, place(tick), low, color="#b5b2aa")
        drawing.text(place(tick), low + 18, name, anchor="middle", size=11)
    for i, (name, row) in enumerate(rows):
        y = 82 + 28 * i
        left, right = row["interval"]
        drawing.text(182, y + 4, name, anchor="end")
        drawing.line(place(left), y, place(right), y, color=SEEN, width=4)
        drawing.circle(place(row["recovery"]), y, 4.5, fill=COLORS["C"])
        text = f"{row['recovery']:.2f}, right in {row['right']} of {result['num_items']}"
        drawing.text(place(max(right, row["recovery"])) + 14, y + 4, text, size=11)
    return drawing


def _source(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['command']}; {machine['dtype']}, {machine['threads']} thread"

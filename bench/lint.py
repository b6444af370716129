"""How well the volatility lint finds labelled values, with 95 % Wilson intervals.

python bench/lint.py [--faults] [--text FILE ...]

Reads kvnotes/bench/items/lint_dev.yaml and lint_heldout.yaml. The rules are fitted to the first;
`--faults` lists its misses and false findings, and never those of the second. `--text` counts
the findings in files that nobody labelled.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from kvnotes.bench.lint_items import Item, Rate, Scores, load_items, score
from kvnotes.lint import lint_text

RESULTS = Path(__file__).resolve().parent / "results"
HALVES = ("dev", "heldout")
RATES = ("line_precision", "line_recall", "value_precision", "value_recall", "kind")


def main() -> None:
    """Measure both halves and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", action="store_true", help="list what is wrong in the dev half")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to count in")
    args = parser.parse_args()
    found = {}
    for half in HALVES:
        items = load_items(half)
        scores = score(items)
        found[half] = counts(items, scores)
        show(half, found[half])
        if args.faults and half == "dev":
            show_faults(scores)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lint.json").write_text(json.dumps(found, indent=1) + "\n")
    for path in args.text:
        show_text(path)


def counts(items: tuple[Item, ...], scores: Scores) -> dict[str, Any]:
    """Count what there is, and each rate with its interval."""
    rates: dict[str, Rate] = {name: getattr(scores, name) for name in RATES}
    return {
        "items": len(items),
        "decoys": sum(not item.values for item in items),
        "values": sum(len(item.values) for item in items),
        "rates": {
            name: {
                "hits": rate.num_hits,
                "cases": rate.num_cases,
                "value": rate.value,
                "interval": rate.interval,
            }
            for name, rate in rates.items()
        },
    }


def show(half: str, found: dict[str, Any]) -> None:
    print(f"{half}: {found['items']} items, {found['decoys']} decoys, {found['values']} values")
    for name, rate in found["rates"].items():
        low, high = rate["interval"]
        print(
            f"  {name:<16}{rate['hits']:>5} / {rate['cases']:<5}{rate['value']:.3f}  "
            f"[{low:.3f}, {high:.3f}]"
        )


def show_faults(scores: Scores) -> None:
    for item, found in scores.faults:
        wanted = [item.text[value.start : value.stop] for value in item.values]
        got = [item.text[value.start : value.stop] for value in found]
        print(f"  {item.text!r}\n    labelled {wanted}, found {got}")


def show_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    kinds = Counter(finding.kind for finding in lint_text(text))
    print(f"{path.name}: {len(text.splitlines())} lines, {kinds.total()} findings {dict(kinds)}")


if __name__ == "__main__":
    main()

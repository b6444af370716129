"""Labelled lines of prompts, and how well the lint finds their volatile values.

Owns the item format of `items/lint_*.yaml` and the counts: by line (has the line a finding or
not) and by value (a finding and a label are the same value if they share at least half of the
characters that either covers). Does not judge whether a figure is good enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvnotes.lint.text import Value, find_values

ITEMS = Path(__file__).resolve().parent / "items"

MIN_OVERLAP = 0.5
"""Shared characters over all characters of both, from which on two ranges are one value."""

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a prompt.

    Attributes:
        text: The line.
        group: What kind of text it is from.
        values: Its volatile values; none for a decoy.
    """

    text: str
    group: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of cases."""

    num_hits: int
    num_cases: int

    @property
    def value(self) -> float:
        """The share; 1 where there are no cases."""
        return self.num_hits / self.num_cases if self.num_cases else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval."""
        n, p = self.num_cases, self.value
        if not n:
            return 0.0, 1.0
        scale = 1 + Z95**2 / n
        centre = (p + Z95**2 / (2 * n)) / scale
        half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / scale
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Scores:
    """How well the lint does on a list of items.

    Attributes:
        line_precision: Of the lines with a finding, those that have a label.
        line_recall: Of the lines with a label, those that have a finding.
        value_precision: Of the findings, those that are a labelled value.
        value_recall: Of the labelled values, those that are found.
        kind: Of the values that are found, those of the labelled kind.
        faults: The items with a miss or a false finding, with what was found.
    """

    line_precision: Rate
    line_recall: Rate
    value_precision: Rate
    value_recall: Rate
    kind: Rate
    faults: tuple[tuple[Item, tuple[Value, ...]], ...]


def load_items(name: str) -> tuple[Item, ...]:
    """Return the items of `items/lint_<name>.yaml`."""
    data = yaml.safe_load((ITEMS / f"lint_{name}.yaml").read_text(encoding="utf-8"))
    return tuple(_item(entry) for entry in data["items"])


def score(items: Sequence[Item]) -> Scores:
    """Run the lint on each item and count."""
    flagged = labelled = both = num_found = num_values = matched = right_kind = 0
    faults = []
    for item in items:
        found = find_values(item.text)
        pairs = [(f, v) for f in found for v in item.values if _same(f, v)]
        flagged += bool(found)
        labelled += bool(item.values)
        both += bool(found) and bool(item.values)
        num_found += len(found)
        num_values += len(item.values)
        matched += len(pairs)
        right_kind += sum(f.kind == v.kind for f, v in pairs)
        if len(pairs) != len(found) or len(pairs) != len(item.values):
            faults.append((item, tuple(found)))
    return Scores(
        Rate(both, flagged),
        Rate(both, labelled),
        Rate(matched, num_found),
        Rate(matched, num_values),
        Rate(right_kind, matched),
        tuple(faults),
    )


def _item(entry: dict[str, object]) -> Item:
    text, spans = entry["text"], entry["spans"]
    assert isinstance(text, str) and isinstance(spans, list)
    values, done = [], 0
    for span in spans:
        start = text.index(span["text"], done)
        done = start + len(span["text"])
        values.append(Value(start, done, span["kind"]))
    return Item(text, str(entry["group"]), tuple(values))


def _same(one: Value, other: Value) -> bool:
    shared = min(one.stop, other.stop) - max(one.start, other.start)
    return shared >= MIN_OVERLAP * (max(one.stop, other.stop) - min(one.start, other.start))

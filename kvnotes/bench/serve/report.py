"""Tables and plots of the online benchmark."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvnotes.bench.lint_items import Rate
from kvnotes.bench.result import BenchResult, Panel, Point, Table
from kvnotes.bench.serve.load import Tally
from kvnotes.bench.serve.options import ServeOptions
from kvnotes.bench.serve.prompts import REFERENCE, Arm, Ask, Ceiling

PERCENTS = (50, 90, 99)

ALL_AT_ONCE = "all at once"


@dataclass
class Cell:
    """One arm over one policy at one rate.

    Args:
        arm: The arm.
        length: Tokens of the policy.
        rate: Requests per second; None: all at once.
        tally: Its requests.
        place: Share of the prompt before the first token that is another one in each request.
        queries: Tokens of prompts that the server counted.
        hits: Of these, tokens that its prefix cache served.
        loaded: Tokens that the plug-in has put in.
        preemptions: Requests that the server has interrupted.
        disturbed: Blocks that ran while something else used the machine.
        ceiling: What could have been left out, block by block.
    """

    arm: Arm
    length: int
    rate: float | None
    tally: Tally = field(default_factory=Tally)
    place: float = 0.0
    queries: float = 0.0
    hits: float = 0.0
    loaded: float = 0.0
    preemptions: float = 0.0
    disturbed: int = 0
    ceiling: list[Ceiling] = field(default_factory=list)

    def add(self, queries: float, hits: float, loaded: float, preemptions: float) -> None:
        """Count what the server counted in a block."""
        self.queries += queries
        self.hits += hits
        self.loaded += loaded
        self.preemptions += preemptions

    @property
    def best(self) -> Ceiling:
        """What could have been left out."""
        blocks = self.ceiling
        return Ceiling(
            sum(b.cached for b in blocks),
            sum(b.loaded for b in blocks),
            sum(b.total for b in blocks),
        )

    @property
    def hit_share(self) -> float | None:
        """Share of the prompts that the prefix cache served."""
        return self.hits / self.queries if self.queries else None

    @property
    def reused_share(self) -> float | None:
        """The same with what was loaded."""
        return (self.hits + self.loaded) / self.queries if self.queries else None

    @property
    def ceiling_share(self) -> float:
        """What the share could be."""
        best = self.best
        return (best.cached + best.loaded) / best.total

    @property
    def at(self) -> str:
        """The rate, as tables call it."""
        return ALL_AT_ONCE if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Decision:
    """What an arm answers to one question.

    Args:
        length: Tokens of the policy.
        arm: Its name.
        ask: The question.
        scores: Log-probability of each choice.
    """

    length: int
    arm: str
    ask: Ask
    scores: tuple[float, ...]

    @property
    def chosen(self) -> int:
        """Index of the likeliest choice."""
        return self.scores.index(max(self.scores))

    @property
    def margin(self) -> float:
        """Log-probability of the right choice over that of the old value, the last one."""
        return self.scores[self.ask.right] - self.scores[-1]

    def gap(self, other: Decision) -> float:
        """Return the largest distance between log-probabilities among the choices, in nats."""
        here, there = _among(self.scores), _among(other.scores)
        return max(abs(a - b) for a, b in zip(here, there, strict=True))


def _among(scores: Sequence[float]) -> list[float]:
    mean = statistics.fmean(scores)
    return [score - mean for score in scores]


@dataclass
class Found:
    """Everything that was measured.

    Args:
        machine: What it depends on.
        cells: By arm, policy and rate.
        decisions: What arms answer.
        missing: What was not measured, and why.
    """

    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def cell(self, arm: Arm, length: int, rate: float | None) -> Cell:
        """Return the place of an arm's numbers."""
        found = self.find(arm.name, length, rate)
        if found is None:
            found = Cell(arm, length, rate)
            self.cells.append(found)
        return found

    def find(self, name: str, length: int, rate: float | None) -> Cell | None:
        """Return the numbers of an arm; None if there are none."""
        return next(
            (c for c in self.cells if (c.arm.name, c.length, c.rate) == (name, length, rate)), None
        )

    @property
    def lengths(self) -> list[int]:
        """The policies, in order."""
        return list(dict.fromkeys(cell.length for cell in self.cells))

    @property
    def rates(self) -> list[float | None]:
        """The rates, in order."""
        return list(dict.fromkeys(cell.rate for cell in self.cells))


LOAD_NOTE = (
    "TTFT and e2e in ms from when a request should have been sent, percentiles by nearest rank "
    "over requests that did not fail; in an arm that cannot keep up they grow with the number of "
    "requests. good/s: requests per second with a first token within {bound:g} ms. hit: share of "
    "prompt tokens that vLLM's prefix cache served, by its counters; reused: with what the plug-in "
    "loaded; ceiling: what token counts and blocks of {block} allow. place: share of the prompt "
    "before what changes. no change answers with the old value: it is what nothing costs."
)
DECISION_NOTE = (
    "The likeliest of the choices behind the beginning of a reply, by the same cached prompts, "
    "against a clean prefill with the new value (prefix, 0 %). gap: largest distance of "
    "log-probabilities among the choices, in nats, mean over questions. recovery: of the margin of "
    "the new value over the old one, the part of the way from no change (0) to the clean prefill "
    "(1), where the field is read, with a 95 % bootstrap interval. right: the field's value read, "
    "and a rule about it applied, whatever the others say. interval: 95 %, Wilson."
)
RATIO_NOTE = (
    "TTFT p90 and requests per second of the value in the prefix (0 %) over those of each arm, and "
    "the arm's TTFT over that of no change. to ceiling: share reused less the ceiling, in points."
)
GENERATOR_NOTE = (
    "lag: how late requests were sent. cpu: CPU time of the load generator for a request, and its "
    "share of one core while it ran. disturbed: blocks that ran while a probe said that something "
    "else used the machine."
)


def report(found: Found, options: ServeOptions) -> BenchResult:
    """Return tables and panels."""
    note = LOAD_NOTE.format(bound=options.bound_ms, block=found.machine.get("block_size"))
    failures = sorted({said for cell in found.cells for said in cell.tally.errors})
    if failures:
        note += f" Failures: {'; '.join(failures[:_MAX_FAILURES])}."
    tables = [
        Table(f"{length}-token policy, {_cells(found, length, rate)[0].at}", rows, note)
        for length in found.lengths
        for rate in found.rates
        if (rows := [_row(cell, options) for cell in _cells(found, length, rate)])
    ]
    said = " ".join(f"Not measured: {name}, {why}." for name, why in found.missing.items())
    tables.append(Table("against the value in the prefix", _ratios(found), f"{RATIO_NOTE} {said}"))
    if found.decisions:
        tables.append(Table("decisions", _decisions(found), DECISION_NOTE))
    tables.append(Table("the load generator", _generator(found), GENERATOR_NOTE))
    return BenchResult("serve", found.machine, tables, _panels(found))


_MAX_FAILURES = 5


def _cells(found: Found, length: int, rate: float | None) -> list[Cell]:
    return [cell for cell in found.cells if (cell.length, cell.rate) == (length, rate)]


def _row(cell: Cell, options: ServeOptions) -> dict[str, Any]:
    tally = cell.tally
    done = len(tally.done)
    row: dict[str, Any] = {
        "arm": cell.arm.name,
        "place": _percent(cell.place, 0),
        "requests": len(tally.records),
        "failed": len(tally.errors),
    }
    row |= {f"TTFT p{p}": _whole(tally.ttft_ms(p)) for p in PERCENTS}
    row |= {f"e2e p{p}": _whole(tally.e2e_ms(p)) for p in PERCENTS[:2]}
    row |= {
        "req/s": round(tally.per_second(done), 3),
        "tok/s": round(tally.per_second(sum(r.num_tokens for r in tally.done)), 1),
        "good/s": round(tally.goodput(options.bound_ms), 3),
        "hit": _percent(cell.hit_share, 2),
        "reused": _percent(cell.reused_share, 2),
        "ceiling": _percent(cell.ceiling_share, 2),
        "computed": _whole((cell.queries - cell.hits - cell.loaded) / max(1, len(tally.records))),
    }
    return row


def _ratios(found: Found) -> list[dict[str, Any]]:
    """Return each arm beside the value in the prefix and beside no change."""
    rows = []
    for cell in found.cells:
        at = (cell.length, cell.rate)
        prefix, same = found.find(REFERENCE.name, *at), found.find("no change", *at)
        assert prefix is not None and same is not None
        if cell is prefix:
            continue
        reused = cell.reused_share
        done = [x.tally.per_second(len(x.tally.done)) for x in (cell, prefix)]
        rows.append(
            {
                "policy": cell.length,
                "rate": cell.at,
                "arm": cell.arm.name,
                "prefix TTFT p90 / its": _over(prefix.tally.ttft_ms(90), cell.tally.ttft_ms(90)),
                "its req/s / prefix": _over(done[0], done[1]),
                "TTFT p50 / no change": _over(cell.tally.ttft_ms(50), same.tally.ttft_ms(50)),
                "TTFT p90 / no change": _over(cell.tally.ttft_ms(90), same.tally.ttft_ms(90)),
                "to ceiling": None
                if reused is None
                else round(100 * (reused - cell.ceiling_share), 2),
            }
        )
    return rows


def _decisions(found: Found) -> list[dict[str, Any]]:
    rows = []
    for length in found.lengths:
        mine = [d for d in found.decisions if d.length == length]
        clean = {d.ask.value: d for d in mine if d.arm == REFERENCE.name}
        for arm in dict.fromkeys(d.arm for d in mine):
            chosen = [d for d in mine if d.arm == arm]
            agree = Rate(sum(d.chosen == clean[d.ask.value].chosen for d in chosen), len(chosen))
            low, high = agree.interval
            row: dict[str, Any] = {"policy": length, "arm": arm}
            row["agrees"] = f"{agree.num_hits} / {agree.num_cases}"
            row["interval"] = f"{low:.2f}-{high:.2f}"
            gaps = [d.gap(clean[d.ask.value]) for d in chosen]
            row["gap"] = round(statistics.fmean(gaps), 3)
            row["recovery"] = _recovery(mine, arm)
            for kind in ("status", "rule"):
                some = [d for d in chosen if d.ask.kind == kind]
                right = sum(d.chosen == d.ask.right for d in some)
                row[f"right, {kind}"] = f"{right} / {len(some)}"
            rows.append(row)
    return rows


def _recovery(decisions: Sequence[Decision], arm: str) -> str | None:
    """Return how far an arm moves from the old value to the new one, of what a clean prefill does.

    Margins of the new value over the old one where the field is read; a bootstrap interval over
    questions.
    """
    by_arm: dict[str, dict[str, float]] = {}
    for decision in decisions:
        if decision.ask.kind == "status":
            by_arm.setdefault(decision.arm, {})[decision.ask.value] = decision.margin
    stale, clean, own = (by_arm.get(name, {}) for name in ("no change", REFERENCE.name, arm))
    asked = [value for value in own if value in stale and value in clean]
    if not asked:
        return None

    def ratio(values: Sequence[str]) -> float:
        moved = sum(own[value] - stale[value] for value in values)
        whole = sum(clean[value] - stale[value] for value in values)
        return moved / whole if whole else math.nan

    rng = random.Random(0)
    draws = sorted(ratio(rng.choices(asked, k=len(asked))) for _ in range(_DRAWS))
    low, high = draws[_DRAWS // 40], draws[-_DRAWS // 40]
    return f"{ratio(asked):.2f} [{low:.2f}, {high:.2f}]"


_DRAWS = 2000
"""Of the bootstrap."""


def _generator(found: Found) -> list[dict[str, Any]]:
    rows = []
    for length in found.lengths:
        for rate in found.rates:
            cells = _cells(found, length, rate)
            if not cells:
                continue
            records = [record for cell in cells for record in cell.tally.records]
            cpu = sum(cell.tally.cpu_s for cell in cells)
            wall = sum(cell.tally.wall_s for cell in cells)
            lags = sorted(record.lag * 1e3 for record in records)
            whole = [cell for cell in cells if not cell.tally.errors]
            rows.append(
                {
                    "policy": length,
                    "rate": cells[0].at,
                    "requests": len(records),
                    "lag p50 ms": round(statistics.median(lags), 2),
                    "lag max ms": round(lags[-1], 2),
                    "cpu ms / request": round(1e3 * cpu / len(records), 2),
                    "cpu share": _percent(cpu / wall if wall else 0.0, 2),
                    "preempted": round(sum(cell.preemptions for cell in cells)),
                    "disturbed": sum(cell.disturbed for cell in cells),
                    "foreign tokens": round(sum(c.queries - c.best.total for c in whole)),
                }
            )
    return rows


def _panels(found: Found) -> list[Panel]:
    """Return what is plotted, of the longest policy."""
    length = found.lengths[-1]
    here = [cell for cell in found.cells if cell.length == length and cell.tally.done]
    title = f"{length}-token policy"
    panels = []
    rates = [rate for rate in found.rates if rate is not None]
    if rates:
        by_rate = {
            cell.arm.name: [
                _ttft_point(other, other.rate)
                for other in here
                if other.arm == cell.arm and other.rate is not None
            ]
            for cell in here
            if not cell.arm.swept
        }
        panels.append(
            Panel(f"{title}: TTFT p90 [p50-p99]", "requests per second", "ms", by_rate, log_y=True)
        )
    saturated = [cell for cell in here if cell.rate is None]
    panels += [
        Panel(
            f"{title}, {ALL_AT_ONCE}: TTFT p90 [p50-p99]",
            "place of the field, % of the prompt",
            "ms",
            _by_place(saturated, lambda cell, x: _ttft_point(cell, x)),
            log_y=True,
        ),
        Panel(
            f"{title}, {ALL_AT_ONCE}: throughput",
            "place of the field, % of the prompt",
            "requests per second",
            _by_place(saturated, lambda c, x: _flat(x, c.tally.per_second(len(c.tally.done)))),
            log_y=True,
        ),
        Panel(
            f"{title}, {ALL_AT_ONCE}: reused [to the ceiling]",
            "place of the field, % of the prompt",
            "% of the prompt tokens",
            _by_place(saturated, _reused_point),
        ),
    ]
    return panels


def _by_place(
    cells: Sequence[Cell], point: Callable[[Cell, float], Point]
) -> dict[str, list[Point]]:
    """Return the prefix arms as one series, and every other arm as a level line."""
    swept = [c for c in cells if c.arm.layout == "prefix" and not c.arm.segment]
    swept.sort(key=lambda cell: cell.place)
    places = [100 * cell.place for cell in swept]
    found = {"value in the prefix": [point(c, x) for c, x in zip(swept, places, strict=True)]}
    for cell in cells:
        if cell not in swept:
            ends = (places[0], places[-1]) if len(places) > 1 else places
            found[cell.arm.name] = [point(cell, x) for x in ends]
    return found


def _ttft_point(cell: Cell, x: float | None) -> Point:
    p50, p90, p99 = (cell.tally.ttft_ms(p) or 0.0 for p in PERCENTS)
    return Point(x or 0.0, p90, p50, p99)


def _reused_point(cell: Cell, x: float) -> Point:
    reused, best = 100 * (cell.reused_share or 0.0), 100 * cell.ceiling_share
    return Point(x, reused, min(reused, best), max(reused, best))


def _flat(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _percent(share: float | None, digits: int) -> str | None:
    return None if share is None else f"{100 * share:.{digits}f} %"


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _over(above: float | None, below: float | None) -> float | None:
    return round(above / below, 2) if above is not None and below else None

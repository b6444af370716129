"""How benchmarks are timed: arms in turn, medians, and blocks repeated when the machine is busy."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

PROBE_SIZE = 400
"""A product of this size takes about 1 ms on one core: long enough to see contention."""

PROBE_LIMIT = 1.5
"""A block is repeated when the probe is slower than this times its idle value."""

Number = int | float

Summary = dict[str, float]
"""Median, minimum and maximum."""

Arms = Mapping[str, Callable[[], float]]
"""Functions that return their own time in milliseconds."""


class Probe:
    """A fixed matrix product: tells whether the machine is as idle as it was."""

    def __init__(self) -> None:
        self._left = torch.randn(PROBE_SIZE, PROBE_SIZE)
        self.idle_ms = min(self._once() for _ in range(30))

    def _once(self) -> float:
        return elapsed_ms(lambda: self._left @ self._left)

    def busy(self) -> bool:
        """Whether the machine is busier than the limit allows."""
        return statistics.median(self._once() for _ in range(7)) > PROBE_LIMIT * self.idle_ms


def elapsed_ms(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def interleaved(arms: Arms, runs: int, *, max_repeats: int = 20) -> dict[str, Summary]:
    """Run arms in turn and return the summary of each.

    Args:
        arms: What is timed.
        runs: Runs per arm, after one warm-up.
        max_repeats: How often a busy block is repeated before it is taken anyway.
    """
    probe = Probe()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    disturbed = 0
    for _ in range(runs):
        for attempt in range(max_repeats):
            before = probe.busy()
            block = {name: arm() for name, arm in arms.items()}
            if not before and not probe.busy():
                break
            disturbed += attempt == max_repeats - 1
        for name, value in block.items():
            times[name].append(value)
    if disturbed:
        print(f"warning: {disturbed} of {runs} blocks were disturbed", file=sys.stderr)
    return {name: summary(values) for name, values in times.items()}


def summary(values: Sequence[float]) -> Summary:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def growth_exponent(points: Sequence[tuple[Number, Number]]) -> float | None:
    """Return b of the power law y = a x^b that fits points best; None for fewer than two.

    Least squares of the logarithms: 0 does not grow, 1 grows in proportion.
    """
    found = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in found}) < 2:
        return None
    return round(statistics.linear_regression(*zip(*found, strict=True)).slope, 2)

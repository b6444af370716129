"""What every benchmark shares: the machine, an idle probe, medians, results on disk."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import kvnotes

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RESULTS = Path(__file__).resolve().parent / "results"

PROBE_SIZE = 400
"""A product of this size takes about 1 ms on one core: long enough to see contention."""

PROBE_LIMIT = 1.5
"""A block is repeated when the probe is slower than this times its idle value."""


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default: bench/results)")
    return parser


def load(args: argparse.Namespace) -> kvnotes.Model:
    """Load the model with the given number of threads."""
    torch.set_num_threads(args.threads)
    return kvnotes.load(args.model, dtype=args.dtype)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on."""
    import transformers

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": args.threads,
        "dtype": args.dtype,
        "model": args.model,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvnotes": kvnotes.__version__,
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, args: argparse.Namespace, body: dict[str, Any]) -> Path:
    """Write a benchmark's result as JSON and say where."""
    path = args.out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(args), **body}, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)
    return path


class Probe:
    """A fixed matrix product: tells whether the machine is as idle as it was."""

    def __init__(self) -> None:
        self._left = torch.randn(PROBE_SIZE, PROBE_SIZE)
        self.idle_ms = min(self._once() for _ in range(30))

    def _once(self) -> float:
        start = time.perf_counter()
        self._left @ self._left
        return (time.perf_counter() - start) * 1e3

    def busy(self) -> bool:
        """Whether the machine is busier than the limit allows."""
        return statistics.median(self._once() for _ in range(7)) > PROBE_LIMIT * self.idle_ms


def interleaved(
    arms: dict[str, Callable[[], float]], runs: int, *, max_repeats: int = 20
) -> dict[str, dict[str, float]]:
    """Run arms in turn and return median, minimum and maximum of each, in ms.

    Args:
        arms: Functions that return their own time in ms.
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


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def policy_ids(model: kvnotes.Model, num_tokens: int | None = None) -> tuple[int, ...]:
    """Return tokens of the real retail policy, followed by its tasks where more are asked for."""
    text = (DATA / "tau2_retail_policy.md").read_text()
    ids = model.tokenizer.encode(text)
    if num_tokens is not None and num_tokens > len(ids):
        tasks = json.loads((DATA / "tau2_retail_tasks.json").read_text())
        more = "\n".join(task["user_scenario"]["instructions"]["reason_for_call"] for task in tasks)
        ids = model.tokenizer.encode(text + "\n" + more)
    return tuple(ids if num_tokens is None else ids[:num_tokens])


HEADERS = (
    "<|im_start|>system\nYou are the service agent of an online shop. Help the customer with "
    "orders, returns and refunds. Follow the policy below in every reply.\n\n",
    "<|im_start|>system\nYou are a customer service agent that helps the user according to the "
    "policy below. Always follow the policy and be polite and patient to everyone.\n\n",
    "<|im_start|>system\nYou are a helpful assistant of a retail store. Answer the customer in a "
    "friendly and rather short way. The policy of the store follows here.\n\n",
)
"""Ordinary system headers, near the 33 tokens of the standard point; the first has exactly 33."""


def header_ids(model: kvnotes.Model, index: int = 0) -> tuple[int, ...]:
    """Return the tokens of a system header."""
    return model.tokenizer.encode(HEADERS[index])

"""Kill processes that compile, save, push and pull: nothing acknowledged may be lost.

    python bench/store_kill.py --kills 100

Kills (SIGKILL) at random times, then before every system call that changes something. After
each one: what was acknowledged must be there, bit by bit; no half file may be visible, here
or on the remote tier; the next process must not be held up; what is left over must go when
it is old. Prints one line of JSON; leaves with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers_kill import WORKS, Scene


def at_random_times(kills: int, seconds: float, seed: int) -> Scene:
    """Kill processes at random times, each kind of work in turn."""
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), long=True)
        for index in range(kills):
            scene.kill_at_random(WORKS[index % len(WORKS)], chosen, seconds)
    return scene


def at_every_call(work: str) -> Scene:
    """Kill a process before each of its system calls."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), long=False, pulls=work == "pull")
        for call in count():
            if not scene.kill_at_call(work, call):
                return scene
    raise AssertionError("unreachable")


def main() -> int:
    """Kill, look, and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="kills at random times")
    parser.add_argument(
        "--seconds", type=float, default=0.6, help="a process lives at most so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    faults: list[str] = []
    scenes = {"random times": at_random_times(args.kills, args.seconds, args.seed)}
    for work in WORKS:
        scenes[f"every call of {work}"] = at_every_call(work)
    total: Counter[str] = Counter()
    for name, scene in scenes.items():
        report[name] = dict(scene.seen)
        total += scene.seen
        faults += scene.faults
    report |= {"total": dict(total), "faults": faults}
    print(json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

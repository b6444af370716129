"""Kill a process while it saves, again and again: what is left is the old file or the new one.

    python bench/crash.py --kills 100

Each child replaces one segment file by another, over and over, plain or encrypted, until it is
killed (SIGKILL) after a random time, or at the n-th system call that changes something. After
each kill the folder is looked at: the visible file must be complete, everything else must be
a hidden part, which `kvnotes prune` takes away later. Prints one line of JSON; leaves with 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import torch

from kvnotes.errors import KVNotesError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec, RopeSpec
from kvnotes.store import Trust, load_segment, save_segment

CALLS = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "lseek")
SEALED = Trust(encryption_key=bytes(32))


def segment_of(num_tokens: int, seed: int) -> KVSegment:
    spec = ModelSpec(
        model_type="llama",
        layers=(LayerSpec("full", 2, 64),) * 4,
        num_attention_heads=2,
        hidden_size=128,
        vocab_size=1000,
        max_positions=1 << 16,
        dtype="float32",
        ropes=(RopeSpec("default", 64, "half", "0" * 64),),
    )
    random_ = torch.Generator().manual_seed(seed)
    layers = [
        tuple(torch.randn(2, num_tokens, 64, generator=random_) for _ in spec.layers)
        for _ in range(2)
    ]
    run = Run(tuple((seed + index) % 1000 for index in range(num_tokens)))
    return KVSegment(run, ModelIdentity(spec, "1" * 64), {"keys": layers[0], "values": layers[1]})


def save_forever(path: Path, segments: list[KVSegment], trust: Trust) -> None:
    for index in count():
        save_segment(path, segments[index % 2], trust=trust)


def die_at(call: int) -> None:
    """Make this process kill itself before the n-th system call that changes something."""
    counter = count()

    def dying(real: Any) -> Any:
        def function(*arguments: Any, **options: Any) -> Any:
            if next(counter) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return function

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def killed_child(work: Any, seconds: float | None) -> bool:
    """Fork, let the child work, and kill it after a time, or let it kill itself.

    Returns:
        False if the child ended by itself: it had nothing more to do.
    """
    child = os.fork()
    if child == 0:
        end = os._exit
        try:
            # replaces torch's thread pool, which did not survive the fork; left to the first two
            # threads that need it, it is replaced twice at once
            torch.set_num_threads(1)
            work()
            end(0)
        finally:
            traceback.print_exc()
            end(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a child failed: see its traceback")
    return os.WIFSIGNALED(status)


class Folder:
    """The folder that is looked at after each kill."""

    def __init__(self, path: Path, segments: list[KVSegment], trust: Trust) -> None:
        self.path = path
        self.trust = trust
        self.sums = [segment.checksum() for segment in segments]
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def look(self) -> None:
        """Count what is there, and note what should not be."""
        names = {entry.name for entry in self.path.iterdir()}
        parts = {name for name in names if name.startswith(".") and name.endswith(".part")}
        if not names - parts <= {"x"}:
            self.faults.append(f"strange files: {sorted(names - parts)}")
        for part in parts:
            (self.path / part).unlink()
        self.outcomes["parts"] += len(parts)
        if "x" not in names:
            self.outcomes["no file yet"] += 1
            return
        try:
            found = load_segment(self.path / "x", trust=self.trust).checksum()
            self.outcomes["old or new file"] += 1
            if found not in self.sums:
                self.faults.append("the file holds something else")
        except KVNotesError as error:
            self.faults.append(error.message)


def at_random_times(kills: int, random_: random.Random, trust: Trust, folder: Path) -> Folder:
    segments = [segment_of(500, seed) for seed in (0, 1)]
    started = time.perf_counter()
    save_segment(folder / "x", segments[0], trust=trust)
    seconds = time.perf_counter() - started
    (folder / "x").unlink()
    seen = Folder(folder, segments, trust)
    for _ in range(kills):
        killed_child(
            lambda: save_forever(folder / "x", segments, trust), random_.uniform(0, 4 * seconds)
        )
        seen.look()
    return seen


def at_each_call(trust: Trust, folder: Path, *, replaced: bool) -> Folder:
    segments = [segment_of(3, seed) for seed in (0, 1)]
    seen = Folder(folder, segments, trust)
    for call in count():
        if replaced:
            save_segment(folder / "x", segments[0], trust=trust)
        else:
            (folder / "x").unlink(missing_ok=True)

        def work(call: int = call) -> None:
            die_at(call)
            save_segment(folder / "x", segments[1], trust=trust)

        died = killed_child(work, None)
        seen.look()
        if not died:
            if seen.outcomes["calls"] == 0:
                seen.faults.append("no call was found to die at")
            return seen
        seen.outcomes["calls"] += 1
    raise AssertionError("unreachable")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="kills at random times")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    random_ = random.Random(args.seed)
    report: dict[str, Any] = {}
    faults: list[str] = []
    for name, trust in (("plain", Trust()), ("sealed", SEALED)):
        runs = {
            "times": lambda folder, t=trust: at_random_times(args.kills // 2, random_, t, folder),
            "calls, new": lambda folder, t=trust: at_each_call(t, folder, replaced=False),
            "calls, replaced": lambda folder, t=trust: at_each_call(t, folder, replaced=True),
        }
        for how, run in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                seen = run(Path(folder))
            report[f"{name}, {how}"] = dict(seen.outcomes)
            faults += [f"{name}, {how}: {fault}" for fault in seen.faults]
    print(json.dumps({**report, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

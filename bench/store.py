"""The store: loading, saving, looking up, listing, int8, and two processes at once.

Loading and saving are compared with reading and writing the same bytes, in one process, in
turn. `cold` drops the file from the page cache before each run. A compiled segment of the
retail policy; the model is needed for the time to the first token and for what int8 costs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import DATA, arguments, header_ids, interleaved, load, policy_ids, save, summary

from kvnotes.fidelity import compare, prefix_hit
from kvnotes.plan import Match, Run, Splice, plan_compose, plan_keep
from kvnotes.segment import KVSegment
from kvnotes.store import KVStore, Provenance, StoreFolder, open_segment, save_segment
from kvnotes.store.atomic import write_all
from kvnotes.store.index import INDEX_NAME
from kvnotes.store.tensors import bytes_of

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("load", "save", "lookup", "listing", "int8", "processes")


def main() -> None:
    """Run the benchmark."""
    parser = arguments("the store against reading and writing the same bytes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--length", type=int, default=6144)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--folder", type=Path, default=None, help="where files are written")
    args = parser.parse_args()
    body: dict[str, Any] = {}
    quiet = Quiet()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        place = Path(folder)
        for dtype in args.dtypes if {"load", "save"} & set(args.parts) else ():
            body |= files_of(dtype, place, args, quiet)
        body["disturbed_runs"] = quiet.num_disturbed
        if "lookup" in args.parts:
            body["lookup"] = lookup(place / "lookup")
        if "listing" in args.parts:
            body["listing"] = listing(place / "listing", args)
        if "int8" in args.parts:
            body["int8"] = int8(place / "int8", args)
        if "processes" in args.parts:
            body["processes"] = processes(place, args)
    if set(args.parts) != set(PARTS) and args.out is None:
        print(json.dumps(body, indent=1))
    else:
        save("store", args, body)
        print(json.dumps(body, indent=1))


# -- loading and saving --------------------------------------------------------------------


def files_of(dtype: str, place: Path, args: argparse.Namespace, quiet: Quiet) -> dict[str, Any]:
    """Measure loading and saving in one dtype."""
    model = load(argparse.Namespace(**{**vars(args), "dtype": dtype}))
    segment = model.engine.compile(policy_ids(model, args.length))
    path = place / f"{dtype}.kv.safetensors"
    save_segment(path, segment)
    found: dict[str, Any] = {}
    if "load" in args.parts:
        for cold in (False, True):
            name = f"load, {dtype}, {'cold' if cold else 'warm'}"
            found[name] = loading(model, segment, path, args, quiet, cold=cold)
    if "save" in args.parts:
        found[f"save, {dtype}"] = saving(segment, path, args, quiet)
    path.unlink()
    return found


def loading(
    model: Any,
    segment: KVSegment,
    path: Path,
    args: argparse.Namespace,
    quiet: Quiet,
    *,
    cold: bool,
) -> dict[str, Any]:
    """Reading the bytes, opening with verification, and what that adds to a first token.

    `read` is `open().read()`; `read_into` reads into memory that was in use before. `added` is
    a first token over the file, less one right after it over the segment in memory.
    """
    engine, header = model.engine, header_ids(model)
    ids = (*header, *segment.run.token_ids, *policy_ids(model, 1500)[-args.new :])
    ideal = plan_compose(ids, [Splice("policy", segment.run, 0, args.length, len(header))])
    head = engine.prefill(header).cache
    plan = plan_keep(head.layout, [Match(0, 0, len(header))], ideal, strategy="compose")

    def timed(action: Callable[[], object]) -> float:
        quiet()
        if cold:
            forget(path)
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start) * 1e3

    def read() -> None:
        with path.open("rb") as file:
            file.read()

    memory = bytearray(path.stat().st_size)

    def read_into() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass

    def opened() -> KVSegment:
        file = open_segment(path)
        file.verify()
        return file.segment()

    def from_file() -> float:
        return timed(lambda: engine.execute(plan, base=head, segments=[opened()]))

    def from_memory() -> float:
        return timed(lambda: engine.execute(plan, base=head, segments=[segment]))

    arms: dict[str, Callable[[], float]] = {
        "read": partial(timed, read),
        "read_into": partial(timed, read_into),
        "load": partial(timed, opened),
        "from_memory": from_memory,
        "added": lambda: from_file() - from_memory(),
    }
    row: dict[str, Any] = interleaved(arms, args.runs)
    read_ms, added = row["read"]["median"], row["added"]["median"]
    return row | {
        "nbytes": path.stat().st_size,
        "load_over_read": round(row["load"]["median"] / read_ms, 3),
        "first_token_over_read": round(added / read_ms, 3),
    }


def saving(
    segment: KVSegment, path: Path, args: argparse.Namespace, quiet: Quiet
) -> dict[str, Any]:
    """Saving a segment, against writing the same bytes to a new file."""
    contents = [
        bytes_of(tensor)
        for pair in zip(segment.keys, segment.values, strict=True)
        for tensor in pair
    ]
    target = path.with_name("written")

    def raw() -> float:
        quiet()
        start = time.perf_counter()
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for content in contents:
            write_all(file, content)
        os.fsync(file)
        os.close(file)
        elapsed = (time.perf_counter() - start) * 1e3
        target.unlink()
        return elapsed

    def saved() -> float:
        quiet()
        start = time.perf_counter()
        save_segment(target, segment)
        elapsed = (time.perf_counter() - start) * 1e3
        target.unlink()
        return elapsed

    row: dict[str, Any] = interleaved({"raw": raw, "save": saved}, args.runs)
    return row | {
        "nbytes": sum(map(len, contents)),
        "share_of_raw_speed": round(row["raw"]["median"] / row["save"]["median"], 3),
    }


class Quiet:
    """Waits until two cores are as fast as they can be: saving and loading take two.

    Args:
        patience: Seconds that all waits take together; then nothing waits any more.
    """

    def __init__(self, patience: float = 900.0) -> None:
        self.patience = patience
        self.num_disturbed = 0
        self._content = bytes(8 << 20)
        self._pool = ThreadPoolExecutor(2)
        self._best = min(self._once() for _ in range(50))

    def __call__(self) -> None:
        """Wait for a quiet moment."""
        began = time.monotonic()
        while self.patience > time.monotonic() - began:
            if max(self._once() for _ in range(3)) < 1.3 * self._best:
                self.patience -= time.monotonic() - began
                return
            time.sleep(0.05)
        self.patience = 0.0
        self.num_disturbed += 1

    def _once(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(lambda _: hashlib.sha256(self._content).digest(), range(2)))
        return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


# -- looking up and listing ----------------------------------------------------------------


def small_segment(index: int) -> KVSegment:
    """A segment of some tokens, another one for each number."""
    from helpers_tiers import named

    return named(f"segment {index}")


def lookup(place: Path) -> dict[str, Any]:
    """Microseconds to find a segment in memory, and to find that there is none."""
    from helpers_tiers import IDENTITY, run_named

    store = KVStore(place)
    for index in range(200):
        store.put(small_segment(index))
    tenant = store.for_tenant("acme")
    runs = [run_named(f"segment {index}") for index in range(400)]
    assert [run.digest for run in runs]  # made once for each prompt

    def each(view: KVStore, chosen: list[Run]) -> dict[str, float]:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            for run in chosen:
                view.find(IDENTITY, run)
            times.append((time.perf_counter() - start) / len(chosen) * 1e6)
        return summary(times)

    return {
        "in_memory_us": each(store, runs[:200]),
        "shared_in_memory_us": each(tenant, runs[:200]),
        "absent_us": each(store, runs[200:]),
    }


LIST = """
import time
start = time.perf_counter()
from pathlib import Path
from kvnotes.store import {kind}
entries = {kind}(Path({place!r})).entries()
print(len(entries), (time.perf_counter() - start) * 1e3)
"""


def listing(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to list many segments in a new process, and to make a lost index again."""
    store = KVStore(place, memory_nbytes=0)
    with patch.object(os, "fsync", lambda file: None):
        for index in range(args.segments):
            store.put(small_segment(index), Provenance(name=f"skill{index % 500}", version=1))
    found: dict[str, Any] = {"num_segments": args.segments}
    for kind in ("StoreFolder", "KVStore"):
        command = [sys.executable, "-c", LIST.format(kind=kind, place=str(place))]
        inside, outside = [], []
        for _ in range(args.runs + 1):
            start = time.perf_counter()
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            outside.append((time.perf_counter() - start) * 1e3)
            count, ms = answer.split()
            assert int(count) == args.segments
            inside.append(float(ms))
        found[f"{kind}, process"] = summary(outside[1:])
        found[f"{kind}, import and list"] = summary(inside[1:])
    folder = StoreFolder(place)
    found["list"] = summary([_ms(folder.entries) for _ in range(args.runs)])
    rebuilt = []
    for _ in range(3):
        (place / INDEX_NAME).unlink()
        rebuilt.append(_ms(StoreFolder(place).entries))
    found["list, index lost"] = summary(rebuilt)
    found["nbytes_of_index"] = (place / INDEX_NAME).stat().st_size
    return found


def _ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


# -- int8 ----------------------------------------------------------------------------------


def int8(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Size and error of an int8 copy of real K/V, and what it does to the next token."""
    model = load(args)
    engine, encode = model.engine, model.tokenizer.encode
    policy = encode((ROOT / "examples" / "policy.md").read_text())
    segment = engine.compile(policy)
    exact_path, small_path = place / "exact", place / "int8"
    save_segment(exact_path, segment)
    header = save_segment(small_path, segment, int8=True)
    opened = open_segment(small_path)
    opened.verify()
    rounded = opened.segment()
    head, reports, splices = header_ids(model), [], []
    prefix = engine.prefill((*head, *policy)).cache
    tasks = json.loads((DATA / "tau2_retail_tasks.json").read_text())
    for task in tasks:
        text = task["user_scenario"]["instructions"]["reason_for_call"]
        turn = encode(f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        ids = (*head, *policy, *turn)
        logits = [
            engine.execute(
                plan_compose(ids, [Splice("policy", one.run, 0, len(policy), len(head))]),
                segments=[one],
            ).last_logits()
            for one in (segment, rounded)
        ]
        reports.append(compare(logits[1], logits[0]))
        splices.append(compare(logits[0], prefix_hit(engine, prefix, ids).last_logits()))
    kls = sorted(report.kl_nats for report in reports)
    return {
        "tokens": len(policy),
        "size_over_exact": round(small_path.stat().st_size / exact_path.stat().st_size, 4),
        "max_error": header.payload.max_error,
        "rms_error": header.payload.rms_error,
        "num_requests": len(reports),
        "kl_mean": statistics.fmean(kls),
        "kl_median": statistics.median(kls),
        "kl_max": kls[-1],
        "top1_equal": sum(report.top1_agree for report in reports),
        "splice_kl_mean": statistics.fmean(report.kl_nats for report in splices),
        "splice_top1_equal": sum(report.top1_agree for report in splices),
    }


# -- two processes -------------------------------------------------------------------------


def processes(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two processes that do random operations on one folder, and what was wrong afterwards."""
    from helpers_tiers import finish, start
    from helpers_workers import check_end, hammer

    found: dict[str, Any] = {"operations_each": args.operations}
    for name, limit in (("lost indexes and damaged files", None), ("with a limit", 100_000)):
        root, log = place / f"processes {limit}", place / f"log {limit}"
        began = time.perf_counter()
        workers = [start(hammer, root, log, seed, args.operations, limit) for seed in (1, 2)]
        finish(*workers, seconds=600)
        elapsed = time.perf_counter() - began
        verdict = check_end(root, log)
        found[name] = {
            "seconds": round(elapsed, 1),
            "compiled": verdict.num_compiled,
            "must_be_there": len(verdict.present),
            "must_be_gone": len(verdict.absent),
            "faults": verdict.faults,
        }
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    torch.set_num_threads(1)
    main()

"""A compiled segment as a file: saving, loading with every digest checked, computing it again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from kvnotes.bench.options import BenchOptions, Say
from kvnotes.bench.result import BenchResult, Panel, Table, growths, machine, series
from kvnotes.bench.text import BenchText
from kvnotes.bench.timing import elapsed_ms, interleaved
from kvnotes.segment import KVSegment
from kvnotes.session import Model
from kvnotes.store import open_segment, save_segment
from kvnotes.store.atomic import write_all
from kvnotes.store.tensors import bytes_of

ARMS = ("read", "load", "write", "save", "compile")

NOTE = (
    "read: open().read() of the file, which is in the page cache. load: open, check every digest, "
    "map. write: the same bytes and fsync. save: digests, write, fsync, rename. compile: what the "
    "file spares."
)


def run(model: Model, text: BenchText, options: BenchOptions, say: Say) -> BenchResult:
    """Measure every length."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for length in options.lengths:
            say(f"{length} tokens: the file")
            rows.append(_measure(model, text, length, options, Path(folder)))
    panel = Panel(
        "a compiled segment as a file",
        "tokens of the segment",
        "ms",
        series(rows, "segment", ARMS),
        log_x=True,
        log_y=True,
    )
    exponents = growths(rows, "segment", ARMS, "segment tokens")
    tables = [Table("a segment as a file", rows, NOTE)]
    return BenchResult("store", machine(model), tables, [panel], exponents)


def _measure(
    model: Model, text: BenchText, length: int, options: BenchOptions, folder: Path
) -> dict[str, Any]:
    body = text.segment(length)
    segment = model.engine.compile(body)
    path, copy = folder / f"{length}.kv.safetensors", folder / "copy"
    save_segment(path, segment)
    content = [bytes_of(t) for layers in segment.tensors.values() for t in layers]

    def load() -> KVSegment:
        file = open_segment(path)
        file.verify()
        return file.segment()

    def write() -> None:
        with copy.open("wb", buffering=0) as file:
            for part in content:
                write_all(file.fileno(), part)
            os.fsync(file.fileno())

    times = interleaved(
        {
            "read": lambda: elapsed_ms(path.read_bytes),
            "load": lambda: elapsed_ms(load),
            "write": lambda: elapsed_ms(write),
            "save": lambda: elapsed_ms(lambda: save_segment(path, segment)),
        },
        options.runs,
    )
    row: dict[str, Any] = {"segment": length, "MB": round(segment.nbytes / 1e6, 1), **times}
    if options.full:
        compiled = {"compile": lambda: elapsed_ms(lambda: model.engine.compile(body))}
        row |= interleaved(compiled, max(3, options.runs // 2))
    row["load / read"] = round(times["load"]["median"] / times["read"]["median"], 3)
    return row

"""`kvnotes verify`: are files what they say, and do their K/V belong to their text?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.listing import Column, print_table, say
from kvnotes.cli.options import Dtype, Json, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress
from kvnotes.cli.stores import StoreFolder, Tenant, find_files, open_file, open_library
from kvnotes.errors import KVNotesError, SegmentFormatError

if TYPE_CHECKING:
    from kvnotes.cli.store_records import RecomputedRecord, VerifiedFile
    from kvnotes.library import Library
    from kvnotes.session import Model
    from kvnotes.store import OpenFile


MAX_NAME = 40
"""Longer file names are those of the store: a key, of which the beginning is enough."""


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="FILE|SKILL|KEY...", help="Files, refunds@3, keys, or all."),
    ],
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute the K/V again, and compare.")
    ] = False,
    share: Annotated[
        float | None,
        typer.Option(metavar="PART", help="Recompute only this part, at random places: 0.1."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model to recompute with; smollm2-135m by default."),
    ] = None,
    dtype: Dtype = None,
    threads: Threads = None,
    store: StoreFolder = None,
    tenant: Tenant = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check digests and signatures of segments; with --recompute, their K/V too.

    A digest proves that a file is as it was written, a signature who wrote it. Neither proves
    that the K/V are those of the text: for files from others use --recompute whole.
    """
    from kvnotes.cli.store_records import VerifyRecord

    library = open_library(store, tenant=tenant)
    paths = list(dict.fromkeys(p for target in targets for p in find_files(library, target)))
    progress = Progress(wanted=not quiet)
    loaded = None
    if recompute or share is not None or model is not None:
        with progress:
            loaded = _load(model, dtype, threads, progress)
    files, first = [], None
    for path in paths:
        with progress:
            progress.say(f"verifying {path.name}")
            record, error = _verified(library, path, loaded, share)
        first = first or error
        files.append(record)
    if json:
        print_json(VerifyRecord(files=files, ok=first is None).model_dump_json(indent=2))
    else:
        _print(files)
    if first is not None:
        bad = sum(not file.ok for file in files)
        raise type(first)(f"{bad} of {len(files)} files failed: {first.message}", hint=first.hint)


def _load(name: str | None, dtype: str | None, threads: int | None, progress: Progress) -> Model:
    from kvnotes.cli.options import DEFAULT_MODEL
    from kvnotes.engine.base import set_num_threads
    from kvnotes.session import load

    set_num_threads(threads)
    progress.say(f"loading {name or DEFAULT_MODEL}")
    return load(name or DEFAULT_MODEL, dtype=dtype)


def _verified(
    library: Library, path: Path, model: Model | None, share: float | None
) -> tuple[VerifiedFile, KVNotesError | None]:
    """Check one file; a fault is a value here, so that the others are checked as well."""
    from kvnotes.cli.store_records import VerifiedFile
    from kvnotes.library.recompute import text_agrees

    key = title = signer = agrees = again = error = None
    try:
        opened = open_file(library, path)
        key, title, signer = opened.header.key, opened.header.title, opened.signer
        _check_name(path, opened.header.key)
        opened.verify()
        if model is not None:
            text = library.store.text(opened.header)
            agrees = text_agrees(opened.header, text, model.tokenizer)
            if agrees is False:
                raise SegmentFormatError(
                    f"{path}: its text has other tokens than the file",
                    hint="do not use it; compile the text yourself",
                )
            again = _recomputed(opened, model, share)
    except KVNotesError as caught:
        error = caught
    record = VerifiedFile(
        path=str(path),
        key=key,
        segment=title,
        ok=error is None,
        fault=None if error is None else error.message,
        signer=signer or None,
        text_agrees=agrees,
        recomputed=again,
    )
    return record, error


def _check_name(path: Path, key: str) -> None:
    """Refuse a file that bears the key of another segment."""
    from kvnotes.store import SUFFIX

    stem = path.name.removesuffix(SUFFIX)
    if re.fullmatch("[0-9a-f]{64}", stem) and stem != key:
        raise SegmentFormatError(
            f"{path} holds the segment {key[:12]}, not that of its name",
            hint="it was renamed or swapped; compile the segment again",
        )


def _recomputed(opened: OpenFile, model: Model, share: float | None) -> RecomputedRecord:
    from kvnotes.cli.store_records import RecomputedRecord
    from kvnotes.library.recompute import recompute

    if opened.header.kind != "segment":
        raise SegmentFormatError(
            f"{opened.path} is part of a saved session: it cannot be computed on its own",
            hint="load the session; its own verify compares it with a clean prefill",
        )
    stated = opened.header.payload.max_error
    result = recompute(model.engine, opened.segment(), share=share, stated_error=stated)
    if not result.agreed:
        raise SegmentFormatError(
            f"{opened.path}: its K/V are not those of its tokens: token {result.position} in layer "
            f"{result.layer} is off by {result.max_gap:.1e} of the layer's largest value, allowed "
            f"are {result.allowed:.0e}",
            hint="do not use it; compile the text yourself",
        )
    return RecomputedRecord.of(result)


def _print(files: Sequence[VerifiedFile]) -> None:
    columns = [Column("file"), Column("result"), Column("signed by"), Column("recomputed")]
    rows = []
    for file in files:
        again = "-"
        if (done := file.recomputed) is not None:
            again = f"{done.checked_tokens:,} of {done.tokens:,} tokens, gap {done.max_gap:.1e}"
        name = Path(file.path).name
        name = name if len(name) < MAX_NAME else f"{name[:12]}..."
        title = f"{file.key[:12]} {file.segment}".rstrip() if file.key else name
        signer = file.signer[:16] if file.signer else "nobody"
        rows.append((title, "ok" if file.ok else "FAILED", signer if file.key else "-", again))
    print_table(columns, rows)
    for file in files:
        if file.fault is not None:
            say(f"FAILED {file.fault}")

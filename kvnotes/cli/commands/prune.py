"""`kvnotes prune`: what nobody needs, taken away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.listing import Column, print_table, say, size
from kvnotes.cli.options import DryRun, Json, Quiet
from kvnotes.cli.output import print_json
from kvnotes.cli.stores import StoreFolder, Tenant, open_library
from kvnotes.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvnotes.store import Pruned

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def prune(
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Remove the least recently used beyond it: 20G, 500M."),
    ] = None,
    unused_days: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Remove what was not used for N days.")
    ] = None,
    keep_model: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="Remove segments of other models than these."),
    ] = None,
    store: StoreFolder = None,
    tenant: Tenant = "",
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove leftovers of processes that died, and segments that nothing needs.

    Without options only leftovers go: half-written and damaged files, texts without a segment,
    K/V that no saved session needs. Pinned segments never go.
    """
    from kvnotes.cli.store_records import PruneRecord
    from kvnotes.session.saved import referenced_runs
    from kvnotes.store import Rule

    kept = open_library(store, tenant=tenant).store
    fingerprints = None
    if keep_model:
        known = {entry.fingerprint for entry in kept.entries()}
        fingerprints = [_whole(prefix, known) for prefix in keep_model]
    rule = Rule(
        keep_fingerprints=fingerprints,
        unused_days=unused_days,
        max_nbytes=None if max_size is None else parse_size(max_size),
        keep_runs=referenced_runs(kept),
    )
    gone = kept.prune(rule, dry_run=dry_run)
    if json:
        print_json(PruneRecord.of(gone, dry_run=dry_run).model_dump_json(indent=2))
    else:
        _print(gone, dry_run=dry_run)


def parse_size(text: str) -> int:
    """Return the bytes that a text like 20G or 1.5M means.

    Raises:
        PlanError: It means no size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?)B?", text)
    if match is None:
        raise PlanError(f"{text!r} is no size", hint="write bytes, or 500M, 20G, 1.5T")
    return int(float(match[1]) * _UNITS[match[2]])


def _whole(prefix: str, known: set[str]) -> str:
    """Return the fingerprint that begins so; a wrong one would remove everything."""
    found = [fingerprint for fingerprint in known if fingerprint.startswith(prefix)]
    if len(found) != 1:
        shown = ", ".join(sorted(fingerprint[:12] for fingerprint in known)) or "none"
        raise PlanError(
            f"{len(found)} models here have a fingerprint that begins with {prefix!r}",
            hint=f"the models with segments here: {shown}",
        )
    return found[0]


def _print(gone: Sequence[Pruned], *, dry_run: bool) -> None:
    would = "would remove" if dry_run else "removed"
    if not gone:
        say("nothing to remove")
        return
    columns = [Column("what"), Column("name"), Column("size", number=True), Column("why")]
    rows = []
    for item in gone:
        name = item.name if item.entry is None else _title(item)
        rows.append((item.kind, name, size(item.nbytes), item.reason))
    print_table(columns, rows)
    count = len(gone)
    say(f"{would} {count} file{'' if count == 1 else 's'}, {size(sum(i.nbytes for i in gone))}")


def _title(item: Pruned) -> str:
    entry = item.entry
    assert entry is not None
    name = f"{entry.name}@{entry.version}" if entry.version else entry.name
    return f"{entry.key[:12]} {name} {entry.variant}".rstrip()

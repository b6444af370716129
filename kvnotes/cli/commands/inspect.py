"""`kvnotes inspect`: what a segment's file says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.listing import print_facts, say, size
from kvnotes.cli.options import Json, Quiet
from kvnotes.cli.output import print_json
from kvnotes.cli.stores import StoreFolder, Tenant, find_files, open_file, open_library

if TYPE_CHECKING:
    from kvnotes.cli.store_records import FileRecord

SHOWN_CHARS = 400
"""Characters of the text that are shown unless all of it is asked for."""


def inspect(
    target: Annotated[
        str, typer.Argument(metavar="FILE|SKILL|KEY", help="A file, refunds@3, or a segment's key.")
    ],
    text: Annotated[bool, typer.Option("--text", help="Show the whole text.")] = False,
    store: StoreFolder = None,
    tenant: Tenant = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a segment's file holds; its tensors are not read."""
    from kvnotes.cli.store_records import FileRecord

    library = open_library(store, tenant=tenant)
    records = []
    for path in find_files(library, target):
        opened = open_file(library, path)
        records.append(FileRecord.of(opened, library.store.text(opened.header)))
    if json:
        print_json("[" + ",\n".join(record.model_dump_json(indent=2) for record in records) + "]")
        return
    for number, record in enumerate(records):
        if number:
            say("")
        _print(record, whole=text)


def _print(record: FileRecord, *, whole: bool) -> None:
    name = f"{record.name}@{record.version}" if record.version else record.name
    exact = "bit by bit as computed"
    if not record.exact:
        exact = (
            f"no: {record.payload}, largest error {record.max_error:.1e}, "
            f"rms {record.rms_error:.1e} of its tensor"
        )
    facts = [
        ("file", record.path),
        ("segment", name or "without a name"),
        ("key", record.key),
        ("model", f"{record.model_type} {record.dtype}, fingerprint {record.fingerprint[:16]}"),
        (
            "layout",
            f"{record.layers} layers, {record.kv_heads} KV heads x {record.head_dim}, "
            f"rope {record.rope}",
        ),
        ("tokens", f"{record.tokens:,} behind a preamble of {record.preamble_tokens:,}"),
        ("size", size(record.nbytes)),
        ("exact", exact),
        ("signed by", record.signer or "nobody"),
        ("encrypted", "yes" if record.encrypted else "no: whoever reads it can recover the text"),
        ("made", f"{record.created_at} by " + _versions(record.versions)),
    ]
    facts += [("part of", "a saved session")] if record.kind == "run" else []
    facts += [("tenant", record.tenant)] if record.tenant else []
    facts += [("variant", _values(record.variant))] if record.variant else []
    facts += [
        (f"field {field.name}", f"{field.value!r} at tokens {field.start}..{field.stop}")
        for field in record.fields
    ]
    print_facts(facts)
    if record.text is None:
        say("text: not in this file" + ("" if record.kind == "run" else ", nor in the store"))
        return
    shown = record.text if whole else record.text[:SHOWN_CHARS]
    say(f"text:\n{shown.rstrip()}")
    if len(shown) < len(record.text):
        say(f"... {len(record.text) - len(shown):,} more characters; --text shows them")


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _values(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())

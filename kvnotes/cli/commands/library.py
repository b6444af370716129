"""`kvnotes library`: the skills that are there, and carrying them to other machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.listing import Column, print_facts, print_table, say, size
from kvnotes.cli.options import DryRun, Json, Quiet
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress
from kvnotes.cli.stores import RemoteUrl, StoreFolder, Tenant, open_library

if TYPE_CHECKING:
    from kvnotes.library import Shelf

app = typer.Typer(help="Skills: list, show, share, remove and pin them.", no_args_is_help=True)

_SEGMENT_COLUMNS = (
    Column("segment"),
    Column("model"),
    Column("variant"),
    Column("tokens", number=True),
    Column("size", number=True),
    Column("exact"),
)

Ref = Annotated[str, typer.Argument(metavar="SKILL", help="refunds for the latest, or refunds@3.")]
Refs = Annotated[list[str], typer.Argument(metavar="SKILL...", help="refunds, or refunds@3.")]


@app.command("ls")
def ls(
    name: Annotated[str | None, typer.Argument(metavar="[SKILL]", help="Only this one.")] = None,
    store: StoreFolder = None,
    tenant: Tenant = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List skills, their versions and what is compiled of them."""
    from kvnotes.cli.store_records import SkillList, skill_line

    library = open_library(store, tenant=tenant)
    shelves = library.shelves(name)
    known = {entry.key for shelf in shelves for entry in shelf.entries}
    own = [entry for entry in library.store.entries() if entry.tenant == tenant]
    others = [] if name else [entry for entry in own if entry.key not in known]
    if json:
        print_json(SkillList.of(shelves, others).model_dump_json(indent=2))
        return
    if not shelves:
        say("no skills yet: kvnotes compile FOLDER")
    else:
        columns = ("skill", "kind", "segments", "models", "size", "pinned", "what it is")
        rows = [
            (
                shelf.skill.ref,
                skill_line(shelf.skill),
                f"{len(shelf.entries)}",
                f"{len({entry.fingerprint for entry in shelf.entries})}",
                size(shelf.nbytes),
                "pinned" if shelf.pinned else "",
                shelf.skill.description,
            )
            for shelf in shelves
        ]
        numbers = ("segments", "models", "size")
        print_table([Column(name, number=name in numbers) for name in columns], rows)
    if others:
        nbytes = sum(entry.nbytes for entry in others)
        say(f"and {len(others)} segments of no skill here, {size(nbytes)}")


@app.command("show")
def show(
    ref: Ref,
    store: StoreFolder = None,
    tenant: Tenant = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a skill: its text, fields, variants and compiled segments."""
    from kvnotes.cli.store_records import SkillText, skill_line

    shelf = open_library(store, tenant=tenant).shelf(ref)
    if json:
        print_json(SkillText.of(shelf).model_dump_json(indent=2))
        return
    skill = shelf.skill
    facts = [("skill", skill.ref), ("kind", skill_line(skill))]
    facts += [("what it is", skill.description)] if skill.description else []
    facts += [(f"field {name}", value) for name, value in skill.fields]
    facts += [(f"variants of {name}", ", ".join(values)) for name, values in skill.variants]
    facts += [("pinned", "yes" if shelf.pinned else "no")]
    print_facts(facts)
    if shelf.entries:
        print_table(
            _SEGMENT_COLUMNS,
            [
                (
                    entry.key[:12],
                    entry.fingerprint[:12],
                    entry.variant or "-",
                    f"{entry.num_tokens:,}",
                    size(entry.nbytes),
                    "yes" if not entry.altered else f"no: {entry.altered}",
                )
                for entry in shelf.entries
            ],
        )
    else:
        say("nothing of it is compiled here")
    for title, text in (("compiled behind", skill.preamble), ("text", skill.text)):
        if text:
            say(f"\n{title}:\n{text.rstrip()}")


@app.command("push")
def push(
    refs: Refs,
    remote: RemoteUrl = None,
    store: StoreFolder = None,
    tenant: Tenant = "",
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Upload skills and their compiled segments; what is there already is left alone."""
    library = open_library(store, remote=remote, tenant=tenant)
    shelves = [library.shelf(ref) for ref in refs]
    library.store.remote_tier("push")
    if dry_run:
        _print_changes("would push", shelves, json)
        return
    progress = Progress(wanted=not quiet)
    for shelf in shelves:
        with progress:
            library.push(shelf.skill.ref, _told(progress, f"pushing {shelf.skill.ref}"))
    _print_changes("pushed", shelves, json)


@app.command("pull")
def pull(
    refs: Refs,
    remote: RemoteUrl = None,
    store: StoreFolder = None,
    tenant: Tenant = "",
    model: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="HEX", help="Only segments of this model."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download skills and their compiled segments; every file is verified."""
    library = open_library(store, remote=remote, tenant=tenant)
    progress = Progress(wanted=not quiet)
    shelves = []
    for ref in refs:
        with progress:
            told = _told(progress, f"pulling {ref}")
            shelves.append(library.pull(ref, fingerprint=model, told=told))
    _print_changes("pulled", shelves, json)


@app.command("rm")
def rm(
    refs: Refs,
    store: StoreFolder = None,
    tenant: Tenant = "",
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove skills and their compiled segments from this machine."""
    library = open_library(store, tenant=tenant)
    shelves = [library.shelf(ref) for ref in refs]
    if not dry_run:
        for shelf in shelves:
            library.remove(shelf.skill.ref)
    _print_changes("would remove" if dry_run else "removed", shelves, json)


@app.command("pin")
def pin(
    refs: Refs,
    unpin: Annotated[bool, typer.Option("--unpin", help="Allow eviction again.")] = False,
    store: StoreFolder = None,
    tenant: Tenant = "",
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep compiled segments of skills from being evicted."""
    library = open_library(store, tenant=tenant)
    shelves = [library.shelf(ref) for ref in refs]
    if not dry_run:
        shelves = [library.pin(ref, not unpin) for ref in refs]
    words = "unpin" if unpin else "pin"
    _print_changes(f"would {words}" if dry_run else f"{words}ned", shelves, json)


def _told(progress: Progress, what: str) -> Callable[[str], None]:
    return lambda key: progress.say(f"{what}: {key[:12]}")


def _print_changes(did: str, shelves: list[Shelf], json: bool) -> None:
    from kvnotes.cli.store_records import SkillChanges

    if json:
        print_json(SkillChanges.made(did, shelves).model_dump_json(indent=2))
        return
    for shelf in shelves:
        count = len(shelf.entries)
        segments = f"{count} segment{'' if count == 1 else 's'}, {size(shelf.nbytes)}"
        kept = ", pinned" if shelf.pinned and did != "pinned" else ""
        say(f"{did} {shelf.skill.ref}: {segments}{kept}")

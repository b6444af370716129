"""`kvnotes compile`: a folder of skills, made into segments."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.listing import Column, duration, print_table, say, size
from kvnotes.cli.options import DEFAULT_MODEL, DryRun, Dtype, Json, ModelName, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress
from kvnotes.cli.stores import RemoteUrl, StoreFolder, Tenant, open_library

if TYPE_CHECKING:
    from kvnotes.library import CompilePlan, Library, Unit
    from kvnotes.session import Model

_COLUMNS = (
    Column("skill"),
    Column("tokens", number=True),
    Column("variants", number=True),
    Column("compiled", number=True),
    Column("size", number=True),
    Column("to do", number=True),
)


def compile(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder with a kvnotes.toml.")],
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    store: StoreFolder = None,
    remote: RemoteUrl = None,
    tenant: Tenant = "",
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Segments compiled at once.")
    ] = 1,
    int8: Annotated[
        bool, typer.Option("--int8", help="Store in 8 bits: half the size of bfloat16, inexact.")
    ] = False,
    max_variants: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most variants of one skill.")
    ] = 64,
    threads: Threads = None,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a folder of skills; what is compiled already is left alone."""
    from kvnotes.engine.base import set_num_threads
    from kvnotes.library import plan_compile, read_folder

    found = read_folder(folder)
    progress = Progress(wanted=not quiet)
    set_num_threads(threads)
    library = open_library(store, remote=remote, tenant=tenant)
    try:
        progress.say(f"loading {model}")
        loaded = _load(model, dtype, library)
        skills = [library.catalog.preview(skill) for skill in found.skills]
        plan = plan_compile(loaded, skills, int8=int8, max_variants=max_variants)
        progress.clear()
        if not json:
            _print_plan(loaded, plan)
        elapsed_ms = None
        if not dry_run:
            for skill in skills:  # only now: what is refused above gets no version
                library.add(skill)
            elapsed_ms = _compile(loaded, plan.missing, workers, int8, wanted=not quiet)
    finally:
        progress.clear()
    _print_outcome(library, loaded, plan, elapsed_ms, json=json)


def _load(model: str, dtype: str | None, library: Library) -> Model:
    from kvnotes.session import load

    return load(model, dtype=dtype, store=library.store)


def _print_plan(model: Model, plan: CompilePlan) -> None:
    """Say what there is to do before it is done: a product of fields may be dear."""
    say(f"{model.name}, {model.engine.spec.dtype}, {model.engine.fingerprint[:12]}")
    rows = []
    for cost in plan.costs:
        done = f"{cost.num_present}/{cost.num_units}"
        todo = duration(cost.predicted_ms) if cost.num_present < cost.num_units else "-"
        rows.append(
            (
                cost.skill.ref,
                f"{cost.num_tokens:,}",
                f"{cost.num_variants}",
                "on first use" if cost.skipped else done,
                size(cost.nbytes),
                todo,
            )
        )
    print_table(_COLUMNS, rows)
    for cost in plan.costs:
        if cost.skipped:
            say(f"{cost.skill.ref}: {cost.skipped}")


def _compile(
    model: Model, units: Sequence[Unit], workers: int, int8: bool, *, wanted: bool
) -> float:
    """Compile, with a bar while stderr is a terminal; return the time in milliseconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    from kvnotes.library import compile_units

    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    disabled = not wanted or not console.is_terminal
    with Bar(*columns, console=console, transient=True, disable=disabled) as bar:
        task = bar.add_task("compiling", total=len(units))
        for done in compile_units(model, units, workers=workers, int8=int8):
            name = f"{done.unit.skill.ref} {done.unit.variant}".rstrip()
            bar.update(task, completed=done.num_done, description=f"compiled {name}")
    return (time.perf_counter() - start) * 1e3


def _print_outcome(
    library: Library, model: Model, plan: CompilePlan, elapsed_ms: float | None, *, json: bool
) -> None:
    from kvnotes.cli.store_records import CompileRecord

    disk = library.store.disk
    assert disk is not None
    if json:
        identity = (model.name, model.engine.fingerprint)
        record = CompileRecord.of(identity, str(disk.root), plan, elapsed_ms=elapsed_ms)
        print_json(record.model_dump_json(indent=2))
        return
    count = len(plan.missing)
    what = f"{count} segment{'' if count == 1 else 's'}"
    if elapsed_ms is None:
        say(f"would compile {what} in about {duration(plan.predicted_ms)}; nothing was changed")
    elif count:
        say(f"compiled {what} in {duration(elapsed_ms)} into {disk.root}")
    else:
        say(f"everything is compiled already in {disk.root}")

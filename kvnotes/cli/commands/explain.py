"""`kvnotes explain`: the plans of a scenario, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.options import Json, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress

if TYPE_CHECKING:
    from kvnotes.cli.explain import Explainer
    from kvnotes.session import Model


def explain(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or - for standard input.")
    ],
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Strategy of edits, instead of the scenario's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="smollm2-135m, a hub id, a folder or a .gguf file, instead of the scenario's.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="float32, bfloat16 or float16, instead of the scenario's."
        ),
    ] = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the plan of every turn of a scenario, before anything runs.

    For each turn: what is reused, moved and computed, in tokens and with the names of
    messages, segments and fields; why; and the predicted time to the first token. The model
    is loaded, for its shapes, its tokenizer and the speed of this machine; no prompt is
    computed and nothing is generated. Replies are taken to be as long as a turn allows.
    """
    from kvnotes.cli.check import prepare
    from kvnotes.cli.explain import Explainer
    from kvnotes.cli.run import load_prepared
    from kvnotes.cli.source import read_source

    overrides = {"strategy": strategy, "model": model, "dtype": dtype}
    prepared = prepare(read_source(scenario), overrides)
    progress = Progress(wanted=not quiet)
    try:
        loaded, num_threads = load_prepared(prepared, threads, progress.say)
        explainer = Explainer(prepared, loaded)
    finally:
        progress.clear()
    show = _as_json if json else _as_table
    show(explainer, loaded, num_threads)


def _as_json(explainer: Explainer, model: Model, num_threads: int) -> None:
    """Print one JSON object, when all turns are planned."""
    from kvnotes.cli.explain_records import ExplainRecord
    from kvnotes.cli.run import versions

    turns = [explained.record for explained in explainer]
    record = ExplainRecord(
        model=model.name,
        fingerprint=model.engine.fingerprint,
        dtype=model.engine.spec.dtype,
        versions=versions(),
        threads=num_threads,
        cost=explainer.cost,
        segments=explainer.segments,
        turns=turns,
        totals=explainer.totals,
    )
    print_json(record.to_json())


def _as_table(explainer: Explainer, model: Model, num_threads: int) -> None:
    from kvnotes.cli.explain_table import ExplainTable
    from kvnotes.cli.run import versions
    from kvnotes.cli.table import stdout_console

    table = ExplainTable(stdout_console())
    table.start(
        model=model.name,
        fingerprint=model.engine.fingerprint,
        dtype=model.engine.spec.dtype,
        threads=num_threads,
        versions=versions(),
        cost=explainer.cost,
        segments=explainer.segments,
    )
    for explained in explainer:
        table.add(explained)
    table.finish(explainer.totals)

"""`kvnotes run`: a scenario, turn by turn, compared with full prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.options import Json, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress

if TYPE_CHECKING:
    from kvnotes.cli.check import Prepared
    from kvnotes.session import Model


def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or - for standard input.")
    ],
    json: Json = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Compute references beside each turn, or none."
        ),
    ] = True,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Strategy of edits, instead of the scenario's."),
    ] = None,
    threads: Threads = None,
    repeat: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1000, help="Runs; times are medians over them."),
    ] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the scenario; loads no model.")
    ] = False,
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
    quiet: Quiet = False,
) -> None:
    """Run a scenario and compare each turn with full prefill."""
    from kvnotes.cli.check import prepare
    from kvnotes.cli.run import load_prepared
    from kvnotes.cli.source import read_source

    overrides = {"strategy": strategy, "model": model, "dtype": dtype}
    prepared = prepare(read_source(scenario), overrides)
    if check:
        typer.echo(f"ok: {prepared.summary}")
        return
    progress = Progress(wanted=not quiet)
    try:
        loaded, num_threads = load_prepared(prepared, threads, progress.say)
        execution = _Execution(prepared, loaded, num_threads, compare, repeat, progress)
        execution.as_json() if json else execution.as_table()
    finally:
        progress.clear()


class _Execution:
    """One run, in either output format."""

    def __init__(
        self,
        prepared: Prepared,
        model: Model,
        num_threads: int,
        compare: bool,
        repeat: int,
        progress: Progress,
    ) -> None:
        from kvnotes.cli.run import Runner, versions

        self._model, self._num_threads, self._versions = model, num_threads, versions()
        self._compare, self._progress = compare, progress
        self._runner = Runner(prepared, model, compare=compare, repeat=repeat, say=progress.say)

    def as_json(self) -> None:
        """Print one JSON object, when all turns are done."""
        from kvnotes.cli.records import RunRecord

        record = RunRecord(
            model=self._model.name,
            fingerprint=self._model.engine.fingerprint,
            versions=self._versions,
            threads=self._num_threads,
            turns=[done.record for done in self._runner],
        )
        self._progress.clear()
        print_json(record.to_json())

    def as_table(self) -> None:
        """Print each turn when it is done."""
        from kvnotes.cli.table import Table, stdout_console

        self._progress.clear()
        table = Table(stdout_console(), compare=self._compare)
        table.start(
            model=self._model.name,
            fingerprint=self._model.engine.fingerprint,
            dtype=self._model.engine.spec.dtype,
            threads=self._num_threads,
            versions=self._versions,
        )
        table.segments(self._runner.compiled, self._runner.compile_ms)
        for done in self._runner:
            self._progress.clear()
            table.add(done)
        table.finish()

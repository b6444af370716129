"""The `kvnotes` command.

Owns the options. Data goes to stdout, all else to stderr. Nothing here imports torch until
a model is loaded, so help and checks take no time.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import kvnotes
from kvnotes.cli.failures import guarded
from kvnotes.cli.progress import Progress

if TYPE_CHECKING:
    from kvnotes.cli.check import Prepared
    from kvnotes.session import Model

HELP_WIDTH = 90
"""Widest help text; the copy in docs/cli.md has exactly this width."""

app = typer.Typer(
    name="kvnotes",
    help="Edit and compose the KV cache of a language model instead of recomputing it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"kvnotes {kvnotes.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _kvnotes(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(help="Run a scenario and compare each turn with full prefill.")
def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or - for standard input.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=512, help="CPU threads; torch's choice by default."),
    ] = None,
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
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Run a scenario."""
    from kvnotes.cli.check import prepare
    from kvnotes.cli.source import read_source

    overrides = {"strategy": strategy, "model": model, "dtype": dtype}
    prepared = prepare(read_source(scenario), overrides)
    if check:
        typer.echo(f"ok: {prepared.summary}")
        return
    progress = Progress(wanted=not quiet)
    try:
        loaded, num_threads = _load(prepared, threads, progress)
        execution = _Execution(prepared, loaded, num_threads, compare, repeat, progress)
        execution.as_json() if json else execution.as_table()
    finally:
        progress.clear()


def _load(prepared: Prepared, threads: int | None, progress: Progress) -> tuple[Model, int]:
    """Load the model; its conversion, on first use, shows a bar of its own."""
    from kvnotes.engine.base import set_num_threads
    from kvnotes.engine.models import resolve_model
    from kvnotes.session import load

    num_threads = set_num_threads(threads)
    resolve_model(prepared.model)
    progress.say(f"loading {prepared.model}")
    model = load(
        prepared.model, dtype=prepared.scenario.dtype, chat_template=prepared.chat_template
    )
    return model, num_threads


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
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8 whatever the locale is
        print(record.to_json())

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


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(guarded(lambda: _call(list(sys.argv[1:] if args is None else args))))


def help_text(command: Sequence[str], width: int) -> str:
    """Return the help of a command, `[]` for kvnotes itself."""
    import contextlib

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        app(
            [*command, "--help"],
            prog_name="kvnotes",
            standalone_mode=False,
            terminal_width=width,
        )
    return shown.getvalue()


def _call(args: list[str]) -> int:
    code = app(args or ["--help"], prog_name="kvnotes", standalone_mode=False)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()

"""The `kvnotes` command.

Owns the list of commands. Data goes to stdout, all else to stderr. Nothing here imports
torch until a model is loaded, so help and checks take no time.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvnotes
from kvnotes.cli.commands import (
    bench,
    bench_serve,  # noqa: F401 - it adds itself to bench
    chat,
    compile,
    completion,
    doctor,
    explain,
    inspect,
    library,
    lint,
    prune,
    run,
    verify,
    vllm,
)
from kvnotes.cli.failures import guarded

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


app.command("run")(run.run)
app.command("compile")(compile.compile)
app.add_typer(library.app, name="library")
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("prune")(prune.prune)
app.command("chat")(chat.chat)
app.command("lint")(lint.lint)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(vllm.app, name="vllm")
app.command("completion")(completion.completion)


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


def command_paths() -> list[list[str]]:
    """Return the words of every command, `[]` for kvnotes itself, in the order of the help."""
    paths: list[list[str]] = [[]]

    def walk(command: object, path: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            paths.append([*path, name])
            walk(inner, [*path, name])

    walk(typer.main.get_command(app), [])
    return paths


def _call(args: list[str]) -> int:
    completion.enable()
    code = app(args or ["--help"], prog_name="kvnotes", standalone_mode=False)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()

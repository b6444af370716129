"""`kvnotes completion`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

from enum import Enum
from json import dumps
from typing import Annotated

import typer

from kvnotes.cli.options import Json, Quiet
from kvnotes.cli.output import print_json

PROGRAM = "kvnotes"
VARIABLE = "_KVNOTES_COMPLETE"
"""Set by the script when it asks for completions; typer reads it."""


class Shell(str, Enum):
    """Shells that typer has scripts for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"


def enable() -> None:
    """Let typer answer the script's questions; without the options it would add to the help."""
    from typer._completion_classes import completion_init

    completion_init()


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a script that completes commands and options in a shell.

    \b
    bash        eval "$(kvnotes completion bash)" in ~/.bashrc
    zsh         eval "$(kvnotes completion zsh)" in ~/.zshrc, behind compinit
    fish        kvnotes completion fish > ~/.config/fish/completions/kvnotes.fish
    powershell  kvnotes completion powershell >> $PROFILE
    """  # noqa: D301  (click takes a backspace to mean that lines are not joined)
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    if json:
        print_json(dumps({"shell": shell.value, "script": script}))
    else:
        typer.echo(script)

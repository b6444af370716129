"""Errors at the border: one message, one hint, one exit code, no traceback.

Owns the mapping; every class of `kvnotes.errors` brings its own code.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

import kvnotes
from kvnotes.errors import EngineError, KVNotesError, StorageError

FINDINGS_CODE = 1
"""A check ran and found something; no error raises it."""
USAGE_CODE = 2
INTERNAL_CODE = 70
INTERRUPTED_CODE = 130
BROKEN_PIPE_CODE = 141

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""typer brings its own copy of click's class, and does not export it."""
_PACKAGE = Path(kvnotes.__file__).parent


def guarded(body: Callable[[], int]) -> int:
    """Run a command; return its exit code, whatever happens."""
    try:
        return _run(body)
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE_CODE


def _run(body: Callable[[], int]) -> int:
    try:
        code = body()
        sys.stdout.flush()
        if code == INTERRUPTED_CODE:  # typer makes this of Ctrl-C
            raise KeyboardInterrupt
        return code
    except KVNotesError as error:
        return report(error.message, error.hint, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return report("interrupted", "", INTERRUPTED_CODE)
    except BrokenPipeError:
        raise
    except SystemExit as stop:  # typer makes this of a closed pipe
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvnotes"
        return report(_usage(error), f"see {command} --help", USAGE_CODE)
    except MemoryError:
        return report("out of memory", _MEMORY_HINT, EngineError.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise BrokenPipeError from error
        named = f" {error.filename!r}" if error.filename else ""
        hint = "check the disk, the folder and its permissions"
        return report(f"{error.strerror or error}{named}", hint, StorageError.exit_code)
    except Exception as error:  # the last border: a fault of ours is no reason for a traceback
        if _is_out_of_memory(error):
            return report("out of memory", _MEMORY_HINT, EngineError.exit_code)
        message = " ".join(str(error).split())
        return report(
            f"internal error: {type(error).__name__}: {message} (at {_place(error)})",
            "this is a fault of kvnotes; please report it with the command and the scenario",
            INTERNAL_CODE,
        )


_MEMORY_HINT = "use a smaller model or dtype: bfloat16, shorter segments, or --no-compare"


def report(message: str, hint: str, code: int) -> int:
    """Print an error to stderr, coloured on a terminal; return the exit code."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.no_color = True
    with suppress(OSError):  # stderr is closed or full: the exit code has to do
        console.print(Text.assemble(("error:", "bold red"), f" {_line(message)}"))
        if hint:
            console.print(Text.assemble(("hint:", "bold"), f" {_line(hint)}"))
    return code


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _usage(error: Exception) -> str:
    text = str(getattr(error, "format_message", lambda: error)())
    return " ".join(text.replace("Value error, ", "").split()).rstrip(".")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "allocate" in str(error).lower()


def _place(error: Exception) -> str:
    """Return the last line of our own code that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    if not ours:
        return "an unknown place"
    return f"{Path(ours[-1].filename).relative_to(_PACKAGE)}:{ours[-1].lineno}"


def _drop_stdout() -> None:
    """Keep the interpreter from complaining about a closed pipe when it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""`kvnotes doctor`: what is supported here, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.options import DEFAULT_MODEL, Dtype, Json, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress

if TYPE_CHECKING:
    from kvnotes.cli.doctor_model import ModelCheckup
    from kvnotes.cli.doctor_records import Check


def doctor(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="smollm2-135m, a hub id, a folder or a .gguf file."),
    ] = DEFAULT_MODEL,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Check the environment alone.")
    ] = False,
    dtype: Dtype = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the environment and a model: what is supported, and why not.

    Each line is ok, a warning (it works, but see the way out) or a fault. The exit code is 0
    without faults, else that of the error which the first fault would raise.
    """
    from kvnotes.cli.doctor_model import ModelCheckup

    progress = Progress(wanted=not quiet)
    checkup = None if no_model else ModelCheckup(model, dtype, progress.say)
    printer = None if json else _Printer(progress)
    checks: list[Check] = []
    try:
        for check in _checks(checkup, threads):
            checks.append(check)
            if printer is not None:
                printer.add(check)
    finally:
        progress.clear()
    exit_code = next((check.exit_code for check in checks if check.status == "fault"), 0)
    if printer is None:
        _print_record(None if no_model else model, checkup, checks, exit_code)
    else:
        printer.finish(checks)
    raise typer.Exit(exit_code)


def _checks(checkup: ModelCheckup | None, threads: int | None) -> Iterator[Check]:
    from kvnotes.cli.doctor import check_environment
    from kvnotes.cli.doctor_records import Check
    from kvnotes.errors import EngineError
    from kvnotes.settings import load_settings

    num_threads: int | None = None
    missing: ImportError | None = None
    try:
        from kvnotes.engine.base import set_num_threads

        num_threads = set_num_threads(threads)
    except ImportError as error:
        missing = error
    unfit: list[str] = []
    for check in check_environment(load_settings(), num_threads):
        yield check
        if check.status == "fault" and check.error == EngineError.__name__:
            unfit.append(check.name)
    if missing is not None and not unfit:
        hint = "install kvnotes anew, with what it needs"
        yield Check.fault("environment", "imports", EngineError(str(missing), hint=hint))
        unfit.append("imports")
    if checkup is None:
        return
    if unfit:
        yield Check.warning(
            "model", "model", f"not checked: see {', '.join(unfit)}", "mend the environment first"
        )
        return
    yield from checkup


def _print_record(
    model: str | None, checkup: ModelCheckup | None, checks: list[Check], exit_code: int
) -> None:
    from kvnotes.cli.doctor_records import DoctorRecord
    from kvnotes.cli.run import versions

    record = DoctorRecord(
        usable=exit_code == 0,
        exit_code=exit_code,
        versions=versions(),
        model=model,
        checks=checks,
        layout=checkup and checkup.layout,
        gate=checkup and checkup.gate,
        cost=checkup and checkup.cost,
        per_1000_tokens=checkup and checkup.predicted,
        template=checkup and checkup.template,
        tokenizer=checkup and checkup.tokenizer,
    )
    print_json(record.to_json())


class _Printer:
    """Prints each line of the checklist when it is known."""

    def __init__(self, progress: Progress) -> None:
        from kvnotes.cli.table import stdout_console

        self._progress, self._console = progress, stdout_console()
        self._section = ""

    def add(self, check: Check) -> None:
        """Print one line, and its way out."""
        from rich.text import Text

        from kvnotes.cli.table import clean

        self._progress.clear()
        if check.section != self._section:
            if self._section:
                self._console.print()
            self._section = check.section
            self._console.print(Text(check.section, "bold"))
        status = f"{check.status:<{_STATUS_WIDTH}}"
        name = f"{check.name:<{_NAME_WIDTH}}"
        head = Text.assemble((status, _STYLES[check.status]), (name, "bold"))
        self._hang(head, clean(check.fact, " "))
        if check.way_out is not None:
            self._hang(Text(" " * len(head)), f"way out: {clean(check.way_out, ' ')}")

    def finish(self, checks: list[Check]) -> None:
        """Print the outcome."""
        from rich.text import Text

        num = {status: sum(check.status == status for check in checks) for status in _STYLES}
        counts = [_counted(num[status], status) for status in ("fault", "warning") if num[status]]
        usable = "not usable" if num["fault"] else "usable"
        style = _STYLES["fault"] if num["fault"] else _STYLES["ok"]
        self._console.print()
        text = f"{usable}: {', '.join(counts) or 'no complaints'}"
        self._console.print(Text(text, f"bold {style}"))

    def _hang(self, head: object, text: str) -> None:
        """Print text whose continuation stands under its beginning."""
        from rich.text import Text

        assert isinstance(head, Text)
        room = max(20, self._console.width - len(head))
        for index, part in enumerate(Text(text).wrap(self._console, room)):
            part.rstrip()
            lead = head if index == 0 else Text(" " * len(head))
            self._console.print(lead.copy().append_text(part))


_STYLES = {"ok": "green", "warning": "yellow", "fault": "red"}
_STATUS_WIDTH = 9
_NAME_WIDTH = 17


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

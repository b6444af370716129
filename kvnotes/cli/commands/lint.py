"""`kvnotes lint`: what in a prompt or a log makes prefix caches miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.failures import FINDINGS_CODE
from kvnotes.cli.options import Json, Quiet
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress

if TYPE_CHECKING:
    from kvnotes.cli.lint_records import LintRecord
    from kvnotes.cli.lint_source import LintInput
    from kvnotes.lint import CountTokens


def lint(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT|LOG",
            help="A text, a scenario, a JSON request, a JSONL log of requests, or - for "
            "standard input.",
        ),
    ],
    json: Json = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if anything is found; for CI.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A kind not to report, such as date; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Count tokens as this model does: smollm2-135m, a hub id, a folder or a .gguf "
            "file. Without it they are estimated, and marked ~.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Find what changes from request to request, and what it invalidates."""
    from kvnotes.cli.lint_source import read_input

    progress = Progress(wanted=not quiet)
    try:
        ignored = _checked(ignore or [])
        progress.say("reading")
        taken = read_input(prompt)
        count_tokens = None if model is None else _counter(model, progress)
        progress.say("searching")
        record = _record(taken, model, count_tokens, ignored)
    finally:
        progress.clear()
    if json:
        print_json(record.to_json())
    else:
        _show(record)
    found = record.findings or (record.log is not None and record.log.causes)
    if check and found:
        raise typer.Exit(FINDINGS_CODE)


def _checked(kinds: list[str]) -> frozenset[str]:
    from kvnotes.errors import nearest
    from kvnotes.lint import CHANGES, KINDS

    for kind in kinds:
        if kind not in (*KINDS, *CHANGES):
            raise typer.BadParameter(
                f"no kind {kind!r} ({nearest(kind, (*KINDS, *CHANGES))})", param_hint="--ignore"
            )
    return frozenset(kinds)


def _counter(model: str, progress: Progress) -> CountTokens:
    """Return a counter of a model's tokens; its weights stay where they are."""
    from kvnotes.engine.models import load_tokenizer, resolve_model
    from kvnotes.lint import OffsetCounter
    from kvnotes.prompt import PromptTokenizer

    resolved = resolve_model(model)
    progress.say(f"loading the tokenizer of {model}")
    tokenizer = PromptTokenizer(load_tokenizer(resolved))
    return OffsetCounter(lambda text: tokenizer.piece(text).stops)


def _record(
    taken: LintInput, model: str | None, count_tokens: CountTokens | None, ignore: frozenset[str]
) -> LintRecord:
    from kvnotes.cli.lint_records import log_record, prompt_record
    from kvnotes.lint import best_saving, lint_parts, lint_requests, num_tokens

    if taken.taken_as == "log":
        report = lint_requests(taken.requests, count_tokens=count_tokens, ignore=ignore)
        return log_record(taken, report, tokenizer=model)
    findings = lint_parts(taken.parts, count_tokens=count_tokens, ignore=ignore)
    total = sum(num_tokens(part.text, count_tokens) for part in taken.parts)
    return prompt_record(taken, findings, best_saving(findings), tokenizer=model, num_tokens=total)


def _show(record: LintRecord) -> None:
    from kvnotes.cli.lint_table import LintTable
    from kvnotes.cli.table import stdout_console

    LintTable(stdout_console(), record).show()

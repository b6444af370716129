"""`kvnotes bench`: what it costs on this machine, with this model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvnotes.cli.listing import Column, console, print_table, say
from kvnotes.cli.options import DEFAULT_MODEL, Dtype, Json, ModelName, Quiet, Threads
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress
from kvnotes.errors import PlanError

if TYPE_CHECKING:
    from kvnotes.bench.result import BenchResult

app = typer.Typer(
    help="Measure splices, edits, decoding, files, sharing and serving here.",
    no_args_is_help=True,
)

Lengths = Annotated[str, typer.Option(metavar="N,N...", help="Tokens of the compiled segment.")]
New = Annotated[
    str, typer.Option("--new", metavar="N,N...", help="New tokens behind it; the first is usual.")
]
Runs = Annotated[
    int, typer.Option(metavar="N", min=1, help="Timed runs of each arm, after a warm-up.")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="FILE", help="Text to take, instead of invented rules."),
]
Full = Annotated[
    bool, typer.Option("--full/--no-full", help="Time full prefills, which take the longest.")
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Where JSON and plots (PNG, SVG) are written.")
]

DEFAULT_LENGTHS, DEFAULT_OUT = "1536,3072,6144", Path("bench-results")


@app.command()
def compose(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Lengths = DEFAULT_LENGTHS,
    new: New = "32",
    runs: Runs = 5,
    text: Texts = None,
    full: Full = True,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure other methods and packages as well.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model for llama.cpp, with --peers.")
    ] = None,
    out: Out = DEFAULT_OUT,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time to first token of a splice.

    Beside an exact prefix hit, a full prefill, and with --peers other methods.
    """
    given = {"new_tokens": new, "full": full, "peers": peers, "gguf": gguf}
    _run("compose", model, dtype, lengths, runs, text, out, threads, json, quiet, given)


@app.command()
def edit(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Lengths = DEFAULT_LENGTHS,
    runs: Runs = 5,
    text: Texts = None,
    full: Full = True,
    out: Out = DEFAULT_OUT,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time to first token after an edit.

    By strategy, and after many edits of one field.
    """
    _run("edit", model, dtype, lengths, runs, text, out, threads, json, quiet, {"full": full})


@app.command()
def decode(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Lengths = DEFAULT_LENGTHS,
    new: New = "32",
    runs: Runs = 5,
    text: Texts = None,
    out: Out = DEFAULT_OUT,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time per token over a spliced segment.

    Beside transformers' own caches on the same model.
    """
    _run(
        "decode", model, dtype, lengths, runs, text, out, threads, json, quiet, {"new_tokens": new}
    )


@app.command()
def store(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Lengths = DEFAULT_LENGTHS,
    runs: Runs = 5,
    text: Texts = None,
    full: Full = True,
    out: Out = DEFAULT_OUT,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Saving and loading a compiled segment.

    Beside reading and writing its bytes alone, and computing it again.
    """
    _run("store", model, dtype, lengths, runs, text, out, threads, json, quiet, {"full": full})


@app.command()
def share(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Lengths = "6144",
    new: New = "32",
    sessions: Annotated[
        str, typer.Option(metavar="N,N...", help="Conversations over one segment.")
    ] = "1,2,4,8,16",
    runs: Runs = 5,
    text: Texts = None,
    out: Out = DEFAULT_OUT,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Conversations over one segment.

    Time of a common step, and memory.
    """
    given = {"new_tokens": new, "sessions": sessions}
    _run("share", model, dtype, lengths, runs, text, out, threads, json, quiet, given)


def _run(
    name: str,
    model: str,
    dtype: str | None,
    lengths: str,
    runs: int,
    texts: Sequence[Path] | None,
    out: Path,
    threads: int | None,
    json: bool,
    quiet: bool,
    given: Mapping[str, Any],
) -> None:
    from importlib import import_module

    import kvnotes
    from kvnotes.bench.options import BenchOptions
    from kvnotes.bench.text import bench_text
    from kvnotes.engine.base import set_num_threads

    more: dict[str, Any] = {k: numbers(k, v) if isinstance(v, str) else v for k, v in given.items()}
    options = BenchOptions(lengths=numbers("lengths", lengths), runs=runs, **more)
    content = [read(path) for path in texts or ()]
    out.mkdir(parents=True, exist_ok=True)
    set_num_threads(threads)
    with Progress(wanted=not quiet) as progress:
        progress.say(f"loading {model}")
        loaded = kvnotes.load(model, dtype=dtype or "float32")
        text = bench_text(loaded, content, max(options.lengths))
        text.segment(max(options.lengths))
        run = import_module(f"kvnotes.bench.{name}").run
        result: BenchResult = run(loaded, text, options, progress.say)
    show(result, out, json=json)


def show(result: BenchResult, out: Path, *, json: bool) -> None:
    """Write a result into a folder and print it."""
    written = result.write(out)
    if json:
        print_json(result.to_json())
        return
    _print(result)
    say("written: " + ", ".join(str(path) for path in written))
    if len(written) == 1:
        say("no plot: pip install 'kvnotes[plots]'")


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of an option like 1,2,3.

    Raises:
        PlanError: It is no list of whole numbers above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        option = {"new_tokens": "new"}.get(name, name)
        raise PlanError(
            f"--{option} {text!r} is no list of whole numbers above 0", hint="write 1536,6144"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def read(path: Path) -> str:
    """Return the content of a text file.

    Raises:
        PlanError: It cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise PlanError(f"cannot read {path}: {reason}", hint="give a text file") from error


def _print(result: BenchResult) -> None:
    """Print every table, and how the costs grow."""
    from kvnotes.bench.result import threads_of

    m = result.machine
    say(f"{m['model']}, {m['dtype']}, {threads_of(m)}, {m['cpu']}, torch {m['torch']}")
    for table in result.tables:
        say("")
        timed = any(isinstance(value, Mapping) for row in table.rows for value in row.values())
        say(table.title + (" (ms: median [least-most])" if timed else ""))
        _print_rows(table.rows)
        if table.note:
            say(table.note)
    found = {name: value for name, value in result.exponents.items() if value is not None}
    if found:
        say("")
        say("how costs grow, as a power of what is named")
        columns = [Column("cost"), Column("exponent", number=True)]
        print_table(columns, [(name, f"{value:.2f}") for name, value in found.items()])


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows; turned, a column for each, where they would be too wide."""
    from kvnotes.bench.result import shown

    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([shown(row.get(name)) for name in names] for row in rows)]
    turned = [list(line) for line in zip(*lines, strict=True)]
    width = sum(max(map(len, column)) + _GAP for column in turned)
    if width > console().width:
        lines = turned
    head, *body = lines
    print_table([Column(head[0]), *(Column(name, number=True) for name in head[1:])], body)


_GAP = 2
"""Blanks between columns."""

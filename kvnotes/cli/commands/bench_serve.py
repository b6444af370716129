"""`kvnotes bench serve`: a vLLM server under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvnotes.cli.commands import bench
from kvnotes.cli.options import DEFAULT_MODEL, Dtype, Json, ModelName, Quiet
from kvnotes.cli.progress import Progress
from kvnotes.errors import EngineError, PlanError

if TYPE_CHECKING:
    from kvnotes.bench.result import BenchResult
    from kvnotes.bench.serve import ServeOptions
    from kvnotes.prompt import PromptTokenizer
    from kvnotes.vllm.launch import Server

Rates = Annotated[
    str,
    typer.Option(metavar="R,R...", help="Requests per second; all at once is measured always."),
]
Places = Annotated[
    str, typer.Option(metavar="N,N...", help="Where the field stands, in percent of the policy.")
]


@bench.app.command()
def serve(
    model: ModelName = DEFAULT_MODEL,
    dtype: Dtype = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,N...", help="Tokens of the policy.")
    ] = "2048,7168",
    rates: Rates = "0.5,1",
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests for each arm at each rate.")
    ] = 16,
    blocks: Annotated[
        int, typer.Option(metavar="N", min=1, help="Parts of them, between which arms take turns.")
    ] = 2,
    places: Places = "0,25,50,75,95",
    output: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each reply.")] = 16,
    bound: Annotated[
        float, typer.Option(metavar="MS", min=0, help="First tokens within this count as good.")
    ] = 1000.0,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1, help="A request that takes longer has failed.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the arrivals.")] = 0,
    text: bench.Texts = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server that runs; it keeps the compiled policy."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Interpreter with vLLM, for a server of this command."),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start it without the plug-in of kvnotes.")
    ] = False,
    block_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block of that server.")
    ] = 32,
    cache: Annotated[
        int, typer.Option(metavar="GIB", min=1, help="Its memory for K/V, on CPUs.")
    ] = 4,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Have vLLM compile the model; it starts later.")
    ] = False,
    out: bench.Out = bench.DEFAULT_OUT,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=512, help="CPUs of the server; all by default."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A vLLM server under load while a value changes in every request.

    The value in the prefix, at several places, against an erratum, the value at the end, a late
    system message, and with the plug-in spliced and refreshed policies: time to first token,
    throughput, cache hits beside what is possible, and what is answered.
    """
    from tempfile import TemporaryDirectory

    from kvnotes.bench.serve import ServeOptions
    from kvnotes.bench.serve.load import Address
    from kvnotes.bench.text import long_text
    from kvnotes.engine.models import load_tokenizer, resolve_model
    from kvnotes.prompt import PromptTokenizer
    from kvnotes.vllm.launch import num_threads

    options = ServeOptions(
        lengths=bench.numbers("lengths", lengths),
        rates=_rates(rates),
        requests=requests,
        blocks=blocks,
        output_tokens=output,
        places=_places(places),
        bound_ms=bound,
        timeout_s=timeout,
        seed=seed,
    )
    if url is not None:
        Address(url)
        _refuse_both({"--python": python is not None, "--stock": stock, "--compiled": compiled})
    content = [bench.read(path) for path in text or ()]
    out.mkdir(parents=True, exist_ok=True)
    with Progress(wanted=not quiet) as progress, TemporaryDirectory() as store:
        resolved = resolve_model(model)
        tokenizer = PromptTokenizer(load_tokenizer(resolved))
        long = long_text(tokenizer, content, max(options.lengths))
        machine: dict[str, Any] = {"model": resolved.name, "dtype": dtype or "float32"}
        if url is not None:
            machine["threads"] = threads or 0
            result = _measure(url, tokenizer, machine, long, options, progress)
        else:
            server = _server(
                model,
                machine["dtype"],
                python=python,
                threads=threads,
                store=None if stock else Path(store),
                more={"block_size": block_size, "cache_gib": cache, "eager": not compiled},
            )
            progress.say(f"starting a server, its log is {server.launch.log}")
            machine["threads"] = num_threads(server.launch)
            machine["server"] = _shown(server)
            with server:
                try:
                    result = _measure(server.url, tokenizer, machine, long, options, progress)
                except EngineError as error:
                    log = server.launch.log
                    raise EngineError(error.message, hint=f"see the server's log, {log}") from error
    bench.show(result, out, json=json)


def _refuse_both(given: dict[str, bool]) -> None:
    for option, is_given in given.items():
        if is_given:
            raise PlanError(
                f"--url names a server that runs, {option} is about a new one",
                hint="leave one of them out",
            )


def _server(
    model: str,
    dtype: str,
    *,
    python: Path | None,
    threads: int | None,
    store: Path | None,
    more: dict[str, Any],
) -> Server:
    """Return a server that can be started; with a store it has the plug-in."""
    from kvnotes.vllm.launch import Plugin, Server, ServerOptions, plan_launch

    plugin = None if store is None else Plugin(store=store, allow_compile=True)
    return Server(
        plan_launch(
            ServerOptions(
                model=model, dtype=dtype, python=python, threads=threads, plugin=plugin, **more
            )
        )
    )


def _measure(
    url: str,
    tokenizer: PromptTokenizer,
    machine: dict[str, Any],
    text: str,
    options: ServeOptions,
    progress: Progress,
) -> BenchResult:
    from kvnotes.bench.result import command, machine_facts
    from kvnotes.bench.serve import Target, run
    from kvnotes.bench.serve.server import ServerClient
    from kvnotes.engine.base import set_num_threads

    set_num_threads(1)  # of this process, which only sends and receives
    facts = {**machine_facts(), **machine, "command": command()}
    client = ServerClient(url, timeout_s=options.timeout_s)
    return run(Target(client, tokenizer, facts), text, options, progress.say)


def _shown(server: Server) -> str:
    """Return the command of a server without what is only its place on this machine."""
    return " ".join(server.launch.argv[3:])


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise PlanError(
            f"--rates {text!r} is no list of numbers", hint="write 0.5,1, or '' for none"
        ) from error
    return tuple(dict.fromkeys(found))


def _places(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise PlanError(
            f"--places {text!r} is no list of whole numbers", hint="write 0,25,50,75,95"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))

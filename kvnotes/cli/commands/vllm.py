"""`kvnotes vllm serve`: a vLLM server that splices."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.options import Quiet
from kvnotes.cli.output import print_json
from kvnotes.cli.progress import Progress
from kvnotes.cli.stores import RemoteUrl, StoreFolder, Tenant

if TYPE_CHECKING:
    from kvnotes.vllm.launch import Launch

OWN_ENVIRONMENT = Path(".venv-vllm/bin/python")
"""Where `make setup-vllm` puts vLLM."""

app = typer.Typer(
    help="Serve a model with vLLM, and splice compiled segments into its cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _vllm() -> None:
    pass


@app.command("serve")
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a hub id, a folder or .gguf.")
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM OPTIONS]", help="Go to `vllm serve` as they are."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")
    ] = "bfloat16",
    host: Annotated[str, typer.Option(metavar="NAME", help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes a free one.")] = 8000,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of the CPU build; all by default.")
    ] = None,
    cache_gib: Annotated[
        int, typer.Option(metavar="N", min=1, help="GiB for K/V of the CPU build.")
    ] = 4,
    block_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a block of vLLM's cache.")
    ] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest prompt with its reply.")
    ] = None,
    num_seam_tokens: Annotated[
        int, typer.Option("--seam", metavar="N", min=0, help="Tokens recomputed at a splice.")
    ] = 1,
    min_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Shorter segments are computed.")
    ] = 64,
    allow_compile: Annotated[
        bool, typer.Option("--allow-compile", help="Requests may compile segments.")
    ] = False,
    allow_refresh: Annotated[
        bool,
        typer.Option("--allow-refresh", help="Requests may use again what a field has made stale."),
    ] = False,
    stock_scheduler: Annotated[
        bool,
        typer.Option("--stock-scheduler", help="vLLM's own: one splice, behind a cached header."),
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="torch.compile: starts later, runs faster.")
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Interpreter with vLLM; found by default."),
    ] = None,
    store: StoreFolder = None,
    remote: RemoteUrl = None,
    tenant: Tenant = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command as JSON; start nothing.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Start a vLLM server that splices compiled segments of the store.

    The model is loaded once before, to prove that its K/V can be moved. Then this process
    becomes the server: its output and its signals are vLLM's.
    """
    from kvnotes.settings import load_settings
    from kvnotes.vllm.launch import Plugin, ServerOptions, plan_launch

    settings = load_settings()
    progress = Progress(wanted=not quiet)
    progress.say(f"preparing {model}")
    try:
        launch = plan_launch(
            ServerOptions(
                model=model,
                dtype=dtype,
                python=python or _interpreter(),
                host=host,
                port=port,
                threads=threads,
                cache_gib=cache_gib,
                block_size=block_size,
                max_model_len=max_model_len,
                eager=not compiled,
                plugin=Plugin(
                    store=Path(store) if store else settings.store,
                    remote=remote or settings.remote,
                    tenant=tenant,
                    num_seam_tokens=num_seam_tokens,
                    min_tokens=min_tokens,
                    allow_compile=allow_compile,
                    allow_refresh=allow_refresh,
                    any_place=not stock_scheduler,
                ),
                more=tuple(more or ()),
            )
        )
    finally:
        progress.clear()
    if dry_run:
        facts = {"argv": list(launch.argv), "environment": dict(launch.environment)}
        print_json(json.dumps(facts, indent=2))
        return
    _become(launch)


def _interpreter() -> Path | None:
    """Return the interpreter with vLLM: this one, or that of `make setup-vllm`; None: this one."""
    if find_spec("vllm") is None and OWN_ENVIRONMENT.is_file():
        return OWN_ENVIRONMENT.absolute()
    return None


def _become(launch: Launch) -> None:
    """Replace this process by the server."""
    typer.echo(f"kvnotes: {launch.url}  {shlex.join(launch.argv)}", err=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execvpe(launch.argv[0], launch.argv, {**os.environ, **launch.environment})

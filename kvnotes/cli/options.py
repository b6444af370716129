"""Options that several commands share: one spelling, one help text."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would change; change nothing.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=512, help="CPU threads; torch's choice by default."),
]
ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME", help="smollm2-135m, a hub id, a folder or .gguf.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="TYPE", help="float32 (default), bfloat16 or float16.")
]

DEFAULT_MODEL = "smollm2-135m"

"""`kvnotes chat`: a conversation in the terminal, with fields and skills."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.cli.chat_loop import ChatLoop
from kvnotes.cli.options import DEFAULT_MODEL, Dtype, ModelName, Quiet, Threads
from kvnotes.cli.progress import Progress
from kvnotes.cli.stores import RemoteUrl, StoreFolder, Tenant, open_library
from kvnotes.errors import FieldValueError

if TYPE_CHECKING:
    from kvnotes.library import Library
    from kvnotes.session import Model, Session


def chat(
    model: ModelName = DEFAULT_MODEL,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", metavar="TEXT", help="A system message; may hold {{fields}}."),
    ] = None,
    skill: Annotated[
        list[str] | None,
        typer.Option("--skill", metavar="SKILL", help="A skill of the library, as refunds@3."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=VALUE", help="Value of a field."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with a saved session.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="What an edit does; auto is exact.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest reply.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0 is greedy.")] = 0.0,
    dtype: Dtype = None,
    threads: Threads = None,
    store: StoreFolder = None,
    remote: RemoteUrl = None,
    tenant: Tenant = "",
    json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each turn.")] = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model; a line after each turn says what was reused.

    Lines that begin with / are commands: /help lists them. Fields are edited with /set, skills
    are spliced in with /skill, and /save keeps the conversation for --resume.
    """
    from kvnotes.engine.base import SamplingParams, set_num_threads

    values = dict(map(parse_value, field or ()))
    library = open_library(store, remote=remote, tenant=tenant)
    with Progress(wanted=not quiet) as progress:
        set_num_threads(threads)
        progress.say(f"loading {model}")
        loaded = _load(model, dtype, library)
        progress.say("compiling what is not compiled yet")
        session = (
            _resumed(loaded, resume, values)
            if resume is not None
            else _started(loaded, library, system or (), skill or (), values, strategy)
        )
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    loop = ChatLoop(session, library, params, json=json, quiet=quiet)
    with suppress(EOFError):
        loop.run(_lines(loop))


def parse_value(text: str) -> tuple[str, str]:
    """Return name and value of `name=value`.

    Raises:
        FieldValueError: There is no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise FieldValueError(f"{text!r} gives no field a value", hint="write name=value")
    return name.strip(), value.strip()


def _load(model: str, dtype: str | None, library: Library) -> Model:
    from kvnotes.session import load

    return load(model, dtype=dtype, store=library.store)


def _started(
    model: Model,
    library: Library,
    systems: Iterable[str],
    refs: Iterable[str],
    values: dict[str, str],
    strategy: str,
) -> Session:
    """Start a session: skills first, because fields belong behind what judges them."""
    from kvnotes.prompt import Message
    from kvnotes.session import Session

    skills = [library.get(ref) for ref in refs]
    messages = [skill.message() for skill in skills]
    messages += [Message("system", text) for text in systems]
    if not messages:
        messages = [Message("system", "You are a helpful assistant.")]
    given = {name: value for skill in skills for name, value in skill.fields}
    given |= {name: v[0] for skill in skills for name, v in skill.variants}
    return Session(
        model,
        messages=messages,
        segments={skill.ref: skill.segment for skill in skills},
        fields={**given, **values},
        strategy=strategy,
    )


def _resumed(model: Model, id: str, values: dict[str, str]) -> Session:
    from kvnotes.session import Session

    session = Session.load(model, id)
    if values:
        session.edit(values)
    return session


def _lines(loop: ChatLoop) -> Iterable[str]:
    """Lines that are typed, with a prompt, or read from a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history)
    while True:
        yield input(loop.prompt)

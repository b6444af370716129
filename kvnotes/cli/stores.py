"""The store that commands work on: options, environment, and finding what a name means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvnotes.settings import load_settings

if TYPE_CHECKING:
    from kvnotes.library import Library
    from kvnotes.store import KVStore, OpenFile

StoreFolder = Annotated[
    str | None,
    typer.Option("--store", metavar="DIR", help="Folder of the store; KVNOTES_HOME/store."),
]
RemoteUrl = Annotated[
    str | None, typer.Option("--remote", metavar="URL", help="Remote tier; KVNOTES_REMOTE.")
]
Tenant = Annotated[
    str, typer.Option("--tenant", metavar="NAME", help="Whose segments; shared ones by default.")
]


def open_store(
    folder: str | None = None, *, remote: str | None = None, tenant: str = ""
) -> KVStore:
    """Return the store that the options and the environment name."""
    from kvnotes.engine.base import engine_versions
    from kvnotes.store import KVStore, Trust

    settings = load_settings()
    return KVStore(
        Path(folder) if folder else settings.store,
        memory_nbytes=CLI_MEMORY_NBYTES,
        remote=remote or settings.remote,
        trust=Trust.from_settings(settings),
        tenant=tenant,
        versions=engine_versions(),
    )


CLI_MEMORY_NBYTES = 1 << 30
"""A command line needs each segment once: more memory would not make it faster."""


def open_library(
    folder: str | None = None, *, remote: str | None = None, tenant: str = ""
) -> Library:
    """Return the library beside that store."""
    from kvnotes.library import Library

    return Library(open_store(folder, remote=remote, tenant=tenant))


def find_files(library: Library, target: str) -> list[Path]:
    """Return the files that a target names.

    Args:
        library: Where skills and keys are looked for.
        target: Path of a file, a skill (`refunds@3`), a key or its beginning, or `all`.

    Raises:
        UnknownSegmentError: Nothing has that name.
    """
    from kvnotes.errors import StorageError, UnknownSegmentError
    from kvnotes.store import SUFFIX

    path = Path(target)
    named = "/" in target or path.suffix
    if target.endswith(SUFFIX) or (named and path.exists()):
        return [path]
    disk = library.store.disk
    assert disk is not None
    entries = library.store.entries()
    if target == "all":
        return [disk.path(entry.key) for entry in entries]
    if len(target) >= MIN_KEY_DIGITS and all(c in "0123456789abcdef" for c in target):
        found = [entry for entry in entries if entry.key.startswith(target)]
        if len(found) == 1:
            return [disk.path(found[0].key)]
        raise UnknownSegmentError(
            f"{len(found)} segments have a key that begins with {target}", hint="kvnotes library ls"
        )
    shelf = library.shelf(target)
    if not shelf.entries:
        raise StorageError(
            f"nothing of {shelf.skill.ref!r} is compiled here", hint="kvnotes compile its folder"
        )
    return [disk.path(entry.key) for entry in shelf.entries]


MIN_KEY_DIGITS = 8


def open_file(library: Library, path: Path) -> OpenFile:
    """Open a segment's file with the keys of the environment; its digests are not checked."""
    from kvnotes.store import open_segment

    disk = library.store.disk
    assert disk is not None
    return open_segment(path, trust=disk.trust)

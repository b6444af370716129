"""Writing files so that nobody ever sees half of one.

Owns temporary names, fsync, rename and modes. A file is written beside its place under a
hidden name and renamed when it is complete and on the disk; a process that dies leaves a
hidden file that `prune` takes away later.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvnotes.errors import KVNotesError, StorageError
from kvnotes.settings import make_private

FILE_MODE = 0o600
"""K/V can be inverted to text: nobody but the owner reads a file."""
PART_SUFFIX = ".part"
STALE_SECONDS = 600.0
"""A hidden file that nobody has written to for this long belongs to a process that died."""


def make_folder(path: Path) -> None:
    """Make a folder and those above it, private to the user.

    Raises:
        StorageError: It cannot be made.
    """
    with storage_errors(path):
        make_private(path)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Write a file in one step: yields a descriptor; on success the file is in its place.

    Args:
        path: Where it will be; a file that is there is replaced, whoever has it open keeps
            the old one.

    Raises:
        StorageError: The folder cannot be written, or the disk is full; nothing is left. Only
            where the folder itself cannot be synced at the end, the file is in its place.
    """
    make_folder(path.parent)
    part = path.parent / f".{secrets.token_hex(16)}{PART_SUFFIX}"
    with storage_errors(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        file = os.open(part, flags, FILE_MODE)
        try:
            try:
                yield file
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        sync_folder(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file in one step.

    Raises:
        StorageError: See `new_file`.
    """
    with new_file(path) as file:
        write_all(file, content)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all bytes at the current place of a descriptor."""
    view = memoryview(content).cast("B")
    while view:
        view = view[os.write(file, view) :]


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder last, where the file system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(folder)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says into a `StorageError` that names the place."""
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} holds a NUL and names no file", hint="give another name")
    try:
        yield
    except KVNotesError:  # some are an OSError as well
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = (
            "free some space, or lower the store's limit: kvnotes prune"
            if full
            else "check the folder and its permissions, or set KVNOTES_HOME to another one"
        )
        raise StorageError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error

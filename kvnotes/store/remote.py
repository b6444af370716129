"""A tier anywhere fsspec reaches: folders, object stores, HTTP.

Owns copying whole files to and from a URL, with retries. A download goes on where it
stopped, also after the process was restarted; an upload becomes visible when it is whole.
What comes back is as untrusted as any file: the caller verifies it.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial as partial_call
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from kvnotes.errors import StorageError
from kvnotes.store.atomic import (
    PART_SUFFIX,
    make_folder,
    storage_errors,
    sync_folder,
    write_all,
    write_file,
)

CHUNK = 8 << 20
"""Bytes asked for at a time; what a broken connection can cost."""
MAX_ATTEMPTS = 6
"""Failures in a row, without a byte of progress between them, after which one gives up."""
FIRST_WAIT_SECONDS = 0.1
MAX_WAIT_SECONDS = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the remote tier: its path there, and its size in bytes."""

    path: str
    nbytes: int


class Remote:
    """Files below one URL.

    Args:
        url: Anything fsspec knows: `/mnt/share/kv`, `s3://bucket/kv`, `memory://kv`, `http://...`.
        options: Passed on to the file system, for example credentials.
        sleep: Waits between attempts.
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._sleep = sleep
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise StorageError(
                f"no store can be reached at {url!r}: {reason}",
                hint="use a folder or a URL fsspec knows; http needs pip install 'kvnotes[http]'",
            ) from error
        self.num_retries = 0

    def files(self, folder: str) -> list[RemoteFile]:
        """Return the complete files below a folder; () where there is none."""
        found = self._again(f"list {self.url}/{folder}", lambda: self._find(folder))
        return [
            RemoteFile(path, size)
            for path, size in found
            if not path.rsplit("/", 1)[-1].startswith(".")
        ]

    def find(self, path: str) -> RemoteFile | None:
        """Return a file if it is there."""
        facts = self._again(f"look at {self.url}/{path}", lambda: self._info(path))
        return None if facts is None else RemoteFile(path, int(facts["size"]))

    def upload(self, source: Path, path: str) -> bool:
        """Copy a file to the remote; it appears there when it is whole.

        Returns:
            Whether it was copied; False if a file of its size and name was there already.

        Raises:
            StorageError: The remote takes no files, or broke off too often.
        """
        nbytes = source.stat().st_size
        there = self.find(path)
        if there is not None and there.nbytes == nbytes:
            return False
        target = self._full(path)
        folder, _, name = target.rpartition("/")
        part = f"{folder}/.{name}.{secrets.token_hex(6)}{PART_SUFFIX}"

        def copy() -> None:
            self._files.makedirs(folder, exist_ok=True)
            self._files.put_file(str(source), part)
            if self._files.size(part) != nbytes:
                raise ConnectionError("the copy has another size")
            self._files.mv(part, target)

        try:
            self._again(f"write {self.url}/{path}", copy)
        except BaseException:
            with suppress(*_failures(), NotImplementedError):
                self._files.rm_file(part)
            raise
        return True

    def download(self, file: RemoteFile, target: Path, partial: Path) -> None:
        """Copy a file from the remote; goes on where an earlier call stopped.

        Args:
            file: What `find` or `list` returned.
            target: Where it will be, in one step; its content is not verified here.
            partial: Where the bytes collect until they are complete; kept on failure.

        Raises:
            StorageError: It is gone, or the connection broke too often.
        """
        make_folder(partial.parent)
        facts = self._again(f"look at {self.url}/{file.path}", lambda: self._info(file.path))
        if facts is None:
            raise StorageError(f"{self.url}/{file.path} is gone", hint="push it again")
        size, mark = int(facts["size"]), _version_of(facts)
        note = partial.with_name(partial.name + ".json")
        start = _resume_at(partial, note, mark)
        if start == 0:
            write_file(note, json.dumps(mark).encode())
        with storage_errors(partial), partial.open("r+b" if start else "wb", buffering=0) as part:
            part.truncate(start)
            part.seek(start)
            while start < size:
                stop = min(start + CHUNK, size)
                piece = self._again(
                    f"read {self.url}/{file.path} from byte {start}",
                    partial_call(self._range, file.path, start, stop),
                )
                write_all(part.fileno(), piece)
                start += len(piece)
        make_folder(target.parent)
        with storage_errors(target), partial.open("rb") as part:
            os.fsync(part.fileno())
            partial.replace(target)
            note.unlink(missing_ok=True)
            sync_folder(target.parent)

    def read(self, path: str) -> bytes | None:
        """Return a small file, or None if it is not there."""
        if self._again(f"look at {self.url}/{path}", lambda: self._info(path)) is None:
            return None
        content: bytes = self._again(
            f"read {self.url}/{path}", lambda: self._files.cat_file(self._full(path))
        )
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        target = self._full(path)

        def put() -> None:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(target, content)

        self._again(f"write {self.url}/{path}", put)

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is no fault."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._full(path))

        self._again(f"remove {self.url}/{path}", remove)

    # -- inside ----------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _find(self, folder: str) -> list[tuple[str, int]]:
        root = self._full(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.find(root, detail=True)
        except FileNotFoundError:
            return []
        cut = len(self._full("").lstrip("/"))
        return [(str(p).lstrip("/")[cut:], int(f["size"])) for p, f in found.items()]

    def _info(self, path: str) -> dict[str, Any] | None:
        self._files.invalidate_cache()
        try:
            facts: dict[str, Any] = self._files.info(self._full(path))
        except FileNotFoundError:
            return None
        if facts.get("size") is None:
            raise ConnectionError("the server does not say how large the file is")
        return facts

    def _range(self, path: str, start: int, stop: int) -> bytes:
        piece: bytes = self._files.cat_file(self._full(path), start=start, end=stop)
        if not piece or len(piece) > stop - start:
            raise ConnectionError(f"{len(piece)} bytes came, {stop - start} were asked for")
        return piece

    def _again(self, what: str, action: Callable[[], Result]) -> Result:
        """Do something, again and again if it fails."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            with _refusals(what):
                try:
                    return action()
                except (FileNotFoundError, PermissionError):
                    raise
                except _failures() as error:
                    if attempt == MAX_ATTEMPTS:
                        raise StorageError(
                            f"cannot {what}: {_reason(error)} ({attempt} attempts)",
                            hint="check the connection; what has arrived is kept, try again",
                        ) from error
            self.num_retries += 1
            longest = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), MAX_WAIT_SECONDS)
            self._sleep(longest * random.uniform(0.5, 1.0))  # so that clients spread out
        raise AssertionError("unreachable")


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """What no second attempt changes."""
    try:
        yield
    except StorageError:
        raise
    except (NotImplementedError, PermissionError, FileNotFoundError) as error:
        raise StorageError(
            f"cannot {what}: {_reason(error)}",
            hint="this place may only be read, or your credentials do not reach it",
        ) from error


def _failures() -> tuple[type[BaseException], ...]:
    """What a file system raises when a connection breaks."""
    found: tuple[type[BaseException], ...] = (OSError, EOFError, http.client.HTTPException)
    aiohttp = sys.modules.get("aiohttp")
    return found if aiohttp is None else (*found, aiohttp.ClientError)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _version_of(facts: dict[str, Any]) -> dict[str, str]:
    """What tells one version of a remote file from another, as far as the server says it."""
    names = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    return {name: str(facts[name]) for name in names if name in facts}


def _resume_at(partial: Path, note: Path, mark: dict[str, str]) -> int:
    """Return how many bytes of this very version are here already."""
    with suppress(OSError, ValueError):
        if json.loads(note.read_bytes()) == mark:
            return min(partial.stat().st_size, int(mark["size"]))
    return 0

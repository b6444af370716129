"""A tier anywhere fsspec reaches: folders, object stores, HTTP.

Owns copying whole files to and from a URL, with retries. A download goes on at the byte
where it stopped, also after the process was restarted; an upload becomes visible when it is
whole. What comes back is as untrusted as any file: the caller verifies it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from kvnotes.errors import StorageError
from kvnotes.store.atomic import (
    FILE_MODE,
    PART_SUFFIX,
    STALE_SECONDS,
    storage_errors,
    write_all,
    write_file,
)
from kvnotes.store.patience import PATIENT, Attempts, Patience, failures
from kvnotes.store.ranges import ChangedError, pieces, version_of

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
"""How long an HTTP or S3 server may be silent, unless `options` say otherwise."""

MAX_VERSIONS = 3
"""How often a download begins again because the file there is another one by now."""

_READ_ONLY = {"http", "https", "github", "zip", "tar", "data"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the remote tier: its path there, and its size in bytes."""

    path: str
    nbytes: int


class Remote:
    """Files below one URL.

    Args:
        url: Anything fsspec knows: `/mnt/share/kv`, `s3://bucket/kv`, `memory://kv`, `http://...`.
        options: Passed on to the file system, for example credentials and timeouts.
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
            options = {**_timeouts(url), **(options or {})}
            self._files, self._root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise StorageError(
                f"no store can be reached at {url!r}: {reason}",
                hint="use a folder or a URL fsspec knows; http needs pip install 'kvnotes[http]'",
            ) from error
        self.num_retries = 0

    def files(self, folder: str) -> list[RemoteFile]:
        """Return the complete files below a folder; [] where there is none."""
        found = self._attempts(f"list {self.url}/{folder}").run(lambda: self._find(folder))
        return [
            RemoteFile(path, size)
            for path, size in found
            if not path.rsplit("/", 1)[-1].startswith(".")
        ]

    def find(self, path: str, patience: Patience = PATIENT) -> RemoteFile | None:
        """Return a file if it is there.

        Raises:
            StorageError: The connection broke too often.
        """
        attempts = self._attempts(f"look at {self.url}/{path}", patience)
        facts = attempts.run(lambda: self._info(path))
        return None if facts is None else RemoteFile(path, int(facts["size"]))

    def upload(self, source: Path, path: str) -> bool:
        """Copy a file to the remote; it appears there when it is whole.

        Returns:
            Whether it was copied; False if a file of its size and name was there already.

        Raises:
            StorageError: The remote takes no files, or broke off too often.
        """
        self._check_writable(path)
        with storage_errors(source):
            nbytes = source.stat().st_size
        there = self.find(path)
        if there is not None and there.nbytes == nbytes:
            return False
        target = self._full(path)
        folder, _, name = target.rpartition("/")
        part = f"{folder}/.{name}.{secrets.token_hex(6)}{PART_SUFFIX}"
        self.sweep(path.rpartition("/")[0])

        def copy() -> None:
            self._files.makedirs(folder, exist_ok=True)
            self._files.put_file(str(source), part)
            self._files.invalidate_cache()
            if self._files.size(part) != nbytes:
                raise ConnectionError("the copy has another size")
            self._files.mv(part, target)

        try:
            self._attempts(f"write {self.url}/{path}").run(copy)
        except BaseException:
            with suppress(*failures(), NotImplementedError):
                self._files.rm_file(part)
            raise
        return True

    def download(self, file: RemoteFile, partial: Path, patience: Patience = PATIENT) -> None:
        """Copy a file from the remote; goes on where an earlier call stopped.

        Args:
            file: What `find` or `files` returned.
            partial: Where the bytes collect; kept on failure. Its content is not verified here.
            patience: When to give up.

        Raises:
            StorageError: It is gone, or the connection broke too often.
        """
        attempts = self._attempts(f"read {self.url}/{file.path}", patience)
        note = partial.with_name(partial.name + ".json")
        for _ in range(MAX_VERSIONS):
            facts = attempts.run(lambda: self._info(file.path))
            if facts is None:
                raise StorageError(f"{self.url}/{file.path} is gone", hint="push it again")
            version = version_of(facts)
            if not _may_go_on(partial, note, version):
                with storage_errors(partial):
                    partial.unlink(missing_ok=True)
                write_file(note, json.dumps(version).encode())
            whole = self._collect(file.path, version, partial, attempts)
            with storage_errors(note):
                note.unlink(missing_ok=True)
            if whole:
                return
        raise StorageError(
            f"{self.url}/{file.path} was written again and again while it was read",
            hint="try again when nobody pushes it",
        )

    def read(self, path: str) -> bytes | None:
        """Return a small file, or None if it is not there."""

        def read() -> bytes | None:
            if self._info(path) is None:
                return None
            content: bytes = self._files.cat_file(self._full(path))
            return content

        return self._attempts(f"read {self.url}/{path}").run(read)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file.

        Raises:
            StorageError: The remote takes no files, or broke off too often.
        """
        self._check_writable(path)
        target = self._full(path)

        def put() -> None:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(target, content)

        self._attempts(f"write {self.url}/{path}").run(put)

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is no fault."""
        self._check_writable(path)

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._full(path))

        self._attempts(f"remove {self.url}/{path}").run(remove)

    def sweep(self, folder: str) -> None:
        """Remove what uploads that died have left in a folder, as far as that can be done."""
        with suppress(*failures(), NotImplementedError, StorageError):
            for facts in self._files.ls(self._full(folder), detail=True):
                path = str(facts["name"])
                name = path.rsplit("/", 1)[-1]
                if name.startswith(".") and name.endswith(PART_SUFFIX):
                    age = time.time() - self._files.modified(path).timestamp()
                    if age > STALE_SECONDS:
                        self._files.rm_file(path)

    # -- inside ----------------------------------------------------------------------------

    def _attempts(self, what: str, patience: Patience = PATIENT) -> Attempts:
        return Attempts(what, patience, self._sleep, self._count_retry)

    def _count_retry(self) -> None:
        self.num_retries += 1

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _check_writable(self, path: str) -> None:
        protocol = self._files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if names & _READ_ONLY:
            raise StorageError(
                f"cannot write {self.url}/{path}: {sorted(names)[0]} is read-only",
                hint="push to the folder or bucket that the server shows",
            )

    def _find(self, folder: str) -> list[tuple[str, int]]:
        root = self._full(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.find(root, detail=True)
        except FileNotFoundError:
            return []
        cut = len(self._full("").lstrip("/"))
        return [(str(p).lstrip("/")[cut:], int(f["size"] or 0)) for p, f in found.items()]

    def _info(self, path: str) -> dict[str, Any] | None:
        """What the server says about a file; None if it says that there is none."""
        self._files.invalidate_cache()
        try:
            facts: dict[str, Any] = self._files.info(self._full(path))
        except FileNotFoundError as error:
            _raise_other_cause(error)
            return None
        if facts.get("size") is None:
            raise ConnectionError("the server does not say how large the file is")
        return facts

    def _collect(
        self, path: str, version: dict[str, str], partial: Path, attempts: Attempts
    ) -> bool:
        """Append what is missing of a file; returns whether it is all of this version."""
        while True:
            try:
                self._append(path, version, partial, attempts)
                return version_of(self._info(path) or {}) == version
            except ChangedError:
                return False
            except FileNotFoundError as error:
                attempts.failed(ConnectionError(f"it is gone: {error}"))
            except failures() as error:
                attempts.failed(error)

    def _append(
        self, path: str, version: dict[str, str], partial: Path, attempts: Attempts
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        with storage_errors(partial):
            file = os.open(partial, flags, FILE_MODE)
        try:
            with storage_errors(partial):
                start = os.lseek(file, 0, os.SEEK_END)
            coming = pieces(self._files, self._full(path), start, version, attempts.num_failed)
            with closing(coming):
                for piece in coming:
                    with storage_errors(partial):
                        write_all(file, piece)
                    attempts.progress(len(piece))
            with storage_errors(partial):
                os.fsync(file)
        finally:
            os.close(file)


def _raise_other_cause(error: FileNotFoundError) -> None:
    """Raise what is behind a "not found" that only says that the server did not answer."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if cause is None or isinstance(cause, FileNotFoundError) or status in (404, 410):
        return
    if status in (401, 403):
        raise PermissionError(str(cause)) from cause
    raise ConnectionError(" ".join(str(cause).split()) or type(cause).__name__) from cause


def _timeouts(url: str) -> dict[str, Any]:
    """Options that keep one attempt short; fsspec's defaults wait for minutes."""
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        try:
            import aiohttp
        except ImportError:
            return {}
        patience = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
        )
        return {"client_kwargs": {"timeout": patience}}
    if protocol in ("s3", "s3a"):
        return {
            "config_kwargs": {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"max_attempts": 1},
            }
        }
    return {}


def _may_go_on(partial: Path, note: Path, version: dict[str, str]) -> bool:
    """Whether what is here already is the beginning of this very version."""
    with suppress(OSError, ValueError):
        noted = json.loads(note.read_bytes())
        return bool(noted == version and partial.stat().st_size <= int(version["size"]))
    return False

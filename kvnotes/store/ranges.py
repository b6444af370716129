"""The rest of a remote file, from some byte on.

Owns how bytes come from a file system of fsspec. Over HTTP they are streamed: a connection
that breaks costs at most what the client had buffered. Elsewhere they are asked for in
ranges. After failures both ask for less at a time.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import closing
from itertools import count
from typing import Any

LARGEST_RANGE = 8 << 20
SMALLEST_RANGE = 64 << 10
GROW_AFTER = 8
"""After so many ranges that came whole, larger ones are asked for."""
PIECE = 1 << 20

_VERSION_NAMES = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")


class ChangedError(ConnectionError):
    """Another version of the file is there than the one that was begun."""


def version_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return what tells one version of a file from another, as far as the server says it."""
    return {name: str(facts[name]) for name in _VERSION_NAMES if facts.get(name) is not None}


def pieces(
    files: Any, path: str, start: int, version: dict[str, str], num_failed: int = 0
) -> Generator[bytes, None, None]:
    """Yield the bytes of a file from `start` to its end, in order.

    Args:
        files: The file system.
        path: The file's full path there.
        start: First byte.
        version: What `version_of` said: no byte of another version is yielded if the server
            says that there is one.
        num_failed: Attempts that have just failed: makes ranges smaller.

    Raises:
        ChangedError: Another version came.
        OSError: The connection broke.
    """
    size = int(version["size"])
    protocol = files.protocol
    names = (protocol,) if isinstance(protocol, str) else protocol
    streams = "http" in names or "https" in names
    length = max(LARGEST_RANGE >> (2 * num_failed), SMALLEST_RANGE)
    if streams and not num_failed:
        length = size
    for number in count(1):
        if start >= size:
            return
        stop = min(start + length, size)
        if number % GROW_AFTER == 0:
            length = min(2 * length, max(length, LARGEST_RANGE))
        if streams:
            for piece in _streamed(files, path, start, stop, version):
                yield piece
                start += len(piece)
        else:
            piece = files.cat_file(path, start=start, end=stop)
            if not 0 < len(piece) <= stop - start:
                raise ConnectionError(f"{len(piece)} bytes came, {stop - start} were asked for")
            yield piece
            start += len(piece)


def _streamed(
    files: Any, url: str, start: int, stop: int, version: dict[str, str]
) -> Generator[bytes, None, None]:
    headers = {**files.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    size = int(version["size"])
    if start or stop < size:
        headers["Range"] = f"bytes={start}-{stop - 1 if stop < size else ''}"
    with closing(files.open(url, "rb", block_size=0, size=size, headers=headers)) as stream:
        answer = stream.r
        etag = answer.headers.get("ETag")
        if "ETag" in version and etag is not None and etag != version["ETag"]:
            raise ChangedError("another version of the file came")
        skip = start - _first_byte(answer)
        if skip < 0:
            raise ConnectionError(f"bytes from {start - skip} on came, not from {start} on")
        while start < stop:
            piece: bytes = stream.read(PIECE)
            if not piece:
                raise ConnectionError(f"the connection ended at byte {start} of {size}")
            wanted = piece[skip : skip + stop - start]
            skip -= min(skip, len(piece))
            if wanted:
                yield wanted
            start += len(wanted)


def _first_byte(answer: Any) -> int:
    """Position of the first byte of an answer; 0 if the server ignores ranges."""
    if answer.status != 206:
        return 0
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    if found is None:
        raise ConnectionError("a part of the file came, and the server does not say which")
    return int(found[1])

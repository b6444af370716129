"""Opening segment files: checked, verified once, mapped read-only.

Owns the way from a file to a `KVSegment`. A file never changes once it is in its place;
its digests are checked once per version of the file and process.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from kvnotes.errors import SegmentFormatError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.store import container
from kvnotes.store.container import Container, Place
from kvnotes.store.header import SegmentHeader
from kvnotes.store.int8 import dequantize
from kvnotes.store.saving import HEADER_KEY, SEALED_KEY, SIGNATURE_KEY
from kvnotes.store.tensors import HASH_THREADS, as_tensor, checked_digest, view
from kvnotes.store.trust import NO_TRUST, Trust

_HINT = "the file is damaged; compile the segment again"


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What changes when a file is written again."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> FileVersion:
        """Return the version of a file from its stat."""
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


class VerifiedFiles:
    """Which versions of which files this process has verified; shared by threads."""

    def __init__(self) -> None:
        self._seen: dict[FileVersion, str] = {}
        self._lock = Lock()

    def knows(self, version: FileVersion, header_digest: str) -> bool:
        """Whether this version, with this header, was verified."""
        with self._lock:
            return self._seen.get(version) == header_digest

    def add(self, version: FileVersion, header_digest: str) -> None:
        """Remember a verified version."""
        with self._lock:
            self._seen[version] = header_digest


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file whose outer form and header are valid; its tensors may not be read yet.

    Args:
        path: Where it is.
        header: What it says.
        signer: Who signed it, see `Trust.check`.
        encrypted: Whether it is encrypted on the disk.
        content: The plain bytes, mapped or decrypted.
        places: Where the tensors lie in them.
        version: Which version of the file this is.
    """

    path: Path
    header: SegmentHeader
    signer: str
    encrypted: bool
    content: mmap.mmap | bytearray
    places: tuple[Place, ...]
    version: FileVersion

    def verify(self, seen: VerifiedFiles | None = None) -> None:
        """Check the digest of every tensor, and that every number is finite.

        Raises:
            SegmentFormatError: Names the first tensor that is damaged.
        """
        mark = hashlib.sha256(self.header.to_json().encode()).hexdigest()
        if seen is not None and seen.knows(self.version, mark):
            return
        whole = as_tensor(self.content)
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            found = pool.map(lambda place: _checked_digest(whole, place, self.path), self.places)
            for place, entry, digest in zip(self.places, self.header.tensors, found, strict=True):
                if digest != entry.sha256:
                    raise SegmentFormatError(
                        f"{self.path}: tensor {place.name!r} is damaged: its SHA-256 begins with "
                        f"{digest[:12]}, the header says {entry.sha256[:12]}",
                        hint=_HINT,
                    )
        if seen is not None:
            seen.add(self.version, mark)

    def segment(self, run: Run | None = None) -> KVSegment:
        """Return the K/V; exact ones are views of the mapped file.

        Args:
            run: For a part of a session: its run with the whole lineage.
        """
        header, whole = self.header, as_tensor(self.content)
        parts = {place.name: view(whole, place) for place in self.places}
        if header.payload.kind == "int8":
            dtype: torch.dtype = getattr(torch, header.identity.spec.dtype)
            parts = {
                name: dequantize(part, parts[f"{name}.scale"], dtype)
                for name, part in parts.items()
                if not name.endswith(".scale")
            }
        count = header.identity.spec.num_layers
        return KVSegment(
            header.run(run),
            header.identity,
            tuple(parts[f"keys.{i}"] for i in range(count)),
            tuple(parts[f"values.{i}"] for i in range(count)),
            preamble_ids=header.preamble_ids,
        )


def open_segment(path: Path, *, trust: Trust = NO_TRUST) -> OpenFile:
    """Open a file and check everything but the digests of its tensors.

    Raises:
        SegmentFormatError: Not a file of ours, damaged, a link, or of a newer format.
        TrustError: Not signed by a trusted key, or its encryption key is not there.
    """
    with _opened(path) as file:
        facts = os.fstat(file)
        _, outer = _read_container(file, facts.st_size, str(path))
        content: mmap.mmap | bytearray = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    sealing = outer.metadata.get(SEALED_KEY)
    if sealing is not None:
        place = outer.places[0]
        sealed = memoryview(content)[place.start : place.stop]
        content = trust.decrypt(sealed, sealing, str(path))
        outer = parse_plain(content, str(path))
    header = SegmentHeader.from_json(_text_of(outer, HEADER_KEY, path), str(path))
    signer = trust.check(outer.metadata[HEADER_KEY], outer.metadata.get(SIGNATURE_KEY), str(path))
    expected = [(t.name, t.dtype, t.shape) for t in header.tensors]
    found = [(p.name, p.dtype, p.shape) for p in outer.places]
    if found != expected:
        raise SegmentFormatError(
            f"{path} has other tensors than its header describes: {len(found)}, not "
            f"{len(expected)}, or in another order",
            hint=_HINT,
        )
    return OpenFile(
        path, header, signer, sealing is not None, content, outer.places, FileVersion.of(facts)
    )


def parse_plain(content: bytes | bytearray, where: str) -> Container:
    """Parse the outer form of a plain file that is in memory.

    Raises:
        SegmentFormatError: See `container.parse`.
    """
    size = container.header_size(bytes(content[:8]), len(content), where)
    return container.parse(bytes(content[8 : 8 + size]), len(content), where)


def load_segment(
    path: Path, *, trust: Trust = NO_TRUST, seen: VerifiedFiles | None = None
) -> KVSegment:
    """Open, verify and map a compiled segment.

    Raises:
        SegmentFormatError: See `open_segment`; or it is a part of a session.
    """
    opened = open_segment(path, trust=trust)
    if opened.header.kind != "segment":
        raise SegmentFormatError(
            f"{path} is part of a saved session, not a compiled segment",
            hint="load the session; a slice of a conversation is no segment",
        )
    opened.verify(seen)
    return opened.segment()


def converted(segment: KVSegment, dtype: str) -> KVSegment:
    """Return a segment rounded once to another dtype: inexact, with a key of its own.

    Raises:
        SegmentFormatError: It was altered before.
    """
    own = segment.identity.spec.dtype
    if dtype == own:
        return segment
    if segment.run.altered:
        raise SegmentFormatError(
            f"the segment is altered already ({segment.run.altered}), and is not rounded twice",
            hint="compile it again with this model",
        )
    target: torch.dtype = getattr(torch, dtype)
    return KVSegment(
        replace(segment.run, altered=f"from:{own}"),
        segment.identity.with_dtype(dtype),
        tuple(layer.to(target) for layer in segment.keys),
        tuple(layer.to(target) for layer in segment.values),
        preamble_ids=segment.preamble_ids,
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        file = os.open(path, flags)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        link = path.is_symlink()
        reason = "it is a symbolic link" if link else getattr(error, "strerror", None) or error
        raise SegmentFormatError(
            f"cannot open {path}: {reason}", hint="give the path of the segment's own file"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise SegmentFormatError(
                f"{path} is no regular file", hint="give the path of a segment's file"
            )
        yield file
    finally:
        os.close(file)


def _read_container(file: int, num_bytes: int, where: str) -> tuple[bytes, Container]:
    size = container.header_size(os.pread(file, 8, 0), num_bytes, where)
    header = os.pread(file, size, 8)
    return header, container.parse(header, num_bytes, where)


def _text_of(outer: Container, name: str, path: Path) -> str:
    text = outer.metadata.get(name)
    if text is None:
        raise SegmentFormatError(
            f"{path} is a safetensors file without a kvnotes header", hint="compile a segment"
        )
    return text


def _checked_digest(whole: Tensor, place: Place, path: Path) -> str:
    return checked_digest(f"{path}: tensor {place.name!r}", view(whole, place))

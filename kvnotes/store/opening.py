"""Opening segment files: checked, verified once, mapped read-only.

Owns the way from a file to a `KVSegment`. A file never changes once it is in its place;
its digests are checked once per version of the file and process.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvnotes.errors import KVNotesError, SegmentFormatError, StorageError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment, Tensors
from kvnotes.store import container
from kvnotes.store.container import Container, Place
from kvnotes.store.header import DTYPE_CODES, SegmentHeader, digest_text
from kvnotes.store.int8 import dequantize
from kvnotes.store.saving import DIGEST_KEY, HEADER_KEY, SEALED_KEY, SIGNATURE_KEY
from kvnotes.store.tensors import HASH_THREADS, as_tensor, checked_digest, view
from kvnotes.store.trust import NO_TRUST, Trust
from kvnotes.store.verified import FileVersion, VerifiedFiles

_HINT = "the file is damaged; compile the segment again"
_PATH_HINT = "give the path of a segment's own file"
_NO_SUCH_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EMLINK,
    errno.ENXIO,
    errno.ENAMETOOLONG,
)
"""What the system says when the path, and not the machine, is the reason."""


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
        spec = header.identity.spec
        nothing = torch.empty(0, dtype=getattr(torch, spec.dtype))
        tensors: Tensors = {
            name: tuple(
                parts[f"{name}.{index}"]
                if f"{name}.{index}" in parts
                else nothing.view(layer.shape(name, len(header.token_ids)))
                for index, layer in enumerate(spec.layers)
            )
            for name in spec.tensor_names
        }
        return KVSegment(
            header.run(run), header.identity, tensors, preamble_ids=header.preamble_ids
        )


def open_segment(path: Path, *, trust: Trust = NO_TRUST) -> OpenFile:
    """Open a file and check everything but the digests of its tensors.

    Raises:
        SegmentFormatError: No such file, not one of ours, damaged, a link, or of a newer format.
        TrustError: Not signed by a trusted key, or its encryption key is not there.
        StorageError: The system cannot open it now: no permission, too many open files.
    """
    with _opened(path) as file:
        facts = os.fstat(file)
        outer = _read_container(file, facts.st_size, str(path))
        content: mmap.mmap | bytearray = _mapped(file, facts.st_size, path)
    sealing = outer.metadata.get(SEALED_KEY)
    if sealing is not None:
        place = sealed_place(outer, path)
        sealed = memoryview(content)[place.start : place.stop]
        content = trust.decrypt(sealed, sealing, str(path))
        outer = parse_plain(content, str(path))
    text = _header_text(outer, path)
    signer = trust.check(text, outer.metadata.get(SIGNATURE_KEY), str(path))
    header = SegmentHeader.from_json(text, str(path))
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
        SegmentFormatError: It was altered before, or does not fit into the other dtype.
    """
    own = segment.identity.spec.dtype
    if dtype == own:
        return segment
    if dtype not in DTYPE_CODES:
        raise SegmentFormatError(
            f"K/V of dtype {own!r} cannot be converted to {dtype!r}",
            hint=f"load the model as one of {', '.join(DTYPE_CODES)}",
        )
    if segment.run.altered:
        raise SegmentFormatError(
            f"the segment is altered already ({segment.run.altered}), and is not rounded twice",
            hint="compile it again with this model",
        )
    target: torch.dtype = getattr(torch, dtype)
    tensors: Tensors = {
        name: tuple(layer.to(target) for layer in layers)
        for name, layers in segment.tensors.items()
    }
    if not all(bool(torch.isfinite(t).all()) for layers in tensors.values() for t in layers):
        raise SegmentFormatError(
            f"K/V of dtype {own!r} overflow in {dtype!r}", hint="compile it again with this model"
        )
    return KVSegment(
        replace(segment.run, altered=f"from:{own}"),
        segment.identity.with_dtype(dtype),
        tensors,
        preamble_ids=segment.preamble_ids,
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # O_NONBLOCK: opening a FIFO would wait for a writer
    names = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in names)
    try:
        file = os.open(path, flags)
    except ValueError as error:  # a NUL in the name
        raise SegmentFormatError(f"cannot open {path}: {error}", hint=_PATH_HINT) from error
    except OSError as error:
        if error.errno not in _NO_SUCH_FILE:
            raise _unreadable(path, error) from error
        reason = "it is a symbolic link" if os.path.islink(path) else error.strerror
        raise SegmentFormatError(f"cannot open {path}: {reason}", hint=_PATH_HINT) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise SegmentFormatError(f"{path} is no regular file", hint=_PATH_HINT)
        yield file
    except OSError as error:
        if isinstance(error, KVNotesError):
            raise
        raise _unreadable(path, error) from error
    finally:
        os.close(file)


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read {path}: {error.strerror}",
        hint="check its permissions; with many mapped files, raise the limit: ulimit -n",
    )


def _read_container(file: int, num_bytes: int, where: str) -> Container:
    size = container.header_size(os.pread(file, 8, 0), num_bytes, where)
    return container.parse(os.pread(file, size, 8), num_bytes, where)


def _mapped(file: int, num_bytes: int, path: Path) -> mmap.mmap:
    # Python before 3.13 keeps a descriptor open for every map
    keep: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        return mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ, **keep)
    except ValueError as error:  # it became shorter since it was opened
        raise SegmentFormatError(f"{path} is being changed: {error}", hint=_HINT) from error


def sealed_place(outer: Container, path: Path) -> Place:
    """Return where the encrypted bytes of a sealed file lie.

    Raises:
        SegmentFormatError: It holds anything else.
    """
    places = [(place.name, place.dtype) for place in outer.places]
    if set(outer.metadata) != {SEALED_KEY} or places != [(SEALED_KEY, "U8")]:
        raise SegmentFormatError(
            f"{path} is encrypted, and holds {len(places)} tensors and {len(outer.metadata)} "
            "texts; one of each is expected",
            hint=_HINT,
        )
    return outer.places[0]


def _header_text(outer: Container, path: Path) -> str:
    """Return the header's JSON, whose own digest fits."""
    text = outer.metadata.get(HEADER_KEY)
    if text is None:
        raise SegmentFormatError(
            f"{path} is a safetensors file without a kvnotes header", hint="compile a segment"
        )
    unknown = sorted(set(outer.metadata) - {HEADER_KEY, DIGEST_KEY, SIGNATURE_KEY})
    if unknown:
        raise SegmentFormatError(f"{path} has a text {unknown[0][:80]!r} too much", hint=_HINT)
    if outer.metadata.get(DIGEST_KEY) != digest_text(text):
        raise SegmentFormatError(f"{path} has a header whose SHA-256 is another one", hint=_HINT)
    first = outer.places[0].start
    if first % container.PAGE:
        raise SegmentFormatError(
            f"{path} has tensors that begin at byte {first}, no multiple of {container.PAGE}",
            hint=_HINT,
        )
    return text


def _checked_digest(whole: Tensor, place: Place, path: Path) -> str:
    return checked_digest(f"{path}: tensor {place.name!r}", view(whole, place))

"""Saving segments: one file each, written in one step.

Owns the way from a `KVSegment` to a file. Tensors are hashed while they are written; an
encrypted file is hashed first, because its header comes before everything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvnotes.errors import SegmentFormatError
from kvnotes.plan import check_compiled
from kvnotes.segment import KVSegment
from kvnotes.store import container
from kvnotes.store.atomic import new_file, write_all
from kvnotes.store.header import (
    Creation,
    Payload,
    PayloadKind,
    Provenance,
    SegmentHeader,
    SegmentKind,
    digest_text,
    make_header,
    tensor_shapes,
)
from kvnotes.store.int8 import quantize
from kvnotes.store.tensors import HASH_THREADS, bytes_of, checked_digest
from kvnotes.store.trust import NO_TRUST, Trust, sealed_size

SUFFIX = container.SUFFIX
WRITE_BACK_NBYTES = 32 << 20
"""Bytes after which the system is asked to bring them to the disk; waiting for all of them at
the end takes as long as writing them did."""
_SYNC = getattr(os, "fdatasync", os.fsync)

HEADER_KEY, DIGEST_KEY, SIGNATURE_KEY, SEALED_KEY = "kvnotes", "sha256", "signature", "sealed"


def save_segment(
    path: Path,
    segment: KVSegment,
    *,
    kind: SegmentKind = "segment",
    tenant: str = "",
    provenance: Provenance | None = None,
    int8: bool = False,
    versions: tuple[tuple[str, str], ...] = (),
    trust: Trust = NO_TRUST,
) -> SegmentHeader:
    """Write a segment to a new file in one step.

    Args:
        path: Where; the folder is made. A file that is there is replaced.
        segment: What to save.
        kind: `run` for a part of a session.
        tenant: Whose it is; part of the key.
        provenance: The text it was made from.
        int8: Round to 8 bits: a lossy copy with a key of its own.
        versions: Names and versions of what computed it.
        trust: Signs and encrypts, if it has the keys.

    Returns:
        The header that was written.

    Raises:
        SegmentFormatError: The segment cannot be stored: NaN, or already rounded once.
        LineageError: It saw more than its preamble: a slice of a conversation.
        TrustError: The package that signs and encrypts is not installed.
        StorageError: The folder cannot be written, or the disk is full; nothing is left.
    """
    provenance = provenance or Provenance()
    _check_tensors(segment)
    if kind == "segment":
        check_compiled(provenance.name or "without a name", segment.run, segment.preamble_ids)
    draft = _Draft(segment, kind, tenant, provenance, int8, Creation.now(versions))
    if trust.encryption_key is None:
        return _save_plain(path, draft, trust)
    return _save_sealed(path, draft, trust)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A segment and all of its header but the digests."""

    segment: KVSegment
    kind: SegmentKind
    tenant: str
    provenance: Provenance
    int8: bool
    created: Creation

    @property
    def payload_kind(self) -> PayloadKind:
        altered = self.segment.run.altered
        if altered and (self.int8 or altered.startswith("int8:")):
            raise SegmentFormatError(
                f"the segment is altered already ({altered}); it is not rounded or saved again",
                hint="keep the file it came from, or compile it again",
            )
        if self.int8:
            return "int8"
        return "converted" if altered else "exact"

    def shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return tensor_shapes(self.segment.identity, self.segment.num_tokens, self.payload_kind)

    def tensors(self) -> Iterator[tuple[Tensor, float, float]]:
        """The tensors in the order of the file, each with its largest and its mean error."""
        for layer in zip(*self.segment.tensors.values(), strict=True):
            for tensor in layer:
                if not tensor.numel():
                    continue  # this layer has none of them
                if not self.int8:
                    yield tensor.contiguous(), 0.0, 0.0
                    continue
                quantized = quantize(tensor)
                yield quantized.levels, quantized.max_error, quantized.rms_error
                yield quantized.scale, 0.0, 0.0

    def header(self, digests: list[str], errors: tuple[float, float]) -> SegmentHeader:
        dtype = self.segment.identity.spec.dtype
        altered = self.segment.run.altered
        source = altered.removeprefix("from:") if altered else dtype
        payload = Payload(
            kind=self.payload_kind, source_dtype=source, max_error=errors[0], rms_error=errors[1]
        )
        return make_header(
            self.segment,
            kind=self.kind,
            tenant=self.tenant,
            provenance=self.provenance,
            payload=payload,
            created=self.created,
            digests=tuple(digests),
        )


def _check_tensors(segment: KVSegment) -> None:
    """Refuse tensors that are not those which the header will describe."""
    spec = segment.identity.spec
    expected = {
        name: [(spec.dtype, layer.shape(name, segment.num_tokens)) for layer in spec.layers]
        for name in spec.tensor_names
    }
    found = {
        name: [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in layers]
        for name, layers in segment.tensors.items()
    }
    for name, theirs in expected.items():
        mine = found.get(name, [])
        if mine != theirs:
            pairs = zip(mine, theirs, strict=False)
            first = next((p for p in pairs if p[0] != p[1]), (len(mine), len(theirs)))
            raise SegmentFormatError(
                f"the segment holds layers of {first[0]}, its model makes {first[1]}",
                hint="save what an engine compiled; `converted` gives another dtype",
            )
    if set(found) != set(expected):
        raise SegmentFormatError(
            f"the segment holds {sorted(found)}, its model makes {sorted(expected)}",
            hint="save what an engine compiled",
        )


class _Digests:
    """Digests of tensors, computed beside the writing of them; refuses what is not finite."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._futures: list[Future[str]] = []
        self._max_error = self._rms_error = 0.0

    def add(self, name: str, tensor: Tensor, max_error: float, rms_error: float) -> None:
        self._futures.append(self._pool.submit(checked_digest, name, tensor))
        self._max_error = max(self._max_error, max_error)
        self._rms_error = max(self._rms_error, rms_error)

    def header(self, draft: _Draft) -> SegmentHeader:
        digests = [future.result() for future in self._futures]
        return draft.header(digests, (self._max_error, self._rms_error))


class _WriteBack:
    """Has written bytes brought to the disk while others are hashed and written."""

    def __init__(self, pool: ThreadPoolExecutor, file: int) -> None:
        self._pool = pool
        self._file = file
        self._futures: list[Future[None]] = []
        self._waiting = 0

    def add(self, nbytes: int) -> None:
        """Note that some bytes were written."""
        self._waiting += nbytes
        if self._waiting >= WRITE_BACK_NBYTES:
            self._waiting = 0
            self._futures.append(self._pool.submit(_SYNC, self._file))

    def finish(self) -> None:
        """Raise what went wrong: the system tells it once, and not to the last fsync."""
        for future in self._futures:
            future.result()


def _save_plain(path: Path, draft: _Draft, trust: Trust) -> SegmentHeader:
    """Write tensors while they are hashed; the header, whose size is known, comes last."""
    shapes = draft.shapes()
    # the file is closed after the threads that work on it have ended
    with (
        new_file(path) as file,
        ThreadPoolExecutor(HASH_THREADS) as pool,
        ThreadPoolExecutor(1) as syncing,
    ):
        digests, write_back = _Digests(pool), _WriteBack(syncing, file)
        size = _largest_header(draft, trust)
        os.lseek(file, size, os.SEEK_SET)
        for (name, _, _), (tensor, max_error, rms_error) in zip(
            shapes, draft.tensors(), strict=True
        ):
            digests.add(name, tensor, max_error, rms_error)
            content = bytes_of(tensor)
            write_all(file, content)
            write_back.add(len(content))
        header = digests.header(draft)
        write_back.finish()
        os.lseek(file, 0, os.SEEK_SET)
        write_all(file, _first_bytes(header, trust, size))
    return header


def _save_sealed(path: Path, draft: _Draft, trust: Trust) -> SegmentHeader:
    """Hash everything, then encrypt the plain file piece by piece into a sealed one."""
    tensors = list(draft.tensors())
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = _Digests(pool)
        for (name, _, _), (tensor, max_error, rms_error) in zip(
            draft.shapes(), tensors, strict=True
        ):
            digests.add(name, tensor, max_error, rms_error)
        header = digests.header(draft)
    first = _first_bytes(header, trust, 0)
    num_plain_bytes = len(first) + header.nbytes
    sealing = trust.sealing(num_plain_bytes)
    outer, _ = container.build(
        {SEALED_KEY: sealing}, [(SEALED_KEY, "U8", (sealed_size(num_plain_bytes),))]
    )

    def plain() -> Iterator[bytes | memoryview]:
        yield first
        yield from (bytes_of(tensor) for tensor, _, _ in tensors)

    with new_file(path) as file:
        write_all(file, outer)
        for chunk in trust.encrypt(plain(), sealing):
            write_all(file, chunk)
    return header


def _largest_header(draft: _Draft, trust: Trust) -> int:
    """Return a size that the first bytes fit into, before digests and errors are known."""
    shapes = draft.shapes()
    errors = (0.1234567890123456e-3,) * 2 if draft.int8 else (0.0, 0.0)
    blank = draft.header(["0" * 64] * len(shapes), errors)
    return len(_first_bytes(blank, trust, 0)) + container.PAGE


def _first_bytes(header: SegmentHeader, trust: Trust, size: int) -> bytes:
    """Return everything before the tensors, padded to `size` bytes."""
    text = header.to_json()
    metadata = {HEADER_KEY: text, DIGEST_KEY: digest_text(text)}
    signature = trust.sign(text)
    if signature is not None:
        metadata[SIGNATURE_KEY] = signature
    shapes = [(t.name, t.dtype, t.shape) for t in header.tensors]
    return container.build(metadata, shapes, size)[0]

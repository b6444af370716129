"""The outer form of a file: safetensors, read with bounds and no trust.

    u64 header size | header: JSON, blanks up to a page | tensors, in order, without gaps

Owns `Container`: where each tensor's bytes lie and the metadata texts. Checks every number
against the size of the file before anything is allocated. Knows no K/V.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnotes.errors import SegmentFormatError
from kvnotes.store.untrusted import MAX_BRACKETS, FaultError, bounded_json, num_brackets

SUFFIX = ".kv.safetensors"
"""What the names of segment files end with."""
MAX_HEADER_NBYTES = 32 << 20
"""Longest header: four million token ids and as much text fit."""
PAGE = 4096
"""Tensors begin on a page, so that mapped ones are aligned for every dtype and kernel."""
MAX_TENSORS = 1 << 13
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}

_HINT = "the file is damaged or is no segment; compile the segment again"
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's bytes `[start, stop)`, from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Container:
    """A parsed outer form.

    Args:
        metadata: Texts by name.
        places: The tensors, in the order of their bytes.
        nbytes: Size of the whole file.
    """

    metadata: Mapping[str, str]
    places: tuple[Place, ...]
    nbytes: int


def header_size(first: bytes, num_file_bytes: int, where: str) -> int:
    """Return the number of header bytes that follow the first eight.

    Raises:
        SegmentFormatError: Too short, or it claims more than there is or is allowed.
    """
    if len(first) < 8:
        raise SegmentFormatError(f"{where} has {num_file_bytes} bytes, too few", hint=_HINT)
    size: int = struct.unpack("<Q", first[:8])[0]
    if size > MAX_HEADER_NBYTES:
        if first[:2] in _PICKLES or first[:4] == b"PK\x03\x04":
            raise SegmentFormatError(
                f"{where} is a pickle or zip file, a segment is a safetensors file",
                hint="never load such a file from somebody else: it can run code",
            )
        raise SegmentFormatError(
            f"{where} claims a header of {size} bytes, the limit is {MAX_HEADER_NBYTES}", hint=_HINT
        )
    if 8 + size > num_file_bytes:
        raise SegmentFormatError(
            f"{where} claims a header of {size} bytes and has {num_file_bytes} in all", hint=_HINT
        )
    return size


def parse(header: bytes, num_file_bytes: int, where: str) -> Container:
    """Parse a header.

    Args:
        header: The bytes after the first eight.
        num_file_bytes: Size of the whole file.
        where: Name of the file, for messages.

    Raises:
        SegmentFormatError: Anything but tensors in order that fill the file exactly.
    """
    if not header.startswith(b"{"):
        raise SegmentFormatError(f"{where} has a header that is no JSON object", hint=_HINT)
    data = bounded_json(header, where)
    try:
        return _Parser(8 + len(header), num_file_bytes).container(data)
    except FaultError as error:
        raise SegmentFormatError(f"{where}: {error}", hint=_HINT) from error


def build(
    metadata: Mapping[str, str],
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    least: int = 0,
) -> tuple[bytes, tuple[Place, ...]]:
    """Return the first bytes of a file, up to its tensors, and where those will lie.

    Args:
        metadata: Texts by name.
        tensors: (name, dtype, shape), in order.
        least: Pad to this many bytes, a multiple of `PAGE`.

    Raises:
        SegmentFormatError: The header gets longer than allowed, or a tensor would not be
            aligned.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset, relative = 0, []
    for name, dtype, shape in tensors:
        if offset % ITEMSIZE[dtype]:
            raise SegmentFormatError(
                f"tensor {name!r} would begin at byte {offset}, no multiple of its item size",
                hint="int8 needs an even number of bytes in every tensor: store it exactly",
            )
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        table[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        relative.append((name, dtype, shape, offset, offset + nbytes))
        offset += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * max(-(8 + len(text)) % PAGE, least - 8 - len(text))
    if len(text) > MAX_HEADER_NBYTES or num_brackets(text) > MAX_BRACKETS:
        raise SegmentFormatError(
            f"a header of {len(text)} bytes and {num_brackets(text)} brackets is larger than "
            f"the {MAX_HEADER_NBYTES} and {MAX_BRACKETS} allowed",
            hint="split the segment",
        )
    first = 8 + len(text)
    places = tuple(Place(n, d, s, first + a, first + b) for n, d, s, a, b in relative)
    return struct.pack("<Q", len(text)) + text, places


class _Parser:
    """Checks a decoded header against the size of its file."""

    def __init__(self, first: int, num_file_bytes: int) -> None:
        self.first = first
        self.num_file_bytes = num_file_bytes

    def container(self, data: dict[str, Any]) -> Container:
        metadata = data.pop("__metadata__", {})
        texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        if not texts:
            raise FaultError("its metadata are not texts")
        if not 0 < len(data) <= MAX_TENSORS:
            raise FaultError(f"it has {len(data)} tensors, 1 to {MAX_TENSORS} are allowed")
        places = sorted(
            (self.place(name, entry) for name, entry in data.items()),
            key=lambda place: (place.start, place.stop),
        )
        end = self.first
        for place in places:
            if place.start != end:
                raise FaultError(
                    f"tensor {place.name[:80]!r} begins at byte {place.start}, the one before "
                    f"ends at {end}"
                )
            end = place.stop
        if end != self.num_file_bytes:
            raise FaultError(
                f"its tensors end at byte {end}, the file has {self.num_file_bytes}: it was cut "
                "off, or something was added"
            )
        return Container(metadata, tuple(places), self.num_file_bytes)

    def place(self, name: str, entry: object) -> Place:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FaultError(f"tensor {name[:80]!r} is described by other keys than its own three")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise FaultError(f"tensor {name[:80]!r} has the dtype {str(dtype)[:20]!r}")
        if not _sizes(shape, 4) or not _sizes(offsets, 2) or len(offsets) != 2:
            raise FaultError(f"tensor {name[:80]!r} has no valid shape or offsets")
        start, stop = self.first + offsets[0], self.first + offsets[1]
        if start % ITEMSIZE[dtype]:
            raise FaultError(
                f"tensor {name[:80]!r} begins at byte {start}, no multiple of its item size"
            )
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if stop - start != nbytes or stop > self.num_file_bytes:
            raise FaultError(
                f"tensor {name[:80]!r} of shape {shape} takes {nbytes} bytes, its place is "
                f"[{start}, {stop}) of {self.num_file_bytes}"
            )
        return Place(name, dtype, tuple(shape), start, stop)


def _sizes(value: object, most: int) -> bool:
    """Whether a value is a list of plain sizes; True and 1.0 are none."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
    )

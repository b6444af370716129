"""Reading GGUF files: the header, strictly, and the tensors, dequantised.

Owns the file format; knows nothing of model families. Every length is checked against
the file before anything of that length is read, so a short or hostile file is an error
and never a long wait.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from kvnotes.errors import SegmentFormatError, UnsupportedModelError

Value: TypeAlias = "bool | int | float | str | list[Value]"

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY = 8, 9
# value type -> struct code; 8 is a string and 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file: where it lies and what it holds.

    Attributes:
        shape: Rows first, as torch has it; the file stores it the other way round.
        start: First byte in the file.
        stop: One past its last byte.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything in a GGUF file but the tensors' bytes."""

    path: Path
    fields: dict[str, Value]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The model family, in llama.cpp's words."""
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        """A field that must be there and be a string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def number(self, key: str) -> int:
        """A field that must be there and be a whole number."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number", value)
        return value

    def real(self, key: str) -> float:
        """A field that must be there and be a number."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def _get(self, key: str) -> Value:
        if key not in self.fields:
            raise SegmentFormatError(f"{self.path} has no field {key!r}", hint=_HINT)
        return self.fields[key]

    def _wrong(self, key: str, wanted: str, value: Value) -> SegmentFormatError:
        kind = type(value).__name__
        return SegmentFormatError(
            f"{self.path}: field {key!r} should be {wanted}, it is a {kind}", hint=_HINT
        )


_HINT = "fetch the file again, or convert the model to a folder with safetensors weights"


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        SegmentFormatError: The file is not GGUF, is damaged, or is cut short.
        UnsupportedModelError: A tensor has a type that this version cannot read.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise SegmentFormatError(f"{path} does not start with {MAGIC!r}", hint=_HINT)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


def read_tensor(header: GGUFHeader, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """Return one tensor with its exact dequantised values.

    Raises:
        UnsupportedModelError: The tensor's quantisation cannot be undone here.
    """
    raw = np.memmap(header.path, dtype=np.uint8, mode="r", offset=tensor.start,
                    shape=(tensor.stop - tensor.start,))  # fmt: skip
    rows = np.asarray(raw).reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))
    try:
        values = dequantize(rows, tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{header.path}: tensor {tensor.name!r} is {tensor.kind.name}, "
            "which cannot be dequantised",
            hint="use a GGUF file of another quantisation, such as Q8_0",
        ) from error
    return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


class _Reader:
    """A cursor over the mapped file that never runs past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = len(MAGIC)

    def header(self) -> GGUFHeader:
        version = self.unpack("I")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}; this reads versions 2 and 3",
                hint="convert the file with a current llama.cpp (little-endian)",
            )
        num_tensors, num_fields = self.unpack("Q"), self.unpack("Q")
        fields: dict[str, Value] = {}
        for _ in range(num_fields):
            key = self.string()
            if key in fields:
                raise self.damaged(f"the field {key!r} appears twice")
            fields[key] = self.value(self.unpack("I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]

        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.damaged(f"the alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self.damaged(f"the tensor {name!r} appears twice")
            tensors[name] = self.place(name, shape, kind, start + offset)
        return GGUFHeader(self.path, fields, tensors)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.unpack("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.damaged(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self.unpack("Q") for _ in range(num_dims)]
        if 0 in dims:
            raise self.damaged(f"tensor {name!r} is empty")
        return name, tuple(reversed(dims)), self.unpack("I"), self.unpack("Q")

    def place(self, name: str, shape: Sequence[int], kind: int, start: int) -> GGUFTensor:
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has the unknown type {kind}",
                hint="use a GGUF file of another quantisation, such as Q8_0",
            ) from error
        try:
            nbytes = math.prod(quant_shape_to_byte_shape(shape, quantisation))
        except ValueError as error:
            raise self.damaged(f"tensor {name!r}: {error}") from error
        if start + nbytes > self.size:
            raise self.damaged(
                f"tensor {name!r} ends at byte {start + nbytes}, the file at {self.size}"
            )
        return GGUFTensor(name, tuple(shape), quantisation, start, start + nbytes)

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            scalar: Value = self.unpack(self.code(kind))
            return scalar
        if depth >= MAX_ARRAY_DEPTH:
            raise self.damaged("arrays are nested too deeply")
        item, count = self.unpack("I"), self.unpack("Q")
        if item in (_STRING, _ARRAY):
            # each item takes at least the eight bytes of its length
            self.need(8 * count)
            return [self.value(item, depth + 1) for _ in range(count)]
        code = self.code(item)
        size = struct.calcsize("<" + code)
        self.need(size * count)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size * count
        return list(values)

    def string(self) -> str:
        length = self.unpack("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("a string is not UTF-8") from error

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"a value has the unknown type {kind}")
        return _SCALARS[kind]

    def unpack(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def need(self, nbytes: int) -> None:
        if self.at + nbytes > self.size:
            raise self.damaged(f"{nbytes} bytes are missing at byte {self.at} of {self.size}")

    def damaged(self, what: str) -> SegmentFormatError:
        return SegmentFormatError(f"{self.path} is damaged: {what}", hint=_HINT)

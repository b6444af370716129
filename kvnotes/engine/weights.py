"""The identity of weights: one digest per set of named tensors.

Owns the digest and the memory of it. The digest depends on names, dtypes, shapes and
bytes only: not on how a folder is sharded, nor on which library wrote it. Files are read
with a JSON parser and a memory map; torch is not needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnotes.errors import ModelNotFoundError, SegmentFormatError, UnsupportedModelError
from kvnotes.settings import load_settings, make_private

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_NBYTES = 100_000_000
"""safetensors' own limit."""

SETTLED_S = 2.0
"""A file changed more recently may change again without a new time stamp."""

_CACHE_VERSION = 1
_NUM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_TORCH_NAMES = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16",
    "torch.uint16": "U16", "torch.int32": "I32", "torch.uint32": "U32", "torch.int64": "I64",
    "torch.uint64": "U64", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.float32": "F32", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0", "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_HINT = "fetch the model again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors' name, such as "F32".
        start: Its first byte in the file.
        stop: One past its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int


def weights_digest(path: Path) -> str:
    """Return the SHA-256 of a folder's weights, in hex.

    The same for one file and for shards; remembered while the files do not change.

    Raises:
        ModelNotFoundError: The folder has no weights.
        SegmentFormatError: A file is damaged.
        UnsupportedModelError: The weights are not safetensors.
    """
    files = _weight_files(path)
    return cached_digest(files, "weights", lambda: _digest_of_files(path))


def state_dict_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of named tensors in memory: that of a folder holding the same."""
    return _digest(
        (name, _dtype_name(name, tensor), tuple(tensor.shape), _tensor_bytes(tensor))
        for name, tensor in sorted(tensors.items())
    )


def read_tensor_entries(path: Path) -> list[TensorEntry]:
    """Read and check the headers of a folder's weights; sorted by name.

    Raises:
        ModelNotFoundError: The folder has no weights.
        SegmentFormatError: A file is damaged.
        UnsupportedModelError: The weights are not safetensors.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(path):
        for entry in _read_header(file):
            if entry.name in entries:
                raise SegmentFormatError(
                    f"tensor {entry.name!r} is in {entries[entry.name].path} and in {file}",
                    hint=_HINT,
                )
            entries[entry.name] = entry
    return [entries[name] for name in sorted(entries)]


def cached_digest(files: Sequence[Path], kind: str, compute: Callable[[], str]) -> str:
    """Return a digest of files, from memory where none of them changed.

    Args:
        files: What the digest depends on.
        kind: What is digested; digests of two kinds of one file differ.
        compute: Called where the digest is not known.
    """
    before = _stamps(files)
    key = f"{kind}:{files[0].absolute()}"
    known = _load_cache().get(key)
    if isinstance(known, dict) and known.get("files") == before:
        digest = known.get("digest")
        if isinstance(digest, str) and len(digest) == 64:
            return digest
    digest = compute()
    newest = max(stamp[2] for stamp in before) / 1e9
    if _stamps(files) == before and time.time() - newest > SETTLED_S:
        _remember(key, {"files": before, "digest": digest})
    return digest


def _digest_of_files(path: Path) -> str:
    entries = read_tensor_entries(path)
    maps: dict[Path, memoryview] = {}
    for file in {entry.path for entry in entries}:
        with file.open("rb") as opened:
            maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    return _digest(
        (entry.name, entry.dtype, entry.shape, maps[entry.path][entry.start : entry.stop])
        for entry in entries
    )


def _digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview]]) -> str:
    digest = hashlib.sha256(b"kvnotes weights 1\n")
    for name, dtype, shape, data in tensors:
        # JSON has no bare newline, so no two lists of tensors give the same stream
        digest.update(json.dumps([name, dtype, shape, data.nbytes]).encode() + b"\n")
        digest.update(data)
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    """The files that transformers would load, by its own order of preference."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(path / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SegmentFormatError(f"{index} is no index of weights", hint=_HINT) from error
        for file in files:
            if file.parent != path or not file.is_file():
                raise ModelNotFoundError(f"{index} names {file}, which is not there", hint=_HINT)
        if files:
            return files
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise UnsupportedModelError(
            f"{path} holds pickled weights only; safetensors are read",
            hint="load the model with transformers and save_pretrained it to a new folder",
        )
    raise ModelNotFoundError(f"{path} holds no model.safetensors", hint=_HINT)


def _read_header(file: Path) -> list[TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
            raise _damaged(file, f"its header takes {length} bytes, the file {size}")
        try:
            header = json.loads(opened.read(length), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise _damaged(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no object")
    header.pop("__metadata__", None)
    entries = [_entry(file, name, info, 8 + length) for name, info in header.items()]
    at = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != at:
            raise _damaged(file, f"tensor {entry.name!r} is at byte {entry.start}, not {at}")
        at = entry.stop
    if at != size:
        raise _damaged(file, f"its tensors end at byte {at}, the file at {size}")
    return entries


def _entry(file: Path, name: str, info: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        numbers = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        num_bits = _NUM_BITS[dtype] * math.prod(shape) if numbers else -1
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"tensor {name!r} is not described") from error
    if 8 * (stop - start) != num_bits:
        raise _damaged(file, f"tensor {name!r} of shape {shape} takes {stop - start} bytes")
    return TensorEntry(name, dtype, shape, file, base + start, base + stop)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _damaged(file: Path, what: str) -> SegmentFormatError:
    return SegmentFormatError(f"{file} is damaged: {what}", hint=_HINT)


def _dtype_name(name: str, tensor: Tensor) -> str:
    try:
        return _TORCH_NAMES[str(tensor.dtype)]
    except KeyError as error:
        raise UnsupportedModelError(
            f"tensor {name!r} is {tensor.dtype}, which safetensors cannot hold",
            hint="load the model in float32, bfloat16 or float16",
        ) from error


def _tensor_bytes(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _stamps(files: Sequence[Path]) -> list[list[Any]]:
    """What tells that a file is still the same, as JSON holds it."""
    found = [(file, file.stat()) for file in files]
    return [
        [file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        for file, stat in found
    ]


def _load_cache() -> dict[str, Any]:
    """The remembered digests; a missing or damaged file remembers nothing."""
    try:
        content = json.loads(load_settings().digests.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _CACHE_VERSION:
        return {}
    digests = content.get("digests")
    return digests if isinstance(digests, dict) else {}


def _remember(key: str, value: dict[str, Any]) -> None:
    """Add one digest; a folder that cannot be written costs time, not correctness."""
    target = load_settings().digests
    content = {"version": _CACHE_VERSION, "digests": _load_cache() | {key: value}}
    try:
        make_private(target.parent)
        handle, scratch = tempfile.mkstemp(prefix=".digests-", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(scratch, target)
        except OSError:
            os.unlink(scratch)
            raise
    except OSError:
        return

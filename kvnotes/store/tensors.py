"""Tensors as bytes: views of files, and digests that refuse what is not finite."""

from __future__ import annotations

import hashlib
import mmap
import os
import warnings

import torch
from torch import Tensor

from kvnotes.errors import SegmentFormatError
from kvnotes.store.container import Place

HASH_THREADS = min(4, os.cpu_count() or 1)
"""SHA-256 runs at about 1 GB/s a core, slower than a page cache is read: two cores halve it."""

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def as_tensor(content: mmap.mmap | bytearray) -> Tensor:
    """Return bytes as a tensor, without a copy."""
    with warnings.catch_warnings():
        # nobody writes into a segment, and the map would not let them
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=torch.uint8)


def view(whole: Tensor, place: Place) -> Tensor:
    """Return one tensor of a file as a view of all its bytes."""
    return whole[place.start : place.stop].view(_DTYPES[place.dtype]).view(place.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    array: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return array


def checked_digest(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous tensor.

    Raises:
        SegmentFormatError: It holds NaN or infinity.
    """
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    if tensor.is_floating_point():
        # right after hashing the tensor is in the CPU's cache
        low, high = torch.aminmax(tensor)
        if not bool(torch.isfinite(low)) or not bool(torch.isfinite(high)):
            raise SegmentFormatError(
                f"{name} holds NaN or infinity", hint="the model overflowed; use another dtype"
            )
    return digest

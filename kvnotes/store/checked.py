"""A stored file is what its name says: opened with its key and tenant checked.

Owns the way from a file to its `Entry`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvnotes.errors import SegmentFormatError
from kvnotes.store.header import SegmentHeader
from kvnotes.store.index import Entry
from kvnotes.store.trust import Trust

if TYPE_CHECKING:  # with torch: listing takes none
    from kvnotes.store.opening import OpenFile


def open_checked(path: Path, key: str, tenant: str, trust: Trust) -> OpenFile | None:
    """Open a file; None where there is none.

    Args:
        path: Where it is.
        key: The content key it must have.
        tenant: Whose it must be.
        trust: Keys for signatures and encryption.

    Raises:
        SegmentFormatError: It is damaged, or holds another segment.
        TrustError: No trusted key signed it, or its encryption key is not there.
        StorageError: The system cannot open it now.
    """
    if not os.path.lexists(path):
        return None
    from kvnotes.store.opening import open_segment

    try:
        opened = open_segment(path, trust=trust)
    except SegmentFormatError:
        if not os.path.lexists(path):  # evicted by another process meanwhile
            return None
        raise
    if opened.header.key != key:
        raise SegmentFormatError(
            f"{path} holds the segment {opened.header.key[:12]}, not {key[:12]}",
            hint="the file was renamed or swapped; compile the segment again",
        )
    if opened.header.tenant != tenant:
        raise SegmentFormatError(
            f"{path} lies among the files of another tenant than its own",
            hint="move it back, or compile the segment again",
        )
    return opened


def entry_of(header: SegmentHeader, nbytes: int, written_at: float) -> Entry:
    """Return the entry of a file.

    Args:
        header: What it says.
        nbytes: Its size.
        written_at: When it was written, in seconds since 1970.
    """
    source = header.provenance
    return Entry(
        key=header.key,
        kind=header.kind,
        tenant=header.tenant,
        fingerprint=header.fingerprint,
        name=source.name,
        version=source.version,
        family=source.family or header.key,
        variant=", ".join(f"{name}={value}" for name, value in source.variant),
        text="" if source.text else source.text_sha256,
        num_tokens=len(header.token_ids),
        nbytes=nbytes,
        altered=header.altered,
        created_at=written_at,
        used_at=written_at,
    )


def read_entry(path: Path, key: str, tenant: str, trust: Trust) -> Entry | None:
    """Return the entry of a file whose digests are not checked; see `open_checked`."""
    opened = open_checked(path, key, tenant, trust)
    if opened is None:
        return None
    return entry_of(opened.header, opened.version.nbytes, opened.version.mtime_ns / 1e9)

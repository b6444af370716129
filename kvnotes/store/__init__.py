"""Compiled segments as files that people keep, share and trust.

`saving` and `opening` are the two ways between a segment and a file, `store` puts tiers of
them behind one key; `docs/format.md` says what a file holds.
"""

from kvnotes.store.disk import DiskTier, Limits
from kvnotes.store.header import Provenance, SegmentHeader, content_key, digest_text
from kvnotes.store.index import Entry
from kvnotes.store.memory import MemoryTier
from kvnotes.store.opening import OpenFile, VerifiedFiles, converted, load_segment, open_segment
from kvnotes.store.remote import Remote, RemoteFile
from kvnotes.store.saving import SUFFIX, save_segment
from kvnotes.store.store import SHARED, Counters, Fault, KVStore, remote_path
from kvnotes.store.trust import NO_TRUST, Trust

__all__ = [
    "NO_TRUST",
    "SHARED",
    "SUFFIX",
    "Counters",
    "DiskTier",
    "Entry",
    "Fault",
    "KVStore",
    "Limits",
    "MemoryTier",
    "OpenFile",
    "Provenance",
    "Remote",
    "RemoteFile",
    "SegmentHeader",
    "Trust",
    "VerifiedFiles",
    "content_key",
    "converted",
    "digest_text",
    "load_segment",
    "open_segment",
    "remote_path",
    "save_segment",
]

"""Compiled segments as files that people keep, share and trust.

`saving` and `opening` are the two ways between a segment and a file, `store` puts tiers of
them behind one key; `docs/format.md` says what a file holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvnotes.store.container import SUFFIX
    from kvnotes.store.disk import DiskTier
    from kvnotes.store.folder import SHARED, Limits, StoreFolder
    from kvnotes.store.header import Provenance, SegmentHeader, content_key, digest_text
    from kvnotes.store.index import Entry
    from kvnotes.store.memory import MemoryTier
    from kvnotes.store.opening import OpenFile, converted, load_segment, open_segment
    from kvnotes.store.prune import Pruned, Rule
    from kvnotes.store.relay import remote_path
    from kvnotes.store.remote import Remote, RemoteFile
    from kvnotes.store.saving import save_segment
    from kvnotes.store.store import KVStore
    from kvnotes.store.tally import Counters, Fault
    from kvnotes.store.trust import NO_TRUST, Trust
    from kvnotes.store.verified import VerifiedFiles

_HOMES = {
    "NO_TRUST": "trust",
    "SHARED": "folder",
    "SUFFIX": "container",
    "Counters": "tally",
    "DiskTier": "disk",
    "Entry": "index",
    "Fault": "tally",
    "KVStore": "store",
    "Limits": "folder",
    "MemoryTier": "memory",
    "OpenFile": "opening",
    "Provenance": "header",
    "Pruned": "prune",
    "Remote": "remote",
    "RemoteFile": "remote",
    "Rule": "prune",
    "SegmentHeader": "header",
    "StoreFolder": "folder",
    "Trust": "trust",
    "VerifiedFiles": "verified",
    "content_key": "header",
    "converted": "opening",
    "digest_text": "header",
    "load_segment": "opening",
    "open_segment": "opening",
    "remote_path": "relay",
    "save_segment": "saving",
}

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
    "Pruned",
    "Remote",
    "RemoteFile",
    "Rule",
    "SegmentHeader",
    "StoreFolder",
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


def __getattr__(name: str) -> Any:
    """Import names on first use: listing a folder takes no torch."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"kvnotes.store.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvnotes.store' has no attribute {name!r}")

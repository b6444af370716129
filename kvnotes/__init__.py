"""kvnotes edits and composes the KV cache of language models.

A field in a long cached prompt changes: kvnotes amends the cache. A policy, a tool list or
a document is needed in a new conversation: kvnotes pastes its precompiled cache at any
position. Every result can be compared with a full prefill.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvnotes.errors import KVNotesError

if TYPE_CHECKING:
    from kvnotes.engine.base import SamplingParams
    from kvnotes.library import Library, Skill
    from kvnotes.prompt import (
        ErratumStyle,
        Field,
        Message,
        PromptTemplate,
        SegmentText,
        tool_segment,
        tool_text,
    )
    from kvnotes.session import Model, Scorecard, Session, Turn, generate_together, load
    from kvnotes.store import KVStore

try:
    __version__ = version("kvnotes")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0+unknown"

_HOMES = {
    "SamplingParams": "kvnotes.engine.base",
    "ErratumStyle": "kvnotes.prompt",
    "Field": "kvnotes.prompt",
    "Message": "kvnotes.prompt",
    "PromptTemplate": "kvnotes.prompt",
    "SegmentText": "kvnotes.prompt",
    "tool_segment": "kvnotes.prompt",
    "tool_text": "kvnotes.prompt",
    "KVStore": "kvnotes.store",
    "Library": "kvnotes.library",
    "Skill": "kvnotes.library",
    "Model": "kvnotes.session",
    "Scorecard": "kvnotes.session",
    "Session": "kvnotes.session",
    "Turn": "kvnotes.session",
    "generate_together": "kvnotes.session",
    "load": "kvnotes.session",
}

__all__ = [
    "ErratumStyle",
    "Field",
    "KVNotesError",
    "KVStore",
    "Library",
    "Message",
    "Model",
    "PromptTemplate",
    "SamplingParams",
    "Scorecard",
    "SegmentText",
    "Session",
    "Skill",
    "Turn",
    "__version__",
    "generate_together",
    "load",
    "tool_segment",
    "tool_text",
]


def __getattr__(name: str) -> Any:
    """Import names on first use: `import kvnotes` takes no torch."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvnotes' has no attribute {name!r}")

"""vLLM: splices and edits in the engine that people run in production.

    kvnotes vllm serve MODEL          a server with everything set
    KVNotesConnector                  the plug-in: finds compiled segments in prompts, moves their
                                      keys, puts them into vLLM's cache; compiles new ones
    KVNotesScheduler                  any number of segments at any place of a prompt
    VLLMEngine                        sessions over a running server, stock or with the plug-in

Importing this imports no vLLM: the plug-in runs in the processes of vLLM, the client anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvnotes.vllm.client import VLLMEngine
    from kvnotes.vllm.connecting import connect

_HOMES = {"VLLMEngine": "kvnotes.vllm.client", "connect": "kvnotes.vllm.connecting"}

__all__ = ["VLLMEngine", "connect"]


def __getattr__(name: str) -> Any:
    """Import names on first use: the plug-in takes nothing of the client."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvnotes.vllm' has no attribute {name!r}")

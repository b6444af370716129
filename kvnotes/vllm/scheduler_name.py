"""How vLLM is told to use our scheduler, and whether it does."""

from __future__ import annotations

from typing import Any

SCHEDULER = "kvnotes.vllm.scheduler.KVNotesScheduler"
TESTED_VLLM = ("0.32.0",)
"""Versions of vLLM that the scheduler was tested with; it uses internals that others may change."""


def is_ours(vllm_config: Any) -> bool:
    """Whether a configuration names our scheduler."""
    named = vllm_config.scheduler_config.scheduler_cls
    if isinstance(named, str):
        return named == SCHEDULER
    return getattr(named, "__module__", "") == SCHEDULER.rpartition(".")[0]

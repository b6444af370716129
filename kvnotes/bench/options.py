"""What a benchmark is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]
"""Tells the user what is being measured now."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How much is measured.

    Args:
        lengths: Tokens of the segment.
        new_tokens: Tokens behind it; where only one number is used, the first.
        runs: Timed runs of each arm, after one warm-up.
        full: Whether full prefills are timed: they take most of the time.
        peers: Whether other methods are measured as well.
        sessions: How many conversations share a segment.
        gguf: The model as a GGUF file, for llama.cpp.
    """

    lengths: tuple[int, ...] = (1536, 3072, 6144)
    new_tokens: tuple[int, ...] = (32,)
    runs: int = 5
    full: bool = True
    peers: bool = False
    sessions: tuple[int, ...] = (1, 2, 4, 8, 16)
    gguf: Path | None = None

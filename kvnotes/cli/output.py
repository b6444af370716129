"""Data on stdout, for programs."""

from __future__ import annotations

import io
import sys


def print_json(text: str) -> None:
    """Print JSON text; it is UTF-8 whatever the locale is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(text)

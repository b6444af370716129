"""Tiny models have short prompts: where this is used, everything is read where it stands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvnotes.engine import execute


@pytest.fixture(autouse=True, scope="session")
def short_pieces() -> Iterator[None]:
    """Read pieces where they stand however short they are."""
    usual = execute.MIN_PIECE_TOKENS
    execute.MIN_PIECE_TOKENS = 1
    yield
    execute.MIN_PIECE_TOKENS = usual

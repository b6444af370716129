"""Tiny models have short prompts: here everything is read where it stands, however short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvnotes.engine import execute


@pytest.fixture(autouse=True, scope="session")
def _short_pieces() -> Iterator[None]:
    usual = execute.MIN_PIECE_TOKENS
    execute.MIN_PIECE_TOKENS = 1
    yield
    execute.MIN_PIECE_TOKENS = usual

"""Which earlier request of a log a request continues.

Owns the guess, made from shared lines: digits are masked, so that a clock on the first line does
not hide that two requests have the same prompt.
"""

from __future__ import annotations

import re

from kvnotes.lint.requests import Request

MAX_OPEN = 16
"""Conversations that are kept open at a time; a log of more interleaved ones compares fewer."""

MIN_SHARED = 0.3
"""Shared lines over those of the smaller request, from which on two requests belong together."""

_NUMBER = re.compile(r"(?<!\w)[A-Za-z]{0,40}\d\w*")


class Threads:
    """The latest request of each open conversation."""

    def __init__(self) -> None:
        self._open: list[tuple[int, frozenset[int]]] = []
        self._cache: dict[str, frozenset[int]] = {}

    def previous(self, request: Request) -> int | None:
        """Return the number of the request that this one resembles most, the latest of equals."""
        lines = self._lines(request)
        best, best_share = None, MIN_SHARED
        for number, other in reversed(self._open):
            least = min(len(lines), len(other))
            share = len(lines & other) / least if least else 0.0
            if share > best_share or (best is None and share >= MIN_SHARED):
                best, best_share = number, share
        return best

    def add(self, number: int, request: Request, *, instead_of: int | None) -> None:
        """Make a request the latest of its conversation.

        Args:
            number: Its number.
            request: The request.
            instead_of: The one that it continues; None opens another conversation.
        """
        kept = [entry for entry in self._open if entry[0] != instead_of]
        self._open = [*kept[-(MAX_OPEN - 1) :], (number, self._lines(request))]

    def _lines(self, request: Request) -> frozenset[int]:
        return frozenset().union(*(self._lines_of(part.text) for part in request.parts))

    def _lines_of(self, text: str) -> frozenset[int]:
        if text not in self._cache:
            masked = (_NUMBER.sub("0", line.strip()) for line in text.splitlines())
            self._cache[text] = frozenset(hash(line) for line in masked if line)
        return self._cache[text]

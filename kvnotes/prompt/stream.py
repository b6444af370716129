"""Incremental detokenizing.

Owns the text of a growing list of ids. Does not know stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class StreamDecoder:
    """Turns ids into text one by one and never shows half a character.

    The texts returned by `push` and `finish`, joined, are the decoding of all ids without
    special tokens.

    Args:
        decode: Decodes ids to text.
        skip: Ids that have no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: frozenset[int]) -> None:
        self._decode = decode
        self._skip = skip
        # ids:  ... done | context | pending.  The context is decoded again, because decoders
        # treat the first token otherwise (a leading space).
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add one id and return the text that became complete."""
        if token_id in self._skip:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return what is left, incomplete characters as U+FFFD."""
        if not self._pending:
            return ""
        return self._take(self._decode(self._context + self._pending))

    def _take(self, text: str) -> str:
        new = text[self._shown :]
        self._context, self._pending = self._pending, []
        self._shown = len(self._decode(self._context))
        return new

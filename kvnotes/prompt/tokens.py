"""From characters to tokens.

Owns tokenizing in pieces and mapping character ranges to token ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kvnotes.prompt.generated import Run

if TYPE_CHECKING:
    from kvnotes.prompt.tokenizer import EncodedPiece, PromptTokenizer


@dataclass(frozen=True, slots=True)
class TokenizedPiece:
    """One piece of the text; `encoded` is None for generated ids.

    Args:
        start: First character.
        stop: Character after the last.
        token_start: First token.
        ids: The tokens.
        encoded: The same with character ranges, relative to `start`.
    """

    start: int
    stop: int
    token_start: int
    ids: tuple[int, ...]
    encoded: EncodedPiece | None


class TokenMap:
    """A tokenized text.

        text:    stretch | run | stretch            runs are generated ids
        pieces:  p | p | p | run | p | p            cut before control tokens at borders

    Args:
        text: The rendered text.
        borders: Characters where messages begin.
        runs: Generated ids, in order.
        tokenizer: The tokenizer.
    """

    def __init__(
        self, text: str, borders: Iterable[int], runs: Sequence[Run], tokenizer: PromptTokenizer
    ) -> None:
        self.pieces: list[TokenizedPiece] = []
        self._num_tokens = 0
        cuts = sorted(b for b in set(borders) if tokenizer.can_split_before(text, b))
        done, word = 0, ""
        for run in (*runs, None):
            stop = len(text) if run is None else run.start
            inner = cuts[bisect_right(cuts, done) : bisect_left(cuts, stop)]
            for a, b in zip([done, *inner], [*inner, stop], strict=True):
                if a < b:
                    behind = word if a == done else ""
                    piece = (
                        tokenizer.piece_behind(behind, text[a:b])
                        if behind
                        else tokenizer.piece(text[a:b])
                    )
                    self._add(a, b, piece.ids, piece)
            if run is not None:
                self._add(run.start, run.stop, run.ids, None)
                done, word = run.stop, run.stop_word
        self._starts = [piece.start for piece in self.pieces]
        self.ids = tuple(chain.from_iterable(piece.ids for piece in self.pieces))

    def at(self, place: int) -> int:
        """Return the first token that ends behind character `place`.

        That is the token that begins there, or the one in which the place lies.
        """
        piece = self._piece(place)
        if piece is None:
            return 0
        if place >= piece.stop:
            return piece.token_start + len(piece.ids)
        if piece.encoded is None:
            return piece.token_start + (len(piece.ids) if place > piece.start else 0)
        return piece.token_start + bisect_right(piece.encoded.stops, place - piece.start)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the smallest token range that covers the characters `[start, stop)`."""
        first = self.at(start)
        piece = self._piece(stop - 1)
        if start >= stop or piece is None:
            return first, first
        if piece.encoded is None:
            return first, piece.token_start + len(piece.ids)
        return first, piece.token_start + bisect_left(piece.encoded.starts, stop - piece.start)

    def control_in(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the characters of a control token that shares any with `[start, stop)`."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for piece in self.pieces[first:]:
            if piece.start >= stop:
                break
            for a, b in piece.encoded.controls if piece.encoded else ():
                if piece.start + a < stop and piece.start + b > start:
                    return piece.start + a, piece.start + b
        return None

    def tokens(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (first character, character after the last, id) of the tokens of a range."""
        found = []
        for piece in self.pieces:
            if piece.token_start >= stop or piece.token_start + len(piece.ids) <= start:
                continue
            for k in range(
                max(start - piece.token_start, 0), min(stop - piece.token_start, len(piece.ids))
            ):
                if piece.encoded is None:
                    found.append((piece.start, piece.stop, piece.ids[k]))
                else:
                    a, b = piece.encoded.starts[k], piece.encoded.stops[k]
                    found.append((piece.start + a, piece.start + b, piece.ids[k]))
        return found

    def _add(
        self, start: int, stop: int, ids: tuple[int, ...], encoded: EncodedPiece | None
    ) -> None:
        self.pieces.append(TokenizedPiece(start, stop, self._num_tokens, ids, encoded))
        self._num_tokens += len(ids)

    def _piece(self, place: int) -> TokenizedPiece | None:
        index = bisect_right(self._starts, place) - 1
        return self.pieces[index] if index >= 0 else None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest run of tokens that two tokenizations of a text share, in both of them."""

    start: int
    stop: int
    other_start: int
    other_stop: int


def longest_match(
    tokens: Sequence[tuple[int, int, int]], others: Sequence[tuple[int, int, int]]
) -> Match:
    """Compare two tokenizations of one text, token by token at the same characters.

    Args:
        tokens: (first character, character after the last, id) of each token.
        others: The same for the other tokenization.

    Returns:
        The longest common run; empty at (0, 0) if there is none.
    """
    best = Match(0, 0, 0, 0)
    i = j = 0
    while i < len(tokens) and j < len(others):
        if tokens[i] != others[j]:
            i, j = (i + 1, j) if tokens[i] < others[j] else (i, j + 1)
            continue
        a, b = i, j
        while i < len(tokens) and j < len(others) and tokens[i] == others[j]:
            i, j = i + 1, j + 1
        if i - a > best.stop - best.start:
            best = Match(a, i, b, j)
    return best

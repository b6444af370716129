"""Counting the tokens that a change invalidates: from a character to the end of a text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

CountTokens = Callable[[str, int], int]
"""`count_tokens(text, start)`: tokens of `text` from the one that holds character `start` on."""

NUM_BYTES_PER_TOKEN = 4
"""UTF-8 bytes; English prose has 4.3 to a token of SmolLM2."""

_BLOCK = 1024


class OffsetCounter:
    """Counts with a tokenizer that tells where its tokens end.

    Args:
        stops: Returns the character behind each token of a text, never decreasing.
    """

    def __init__(self, stops: Callable[[str], Sequence[int]]) -> None:
        self._stops = stops

    def __call__(self, text: str, start: int) -> int:
        """Return the number of tokens that end behind character `start`."""
        stops = self._stops(text)
        return len(stops) - bisect_right(stops, start)


class Estimate:
    """About how many tokens a text has from a character on, at four bytes each."""

    def __init__(self, text: str) -> None:
        self._text = text
        blocks = (text[i : i + _BLOCK] for i in range(0, len(text), _BLOCK))
        self._done = [0, *accumulate(_num_bytes(block) for block in blocks)]

    def __call__(self, start: int) -> int:
        """Return the estimate from character `start` on."""
        block = start // _BLOCK
        done = self._done[block] + _num_bytes(self._text[block * _BLOCK : start])
        return -(-(self._done[-1] - done) // NUM_BYTES_PER_TOKEN)


def suffix_counter(text: str, count_tokens: CountTokens | None) -> Callable[[int], int]:
    """Return a function from a character to the tokens of `text` from there on.

    Args:
        text: The text.
        count_tokens: Counts exactly; None estimates.
    """
    if count_tokens is None:
        return Estimate(text)
    return lambda start: count_tokens(text, start)


def num_tokens(text: str, count_tokens: CountTokens | None = None) -> int:
    """Return the tokens of a text, estimated without a counter."""
    return suffix_counter(text, count_tokens)(0)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))

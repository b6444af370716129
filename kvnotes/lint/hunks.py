"""What differs between two versions of one text: where, from what, to what.

Owns the search for changed pieces: by lines first, then by words inside of changed lines.
Bounded: beyond the limits a changed region is one piece.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_LINES = 1000
"""Most changed lines that are matched with each other."""

MAX_WORDS = 300
"""Most words of a line that are."""

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Hunk:
    """A piece of the old text and what stands in its place.

    Attributes:
        old_start: First character in the old text.
        old_stop: Character after its last.
        start: First character in the new text.
        stop: Character after its last.
    """

    old_start: int
    old_stop: int
    start: int
    stop: int


def hunks(old: str, new: str) -> tuple[Hunk, ...]:
    """Return what differs, in order; nothing if the texts are equal.

    Args:
        old: The text before.
        new: The text after.
    """
    old_lines, new_lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    old_at, new_at = _starts(old_lines), _starts(new_lines)
    found: list[Hunk] = []
    for i1, i2, j1, j2 in changed_ranges(old_lines, new_lines, MAX_LINES):
        if i2 - i1 == j2 - j1:
            for k in range(i2 - i1):
                found += _words(
                    old_lines[i1 + k], new_lines[j1 + k], old_at[i1 + k], new_at[j1 + k]
                )
        else:
            found.append(Hunk(old_at[i1], old_at[i2], new_at[j1], new_at[j2]))
    return tuple(found)


def changed_ranges(
    old: Sequence[Hashable], new: Sequence[Hashable], limit: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield where two sequences differ, as index ranges in both, in order.

    Args:
        old: The sequence before.
        new: The sequence after.
        limit: Most entries between the equal beginning and the equal end that are matched; more
            are one range.
    """
    head = 0
    least = min(len(old), len(new))
    while head < least and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < least - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    old_middle, new_middle = old[head : len(old) - tail], new[head : len(new) - tail]
    if not old_middle and not new_middle:
        return
    if max(len(old_middle), len(new_middle)) > limit:
        yield head, len(old) - tail, head, len(new) - tail
        return
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old_middle, new_middle).get_opcodes():
        if tag != "equal":
            yield head + i1, head + i2, head + j1, head + j2


def is_reordering(old: str, new: str) -> bool:
    """Whether both texts have the same lines in another order."""
    if old == new:
        return False
    old_lines, new_lines = _lines(old), _lines(new)
    return len(old_lines) == len(new_lines) and Counter(old_lines) == Counter(new_lines)


def contains(old: str, new: str) -> bool:
    """Whether one of two texts, neither empty, is a part of the other."""
    return bool(old and new) and (old in new or new in old)


def is_similar(old: str, new: str, *, limit: int = 2000) -> bool:
    """Whether one text is a version of the other.

    Args:
        old: A text.
        new: Another one.
        limit: Characters of each that are compared where their lines say nothing.
    """
    if contains(old, new):
        return True
    if not old or not new:
        return False
    if _shared_lines(old, new) >= 0.5:
        return True
    matcher = SequenceMatcher(None, _WORD.findall(old[:limit]), _WORD.findall(new[:limit]), False)
    return matcher.ratio() >= 0.6


def _words(old: str, new: str, old_at: int, new_at: int) -> Iterator[Hunk]:
    """Yield what differs inside of a line."""
    old_words, new_words = _WORD.findall(old), _WORD.findall(new)
    old_starts, new_starts = _starts(old_words), _starts(new_words)
    for i1, i2, j1, j2 in changed_ranges(old_words, new_words, MAX_WORDS):
        yield Hunk(
            old_at + old_starts[i1],
            old_at + old_starts[i2],
            new_at + new_starts[j1],
            new_at + new_starts[j2],
        )


def _shared_lines(old: str, new: str) -> float:
    """Return the shared lines of two texts over the lines of the shorter one."""
    one, other = set(_lines(old)), set(_lines(new))
    least = min(len(one), len(other))
    return len(one & other) / least if least else 0.0


def _starts(pieces: Sequence[str]) -> list[int]:
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return starts


def _lines(text: str) -> list[str]:
    return [line for line in (raw.strip() for raw in text.splitlines()) if line]

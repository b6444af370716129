"""Private-use characters that mark places through a chat template.

Owns inserting them into contents and finding them again. A value is never searched for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvnotes.errors import TemplateError
from kvnotes.prompt.escape import SENTINEL_FIRST, SENTINEL_LAST
from kvnotes.prompt.resolve import Mark, Resolved

_SENTINEL = re.compile("[\U000f0000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Marked:
    """A message's content with sentinels.

    Sentinels stand inside the outer white space, so a template that trims still sees it:

        "  x is {{x}} "  ->  "  " OPEN "x is " open value close CLOSE " "

    Args:
        text: Content with sentinels.
        inner: Character range of the content without outer white space.
        content: Codes of the content's own sentinels.
        marks: The marks of the message and the codes of their sentinels.
    """

    text: str
    inner: tuple[int, int]
    content: tuple[int, int]
    marks: tuple[tuple[Mark, int, int], ...]


class Marker:
    """Hands out sentinels for one rendering."""

    def __init__(self) -> None:
        self._next = SENTINEL_FIRST

    def mark(self, message: Resolved) -> Marked | None:
        """Put sentinels into a content; None if it is only white space."""
        text = message.text
        first = len(text) - len(text.lstrip())
        last = len(text.rstrip())
        if first >= last:
            return None
        content = (self._code(), self._code())
        marks = tuple((mark, self._code(), self._code()) for mark in message.marks)
        places = [(first, content[0]), (last, content[1])]
        for mark, opened, closed in marks:
            places.append((min(max(mark.start, first), last), opened))
            places.append((min(max(mark.stop, first), last), closed))
        pieces, done = [], 0
        for place, code in sorted(places):
            pieces += [text[done:place], chr(code)]
            done = place
        pieces.append(text[done:])
        return Marked("".join(pieces), (first, last), content, marks)

    def _code(self) -> int:
        code = self._next
        # The last two code points of plane 15 are no characters.
        self._next = 0x100000 if code == 0xFFFFD else code + 1
        if code > SENTINEL_LAST:
            raise TemplateError(
                "the prompt has more named places than the 131068 sentinels there are",
                hint="use fewer slots or messages",
            )
        return code


@dataclass(frozen=True, slots=True)
class Found:
    """A marked rendering: its text without sentinels, and where each sentinel stood."""

    text: str
    places: dict[int, list[int]]

    def first(self, code: int) -> int | None:
        """Return the first place of a sentinel, or None if the template dropped it."""
        places = self.places.get(code)
        return places[0] if places else None


def find(rendered: str) -> Found:
    """Take the sentinels out of a marked rendering."""
    places: dict[int, list[int]] = {}
    pieces, done, size = [], 0, 0
    for match in _SENTINEL.finditer(rendered):
        start = match.start()
        pieces.append(rendered[done:start])
        size += start - done
        done = start + 1
        places.setdefault(ord(match[0]), []).append(size)
    pieces.append(rendered[done:])
    return Found("".join(pieces), places)


def unclamp(text: str, inner: tuple[int, int], offset: int, place: int, plain: str) -> int:
    """Move a place from the edge of the inner content out to where `offset` stands.

    Args:
        text: The content.
        inner: Range of the content without outer white space.
        offset: The character of the content that is looked for.
        place: Where the sentinel of `offset`, which stands in the inner range, was rendered.
        plain: The rendered text.

    Returns:
        The place of `offset` where the template kept the outer white space, else `place`.
    """
    first, last = inner
    if offset < first:
        size = first - offset
        kept = place >= size and plain.startswith(text[offset:first], place - size)
        return place - size if kept else place
    if offset > last:
        return place + offset - last if plain.startswith(text[last:offset], place) else place
    return place

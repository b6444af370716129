"""Which text counts as control text, and how untrusted text loses it visibly.

Owns the control strings, the erratum marker and the private-use sentinels as things to find
and to escape. Does not know messages, templates or token ids.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvnotes.errors import TemplateError

# Sentinels are single characters of the planes 15 and 16, which no script or font table uses.
SENTINEL_FIRST, SENTINEL_LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile("[\U000f0000-\U0010ffff\ud800-\udfff]")
# White space and the invisible characters that could hide inside a marker.
_GAP = "[\\s\u00ad\u200b-\u200f\u2060-\u2064\ufeff]"
_INSERTS = "\\\u00b7~\u00a6_ "
_MAX_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Escaped:
    """Untrusted text without control text, and the strings that were escaped in it."""

    text: str
    found: tuple[str, ...]


class ControlText:
    """Finds and escapes the control text of one tokenizer and one erratum style.

    Args:
        control_strings: Strings that the tokenizer turns into control tokens.
        marker: The words every erratum begins with.
        find_tokens: Character ranges that tokenize to control tokens; only needed where the
            tokenizer matches control strings in normalised text.
    """

    def __init__(
        self,
        control_strings: Iterable[str],
        marker: str,
        find_tokens: Callable[[str], list[tuple[int, int]]] | None = None,
    ) -> None:
        words = sorted(filter(None, control_strings), key=lambda word: (-len(word), word))
        first = "".join(sorted({re.escape(word[0]) for word in words}))
        alternatives = "|".join(re.escape(word) for word in words)
        self._control = re.compile(f"(?=[{first}])(?:{alternatives})") if words else None
        self._marker = _marker_pattern(marker)
        self._find_tokens = find_tokens
        # A character that no control string holds cannot complete another one.
        taken = "".join((*words, marker))
        self._insert = next((char for char in _INSERTS if char not in taken), _INSERTS[0])

    def find_control(self, text: str) -> str | None:
        """Return the first control string in `text`."""
        match = self._control.search(text) if self._control else None
        if match:
            return match[0]
        if self._find_tokens is not None:
            for start, stop in self._find_tokens(text):
                return text[start:stop]
        return None

    def find_marker(self, text: str) -> str | None:
        """Return the first erratum marker in `text`, whatever its case and spacing."""
        match = self._marker.search(text)
        return match[0] if match else None

    def escape(self, text: str) -> Escaped:
        """Escape private-use sentinels, control strings and erratum markers, visibly.

        Args:
            text: Untrusted text.

        Returns:
            Text that holds no control string, whatever overlapped in it, and what was found.

        Raises:
            TemplateError: The tokenizer's control strings allow no escape.
        """
        found: list[str] = []

        def code(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"\\U{ord(match[0]):08X}"

        if not text.isascii():
            text = _PRIVATE.sub(code, text)
        longest = _MAX_GROWTH * len(text) + _MAX_GROWTH
        while len(text) <= longest:
            changed = self._escape_once(text, found)
            if changed == text:
                return Escaped(text, tuple(found))
            text = changed
        raise TemplateError(
            f"untrusted text still holds the control string {self.find_control(text)!r} after "
            f"{len(found)} escapes",
            hint="remove the string from the message, or the added token from the tokenizer",
        )

    def _escape_once(self, text: str, found: list[str]) -> str:
        insert = self._insert

        def split(match: re.Match[str]) -> str:
            word = match[0]
            found.append(word)
            return word[0] + insert + word[1:] if len(word) > 1 else f"{insert}u{ord(word):04x}"

        text = self._marker.sub(split, text)
        if self._control is not None:
            text = self._control.sub(split, text)
        if self._find_tokens is not None:
            for start, stop in reversed(self._find_tokens(text)):
                found.append(text[start:stop])
                text = text[: start + 1] + insert + text[start + 1 :]
        return text


def find_private(text: str) -> str | None:
    """Return the first character kept for sentinels, or lone surrogate, in `text`."""
    if text.isascii():
        return None
    match = _PRIVATE.search(text)
    return match[0] if match else None


def _marker_pattern(marker: str) -> re.Pattern[str]:
    """Match the marker without its closing bracket, in any case and spacing."""
    words = re.findall(r"\w+|[^\w\s]", marker.rstrip("])}> ") or marker)
    parts = [re.escape(words[0])]
    for before, word in itertools.pairwise(words):
        both = before[-1].isalnum() and word[0].isalnum()
        parts.append(f"{_GAP}{'+' if both else '*'}{re.escape(word)}")
    return re.compile("".join(parts), re.IGNORECASE)

"""One line on stderr that says what is going on, while stderr is a terminal."""

from __future__ import annotations

import shutil
import sys


class Progress:
    """Shows what is going on, and takes it away before something is printed.

    No thread and no animation: a spinner would take time from what is being measured.

    Args:
        wanted: Whether to show anything.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._shown = wanted and sys.stderr.isatty()
        self._dirty = False

    def say(self, text: str) -> None:
        """Replace the line."""
        if not self._shown:
            return
        width = max(20, shutil.get_terminal_size().columns - 4)
        line = "".join(c if c.isprintable() else " " for c in text)
        line = line if len(line) <= width else f"{line[: width - 3]}..."
        sys.stderr.write(f"\r\x1b[K{line} ...")
        sys.stderr.flush()
        self._dirty = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove the line."""
        if self._dirty:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._dirty = False

"""Small files beside the segments: skills, saved sessions, texts.

Owns reading and writing them whole, encrypted where the store encrypts: they hold the text
of prompts, which is what K/V give away as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvnotes.errors import StorageError, TemplateError
from kvnotes.store import container
from kvnotes.store.atomic import storage_errors, sync_folder, write_file
from kvnotes.store.opening import parse_plain, sealed_place
from kvnotes.store.saving import SEALED_KEY
from kvnotes.store.trust import Trust, sealed_size

MAX_RECORD_NBYTES = 256 << 20
"""Longest record: a saved session of a million tokens, edited many times, takes a tenth."""

NAME = re.compile("[A-Za-z0-9_](?:[A-Za-z0-9_-]|[./@](?=[A-Za-z0-9_])){0,199}")
"""Names of records: no empty part, no part that begins with a dot."""


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one kind, by name.

    Args:
        folder: Where they are; made when the first is written.
        trust: Encrypts, if it has the key.
        what: What one is, for messages.
        suffix: What file names end with.
    """

    folder: Path
    trust: Trust
    what: str
    suffix: str = ".json"

    def path(self, name: str) -> Path:
        """Return the place of a record.

        Raises:
            TemplateError: Not a name: nothing else may name a file here.
        """
        if not NAME.fullmatch(name):
            raise TemplateError(
                f"{name[:80]!r} is no name of a {self.what}",
                hint="use letters, digits, _ and -, and . or / between them",
            )
        return self.folder / f"{name}{self.suffix}"

    def write(self, name: str, content: bytes) -> None:
        """Write a record in one step; one that is there is replaced.

        Raises:
            StorageError: The folder cannot be written, or the disk is full.
        """
        write_file(self.path(name), sealed(content, self.trust))

    def read(self, name: str) -> bytes | None:
        """Return a record; None if it is not there.

        Raises:
            TrustError: It is encrypted, and its key is not here.
            SegmentFormatError: It is encrypted and damaged.
            StorageError: It cannot be read, or is too long to be one.
        """
        path = self.path(name)
        try:
            with path.open("rb") as file:
                content = file.read(MAX_RECORD_NBYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(
                f"cannot read {path}: {error.strerror}", hint="check the folder's permissions"
            ) from error
        if len(content) > MAX_RECORD_NBYTES:
            raise StorageError(
                f"{path} has more than {MAX_RECORD_NBYTES} bytes", hint=f"it is no {self.what}"
            )
        return unsealed(content, self.trust, str(path))

    def remove(self, name: str) -> bool:
        """Remove a record; return whether it was there."""
        path = self.path(name)
        with storage_errors(path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
            sync_folder(path.parent)
            return True

    def names(self, below: str = "") -> Iterator[str]:
        """Yield the names of all records, or of those below a name, sorted."""
        root = self.folder / below
        found: list[Path] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            found = sorted(root.rglob(f"*{self.suffix}"))
        for path in found:
            name = str(path.relative_to(self.folder)).removesuffix(self.suffix)
            if NAME.fullmatch(name):
                yield name


_SEALED_START = b'{"__metadata__":{"%s":' % SEALED_KEY.encode()


def sealed(content: bytes, trust: Trust) -> bytes:
    """Return a record as it is written: encrypted if there is a key."""
    if trust.encryption_key is None:
        return content
    sealing = trust.sealing(len(content))
    tensor = (SEALED_KEY, "U8", (sealed_size(len(content)),))
    outer, _ = container.build({SEALED_KEY: sealing}, [tensor])
    return outer + b"".join(trust.encrypt([content], sealing))


def unsealed(content: bytes, trust: Trust, where: str) -> bytes:
    """Return a record as it was before `sealed`; a plain one as it is.

    Raises:
        TrustError: It is encrypted, and its key is not here.
        SegmentFormatError: It is encrypted and damaged.
    """
    if not content.startswith(_SEALED_START, 8):
        return content
    outer = parse_plain(content, where)
    place = sealed_place(outer, Path(where))
    hidden = memoryview(content)[place.start : place.stop]
    return bytes(trust.decrypt(hidden, outer.metadata[SEALED_KEY], where))

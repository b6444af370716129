"""Settings from the environment; no other module reads it.

KVNOTES_HOME             folder for converted models, digests and stored segments;
                         default: the user's cache folder for kvnotes.
KVNOTES_REMOTE           URL of the remote tier of the store; default: none.
KVNOTES_ENCRYPTION_KEY   file of the key that segment files are encrypted and read with.
KVNOTES_SIGNING_KEY      file of the private key that new segment files are signed with.
KVNOTES_TRUSTED_KEYS     files of the public keys whose segments are accepted, joined like
                         PATH; set, every other segment is refused.

`docs/security.md` says how to make the keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

HOME_VARIABLE = "KVNOTES_HOME"
REMOTE_VARIABLE = "KVNOTES_REMOTE"
ENCRYPTION_KEY_VARIABLE = "KVNOTES_ENCRYPTION_KEY"
SIGNING_KEY_VARIABLE = "KVNOTES_SIGNING_KEY"
TRUSTED_KEYS_VARIABLE = "KVNOTES_TRUSTED_KEYS"
FOLDER_MODE = 0o700
"""What lies under the home can be turned into text: nobody but the owner lists a folder."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment decides.

    Attributes:
        home: Folder that kvnotes may write to, absolute; it need not exist yet.
        encryption_key: File of the key that segments are encrypted with.
        signing_key: File of the private key that segments are signed with.
        trusted_keys: Files of the public keys one of which must have signed a segment.
        remote: URL of the store's remote tier.
    """

    home: Path
    encryption_key: Path | None = None
    signing_key: Path | None = None
    trusted_keys: tuple[Path, ...] = ()
    remote: str | None = None

    @property
    def models(self) -> Path:
        """Folder of converted models."""
        return self.home / "models"

    @property
    def store(self) -> Path:
        """Folder of compiled segments, skills and saved sessions."""
        return self.home / "store"

    @property
    def digests(self) -> Path:
        """File that remembers digests of files that did not change."""
        return self.home / "digests.json"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; an empty variable counts as unset."""
    environ = os.environ if environ is None else environ
    home = environ.get(HOME_VARIABLE) or user_cache_dir("kvnotes", appauthor=False)
    trusted = environ.get(TRUSTED_KEYS_VARIABLE)
    return Settings(
        home=_path(home),
        encryption_key=_optional_path(environ.get(ENCRYPTION_KEY_VARIABLE)),
        signing_key=_optional_path(environ.get(SIGNING_KEY_VARIABLE)),
        # an empty name among others stays, and cannot be read: never fewer keys than were meant
        trusted_keys=tuple(map(_path, trusted.split(os.pathsep))) if trusted else (),
        remote=environ.get(REMOTE_VARIABLE) or None,
    )


def make_private(path: Path) -> None:
    """Make a folder and those above it, private to the user; one that is there keeps its mode.

    Raises:
        OSError: It cannot be made.
    """
    # not parents=True: it gives those above the mode of the umask
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()


def _optional_path(name: str | None) -> Path | None:
    return _path(name) if name else None

"""Settings from the environment; no other module reads it.

KVNOTES_HOME   folder for converted models, digests and stored segments;
               default: the user's cache folder for kvnotes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

HOME_VARIABLE = "KVNOTES_HOME"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment decides.

    Attributes:
        home: Folder that kvnotes may write to, absolute; it need not exist yet.
    """

    home: Path

    @property
    def models(self) -> Path:
        """Folder of converted models."""
        return self.home / "models"

    @property
    def digests(self) -> Path:
        """File that remembers digests of files that did not change."""
        return self.home / "digests.json"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; an empty variable counts as unset."""
    environ = os.environ if environ is None else environ
    home = environ.get(HOME_VARIABLE) or user_cache_dir("kvnotes", appauthor=False)
    return Settings(home=Path(home).expanduser().absolute())

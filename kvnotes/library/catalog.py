"""The catalogue: which skills there are, by name and version.

    <root>/refunds/3.json     one record for each version; it never changes

Owns the records and how versions are given. Knows no K/V: those lie in the store, under
keys that follow from the text and the model.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from kvnotes.errors import TemplateError, UnknownSegmentError, nearest
from kvnotes.library.skill import Skill, parse_ref
from kvnotes.store.atomic import make_folder, storage_errors, write_file

MAX_RECORD_NBYTES = 64 << 20


class Catalog:
    """Records of skills below one folder.

    Args:
        root: The folder; made when the first skill is added.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, skill: Skill) -> Skill:
        """Add a skill; return it with its version.

        A text that is the latest version already keeps that version.

        Raises:
            TemplateError: Its version is there, with another text.
            StorageError: The folder cannot be written.
        """
        make_folder(self.root)
        with storage_errors(self.root), FileLock(self.root / ".lock"):
            versions = self.versions(skill.name)
            if not skill.version:
                latest = self._read(skill.name, versions[-1]) if versions else None
                if latest is not None and latest.digest == skill.digest:
                    return latest
                skill = replace(skill, version=versions[-1] + 1 if versions else 1)
            elif skill.version in versions:
                known = self._read(skill.name, skill.version)
                if known.digest != skill.digest:
                    raise TemplateError(
                        f"version {skill.version} of skill {skill.name!r} is there already, with "
                        "another text or other settings; a version never changes",
                        hint=f"give it version {versions[-1] + 1}, or leave the version out",
                    )
                return known
            write_file(self._path(skill.name, skill.version), skill.to_json().encode())
            return skill

    def get(self, ref: str) -> Skill:
        """Return a skill by `name` (its latest version) or `name@version`.

        Raises:
            UnknownSegmentError: It is not there; the hint names the nearest one.
        """
        name, version = parse_ref(ref)
        versions = self.versions(name)
        if not versions:
            known = sorted({skill.name for skill in self.skills()})
            raise UnknownSegmentError(
                f"the library has no skill {name!r}",
                hint=nearest(name, known) if known else "it is empty: kvnotes compile FOLDER",
            )
        if version and version not in versions:
            shown = ", ".join(map(str, versions))
            raise UnknownSegmentError(
                f"skill {name!r} has no version {version}, it has {shown}",
                hint=f"write {name}@{versions[-1]}, or {name} for the latest",
            )
        return self._read(name, version or versions[-1])

    def versions(self, name: str) -> list[int]:
        """Return the versions of a skill, in order; [] if there is none."""
        folder = self.root / parse_ref(name)[0]
        found: list[int] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in folder.iterdir():
                if path.suffix == ".json" and path.stem.isdigit():
                    found.append(int(path.stem))
        return sorted(found)

    def skills(self) -> list[Skill]:
        """Return all skills, by name and version."""
        names = {
            str(path.parent.relative_to(self.root))
            for path in self.root.rglob("*.json")
            if path.stem.isdigit()
        }
        return [self._read(name, v) for name in sorted(names) for v in self.versions(name)]

    def remove(self, ref: str) -> Skill:
        """Remove the record of one version; return what it was."""
        skill = self.get(ref)
        path = self._path(skill.name, skill.version)
        with storage_errors(path):
            path.unlink(missing_ok=True)
        return skill

    def _path(self, name: str, version: int) -> Path:
        return self.root / name / f"{version}.json"

    def _read(self, name: str, version: int) -> Skill:
        return read_record(self._path(name, version))


def read_record(path: Path) -> Skill:
    """Return the skill of a record.

    Raises:
        TemplateError: It is damaged.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECORD_NBYTES)
    except OSError as error:
        raise UnknownSegmentError(
            f"the record {path} cannot be read: {error.strerror}", hint="compile its folder again"
        ) from error
    return parse_record(content, str(path))


def parse_record(content: bytes, where: str) -> Skill:
    """Return the skill of a record's bytes.

    Raises:
        TemplateError: It is damaged.
    """
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TemplateError(
            f"the record {where} is not JSON", hint="compile its folder again, or pull it again"
        ) from error
    if not isinstance(facts, dict):
        raise TemplateError(f"the record {where} is no object", hint="compile its folder again")
    return Skill.from_facts(facts)

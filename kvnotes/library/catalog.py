"""The catalogue: which skills there are, by name and version.

    library/refunds/3.json     one record for each version; it never changes

Owns the records and how versions are given. Knows no K/V: those lie in the store, under
keys that follow from the text and the model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from kvnotes.errors import TemplateError, UnknownSegmentError, nearest
from kvnotes.library.skill import Skill, parse_ref
from kvnotes.store.atomic import make_folder, storage_errors
from kvnotes.store.records import Records
from kvnotes.store.trust import NO_TRUST, Trust


class Catalog:
    """Records of skills below one folder.

    Args:
        root: The folder; made when the first skill is added.
        trust: Encrypts the records, if it has the key.
    """

    def __init__(self, root: Path, trust: Trust = NO_TRUST) -> None:
        self._records = Records(root, trust, "skill")

    def add(self, skill: Skill) -> Skill:
        """Add a skill; return it with its version.

        A text that is the latest version already keeps that version.

        Raises:
            TemplateError: Its version is there, with another text.
            StorageError: The folder cannot be written.
        """
        root = self._records.folder
        make_folder(root)
        with storage_errors(root), FileLock(root / ".lock"):
            known = self.preview(skill)
            if known.version not in self.versions(known.name):
                self._records.write(_record_name(known), known.to_json().encode())
            return known

    def preview(self, skill: Skill) -> Skill:
        """Return what `add` would return, and add nothing.

        Raises:
            TemplateError: Its version is there, with another text.
        """
        versions = self.versions(skill.name)
        if not skill.version:
            latest = self._read(skill.name, versions[-1]) if versions else None
            if latest is not None and latest.digest == skill.digest:
                return latest
            return replace(skill, version=versions[-1] + 1 if versions else 1)
        known = self._read(skill.name, skill.version) if skill.version in versions else skill
        if known.digest != skill.digest:
            raise TemplateError(
                f"version {skill.version} of skill {skill.name!r} is there already, with another "
                "text or other settings; a version never changes",
                hint=f"give it version {versions[-1] + 1}, or leave the version out",
            )
        return skill

    def get(self, ref: str) -> Skill:
        """Return a skill by `name` (its latest version) or `name@version`.

        Raises:
            UnknownSegmentError: It is not there; the hint names the nearest one.
        """
        name, version = parse_ref(ref)
        versions = self.versions(name)
        if not versions:
            known = {parsed[0] for parsed in map(_parsed, self._records.names()) if parsed}
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
        name = parse_ref(name)[0]
        found = (_parsed(record) for record in self._records.names(name))
        return sorted(parsed[1] for parsed in found if parsed and parsed[0] == name)

    def skills(self) -> list[Skill]:
        """Return all skills, by name and version."""
        found = (_parsed(record) for record in self._records.names())
        return [self._read(*parsed) for parsed in sorted(p for p in found if p)]

    def remove(self, ref: str) -> Skill:
        """Remove the record of one version; return what it was."""
        skill = self.get(ref)
        self._records.remove(_record_name(skill))
        return skill

    def _read(self, name: str, version: int) -> Skill:
        content = self._records.read(f"{name}/{version}")
        if content is None:
            raise UnknownSegmentError(
                f"skill {name}@{version} was removed just now", hint="compile its folder again"
            )
        skill = parse_record(content, str(self._records.path(f"{name}/{version}")))
        if (skill.name, skill.version) != (name, version):
            raise TemplateError(
                f"the record of {name}@{version} is that of {skill.ref!r}",
                hint="its file was renamed; compile its folder again",
            )
        return skill


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


def _record_name(skill: Skill) -> str:
    return f"{skill.name}/{skill.version}"


def _parsed(record: str) -> tuple[str, int] | None:
    """Name and version of a record's name; None for a file that is no record."""
    name, _, version = record.rpartition("/")
    return (name, int(version)) if name and version.isdigit() else None

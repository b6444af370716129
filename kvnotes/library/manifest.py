"""A folder of skills: `kvnotes.toml` and the texts it names.

Owns the manifest's keys and reading the folder. Every fault names the file and the key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvnotes.errors import KVNotesError, TemplateError, nearest
from kvnotes.library.skill import MAX_VERSION, Skill
from kvnotes.prompt.tools import tool_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = "kvnotes.toml"
MAX_FILE_NBYTES = 8 << 20
_DOCS = "see docs/library.md"
_EXAMPLE = '[skills.refunds] file = "refunds.md"'


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Spec(_Strict):
    file: str | None = None
    version: Annotated[int, Field(ge=1, le=MAX_VERSION, strict=True)] | None = None
    description: str = ""


class SkillSpec(_Spec):
    """`[skills.NAME]`: one text."""

    text: str | None = None
    role: Literal["system", "user", "assistant", "tool", "inline"] = "system"
    preamble: str = ""
    after: str | None = None
    fields: dict[str, str] = Field(default_factory=dict)
    variants: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    compile: Literal["eager", "lazy"] = "eager"

    @model_validator(mode="after")
    def _one_of(self) -> SkillSpec:
        if (self.file is None) == (self.text is None):
            raise ValueError("needs either file or text")
        if self.after is not None and self.preamble:
            raise ValueError("has both after and preamble, which say the same thing")
        return self


class ToolSpec(_Spec):
    """`[tools.NAME]`: the JSON schema of one tool."""

    file: str


class Manifest(_Strict):
    """All of `kvnotes.toml`."""

    skills: dict[str, SkillSpec] = Field(default_factory=dict)
    tools: dict[str, ToolSpec] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that was read: its skills, in the order of the manifest."""

    path: Path
    skills: tuple[Skill, ...]


def read_folder(path: Path) -> Folder:
    """Read a folder of skills.

    Args:
        path: The folder, or its manifest.

    Raises:
        TemplateError: No manifest, a wrong key, a file that cannot be read or lies outside.
    """
    folder = path.parent if path.is_file() else path
    manifest = _manifest(folder / MANIFEST)
    reader = _Reader(folder, manifest)
    skills = [reader.skill(name, spec) for name, spec in manifest.skills.items()]
    skills += [reader.tool(name, spec) for name, spec in manifest.tools.items()]
    if not skills:
        raise TemplateError(f"{folder / MANIFEST} names no skills", hint=f"write {_EXAMPLE}")
    return Folder(folder, tuple(skills))


class _Reader:
    """Makes skills of a manifest's entries."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def skill(self, name: str, spec: SkillSpec) -> Skill:
        place = f"{self.folder / MANIFEST}: skills.{name}"
        preamble = self.base(place, spec.after) if spec.after is not None else spec.preamble
        try:
            return Skill(
                name,
                self.text(place, spec),
                spec.version or 0,
                spec.role,
                preamble,
                tuple(spec.fields.items()),
                tuple((field, tuple(values)) for field, values in spec.variants.items()),
                spec.compile,
                spec.description,
            )
        except KVNotesError as error:
            raise _placed(error, place) from error

    def tool(self, name: str, spec: ToolSpec) -> Skill:
        place = f"{self.folder / MANIFEST}: tools.{name}"
        try:
            schema = json.loads(self.read(place, spec.file))
        except (ValueError, RecursionError) as error:
            raise TemplateError(
                f"{place}: {spec.file} is not JSON: {error}", hint="it holds one tool's schema"
            ) from error
        try:
            skill = Skill.of_tool(schema, version=spec.version or 0, description=spec.description)
        except KVNotesError as error:
            raise _placed(error, place) from error
        if tool_name(skill.name) != name:
            raise TemplateError(
                f"{place}: the schema in {spec.file} is of the tool {tool_name(skill.name)!r}",
                hint=f"write [tools.{tool_name(skill.name)}], or mend the schema",
            )
        return skill

    def base(self, place: str, name: str) -> str:
        """Return the text that a skill is compiled behind."""
        spec = self.manifest.skills.get(name)
        if spec is None:
            raise TemplateError(
                f"{place}.after names the skill {name!r}, which this folder does not have",
                hint=nearest(name, self.manifest.skills),
            )
        if spec.role != "system" or spec.after or spec.preamble:
            raise TemplateError(
                f"{place}.after names the skill {name!r}, which is not a system message of its "
                "own: it has another role, or a preamble itself",
                hint="let both follow the same skill, or join them into one",
            )
        return self.text(place, spec)

    def text(self, place: str, spec: SkillSpec) -> str:
        if spec.text is not None:
            return spec.text
        assert spec.file is not None
        return self.read(place, spec.file)

    def read(self, place: str, name: str) -> str:
        """Return the text of a file of this folder."""
        path = self.folder / name
        root = self.folder.resolve()
        if not path.resolve().is_relative_to(root):
            raise TemplateError(
                f"{place}: the file {name!r} lies outside of {root}",
                hint="copy it into the folder: what is compiled is trusted text",
            )
        return _read(path, place)


def _manifest(path: Path) -> Manifest:
    if not path.parent.is_dir():
        raise TemplateError(
            f"there is no folder {path.parent}", hint="give the folder of your skills; " + _DOCS
        )
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob("*.md"))[:3] if path.parent.is_dir() else []
        example = _EXAMPLE.replace("refunds.md", found[0]) if found else _EXAMPLE
        raise TemplateError(
            f"{path.parent} has no {MANIFEST}, which says what its skills are",
            hint=f"write one with lines like {example}; {_DOCS}",
        )
    try:
        data: Mapping[str, Any] = tomllib.loads(_read(path, str(path)))
    except tomllib.TOMLDecodeError as error:
        raise TemplateError(f"{path} is not TOML: {error}", hint=_DOCS) from error
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            table = Manifest if len(fault["loc"]) == 1 else _table(fault["loc"])
            what, hint = "unknown key", nearest(str(fault["loc"][-1]), table.model_fields)
        else:
            what, hint = str(fault["msg"]).removeprefix("Value error, "), _DOCS
        raise TemplateError(f"{path}: {where}: {what}", hint=hint) from error


def _table(place: tuple[int | str, ...]) -> type[BaseModel]:
    return ToolSpec if place[0] == "tools" else SkillSpec


def _read(path: Path, place: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TemplateError(
            f"{place}: cannot read {path}: {reason}", hint="check the name"
        ) from error
    if len(content) > MAX_FILE_NBYTES:
        raise TemplateError(
            f"{place}: {path} has more than {MAX_FILE_NBYTES >> 20} MiB", hint="split the text"
        )
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TemplateError(
            f"{place}: {path} is not UTF-8 text: byte {error.start} is "
            f"0x{content[error.start]:02x}",
            hint="save it as UTF-8",
        ) from error


def _placed(error: KVNotesError, place: str) -> KVNotesError:
    return type(error)(f"{place}: {error.message}", hint=error.hint)

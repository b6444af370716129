"""A skill: a named, versioned text that is compiled once and spliced into any prompt.

Owns `Skill` and what a name may be. Knows no model: the same skill is compiled for many.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from kvnotes.errors import TemplateError
from kvnotes.prompt import Message, SegmentText
from kvnotes.prompt.messages import ROLES
from kvnotes.prompt.tools import tool_segment
from kvnotes.store import digest_text
from kvnotes.store.header import canonical_json

CompileTime = Literal["eager", "lazy"]
INLINE = "inline"
"""Role of a skill that stands inside a message, not as one."""

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|[./](?=[A-Za-z0-9_]))*")
MAX_NAME = 200
MAX_VERSION = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Skill:
    """A text under a name and a version; a version never changes its text.

    Args:
        name: Letters, digits and `_ - . /`.
        text: Trusted template with `{{field}}` slots.
        version: 1, 2, ...; 0 takes the next one when it is added to a catalogue.
        role: Role of the message it is, or `inline`.
        preamble: Text it is compiled behind, with `{{field}}` slots of its own.
        fields: (field, value) with which it is compiled; a session may have other values.
        variants: (field, values) of fields of the preamble; every combination is compiled.
        compile: `eager` compiles all variants at once, `lazy` each on its first use.
        description: One line for people.
        is_tool: It is the schema of a tool.
    """

    name: str
    text: str
    version: int = 0
    role: str = "system"
    preamble: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    variants: tuple[tuple[str, tuple[str, ...]], ...] = ()
    compile: CompileTime = "eager"
    description: str = ""
    is_tool: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise TemplateError(
                f"skill name {self.name[:80]!r} is not a name like refunds or tool/get_order",
                hint="use letters, digits, _ and -, and . or / between them",
            )
        if not 0 <= self.version <= MAX_VERSION:
            raise TemplateError(
                f"skill {self.name!r} has version {self.version}, versions are 1, 2, ...",
                hint="leave it out to take the next one",
            )
        roles = (*ROLES, INLINE)
        if self.role not in roles:
            raise TemplateError(
                f"skill {self.name!r} has the role {self.role!r}, the roles are {', '.join(roles)}",
                hint="use system for a policy, inline for text inside a message",
            )
        if self.compile not in get_args(CompileTime):
            raise TemplateError(
                f"skill {self.name!r} is compiled {self.compile!r}, known are eager and lazy",
                hint="lazy compiles a variant when it is first used",
            )
        for field, values in self.variants:
            if not values or len(set(values)) != len(values):
                raise TemplateError(
                    f"skill {self.name!r} has the variants {list(values)} of {field!r}",
                    hint="give each value once, and at least one",
                )
        known = self.field_names  # also refuses what is no template
        unknown = [field for field, _ in self.fields if field not in known]
        if unknown:
            raise TemplateError(
                f"skill {self.name!r} has a value for {unknown[0]!r}, its text and preamble have "
                f"the fields {', '.join(known) or 'none'}",
                hint=f"write {{{{{unknown[0]}}}}} where the value stands, or remove it",
            )

    @classmethod
    def of_tool(cls, schema: object, *, version: int = 0, description: str = "") -> Skill:
        """Return a tool as a skill: the canonical text of its JSON schema.

        Raises:
            TemplateError: Not a schema of a function.
        """
        segment = tool_segment(schema)
        return cls(segment.name, segment.text, version, description=description, is_tool=True)

    @property
    def ref(self) -> str:
        """Name and version, as `refunds@3`."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @property
    def segment(self) -> SegmentText:
        """The skill as a segment of a prompt, named by its `ref`."""
        eager = self.variants if self.compile == "eager" else ()
        return SegmentText(self.ref, self.text, self.preamble, eager)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Fields of its preamble and its text."""
        segment = SegmentText(self.name, self.text, self.preamble, self.variants)
        parts = (*segment.preamble_parts(), *segment.text_parts())
        return tuple(dict.fromkeys(part.name for part in parts if not isinstance(part, str)))

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the version: equal skills need no second version."""
        return digest_text(canonical_json(asdict(replace(self, version=0))))

    def message(self, *, id: str = "") -> Message:
        """Return the message that the skill is in a prompt."""
        if self.role == INLINE:
            return Message("system", f"{{{{segment:{self.ref}}}}}", id=id)
        return Message(self.role, segment=self.ref, id=id)

    def to_json(self) -> str:
        """Return the skill as one line of JSON."""
        return canonical_json({"format": 1, "digest": self.digest, **asdict(self)})

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Skill:
        """Return the skill that JSON stands for.

        Raises:
            TemplateError: It was changed, or is none.
        """
        known = {field.name for field in fields(cls)}
        try:
            skill = cls(
                **{
                    **{name: facts[name] for name in known},
                    "fields": tuple((str(n), str(v)) for n, v in facts["fields"]),
                    "variants": tuple((str(n), tuple(map(str, v))) for n, v in facts["variants"]),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TemplateError(
                f"a skill's record cannot be read: {error}", hint="compile its folder again"
            ) from error
        if facts.get("format") != 1 or facts.get("digest") != skill.digest:
            raise TemplateError(
                f"the record of skill {skill.ref!r} was changed after it was written, or is of "
                "another format",
                hint="compile its folder again, or pull it again",
            )
        return skill


def parse_ref(ref: str) -> tuple[str, int]:
    """Return name and version of `refunds@3`; version 0 stands for the latest.

    Raises:
        TemplateError: Not of this form.
    """
    name, at, version = ref.partition("@")
    if not _NAME.fullmatch(name) or (at and not version.isdigit()):
        raise TemplateError(
            f"{ref[:80]!r} names no skill", hint="write a name, or name@version, as refunds@3"
        )
    return name, int(version) if at else 0

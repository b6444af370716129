"""What the commands of the store print with `--json`: a contract, as pydantic models.

Every key is always there; what does not apply is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from kvnotes.library import CompilePlan, Shelf, Skill
    from kvnotes.library.recompute import Recomputed
    from kvnotes.store import Entry, OpenFile, Pruned


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SegmentRecord(_Record):
    """One compiled segment in the store."""

    key: str
    model: str = Field(description="fingerprint of the model it was compiled for")
    variant: str = Field(description='values of the fields of its preamble, "" for none')
    tokens: int
    nbytes: int
    exact: bool
    created_at: float
    used_at: float

    @classmethod
    def of(cls, entry: Entry) -> SegmentRecord:
        """Return the record of an entry."""
        return cls(
            key=entry.key,
            model=entry.fingerprint,
            variant=entry.variant,
            tokens=entry.num_tokens,
            nbytes=entry.nbytes,
            exact=not entry.altered,
            created_at=entry.created_at,
            used_at=entry.used_at,
        )


class SkillRecord(_Record):
    """One version of a skill."""

    ref: str
    name: str
    version: int
    description: str
    role: str
    tool: bool
    fields: dict[str, str]
    variants: dict[str, list[str]]
    pinned: bool
    nbytes: int
    segments: list[SegmentRecord]

    @classmethod
    def of(cls, shelf: Shelf) -> SkillRecord:
        """Return the record of a skill with what is compiled of it."""
        skill = shelf.skill
        return cls(
            ref=skill.ref,
            name=skill.name,
            version=skill.version,
            description=skill.description,
            role=skill.role,
            tool=skill.is_tool,
            fields=dict(skill.fields),
            variants={name: list(values) for name, values in skill.variants},
            pinned=shelf.pinned,
            nbytes=shelf.nbytes,
            segments=[SegmentRecord.of(entry) for entry in shelf.entries],
        )


class SkillList(_Record):
    """What `library ls` prints."""

    skills: list[SkillRecord]
    other_segments: list[SegmentRecord] = Field(description="compiled by sessions, of no skill")

    @classmethod
    def of(cls, shelves: Sequence[Shelf], others: Sequence[Entry]) -> SkillList:
        """Return the record of all skills."""
        return cls(
            skills=[SkillRecord.of(shelf) for shelf in shelves],
            other_segments=[SegmentRecord.of(entry) for entry in others],
        )


class SkillChanges(SkillList):
    """What the commands print that change skills."""

    change: str = Field(description="what was done to them, or `would ...` in a dry run")

    @classmethod
    def made(cls, change: str, shelves: Sequence[Shelf]) -> SkillChanges:
        """Return the record of a change."""
        skills = [SkillRecord.of(shelf) for shelf in shelves]
        return cls(skills=skills, other_segments=[], change=change)


class SkillText(SkillRecord):
    """What `library show` prints: a skill with its texts."""

    text: str
    preamble: str

    @classmethod
    def of(cls, shelf: Shelf) -> SkillText:
        """Return the record of a skill with its texts."""
        facts = SkillRecord.of(shelf).model_dump()
        return cls(**facts, text=shelf.skill.text, preamble=shelf.skill.preamble)


class CompiledSkill(_Record):
    """What compiling one skill takes."""

    ref: str
    variants: int
    segments: int
    present: int = Field(description="segments that the store has already")
    tokens: int = Field(description="of its largest segment")
    nbytes: int
    predicted_ms: float
    skipped: str | None = Field(description="why it is not compiled now")


class CompileRecord(_Record):
    """What `compile` prints."""

    model: str
    fingerprint: str
    store: str
    dry_run: bool
    skills: list[CompiledSkill]
    compiled: int = Field(description="segments compiled now")
    predicted_ms: float
    elapsed_ms: float | None

    @classmethod
    def of(
        cls, model: tuple[str, str], store: str, plan: CompilePlan, *, elapsed_ms: float | None
    ) -> CompileRecord:
        """Return the record of a plan, and of its execution if there was one."""
        skills = [
            CompiledSkill(
                ref=cost.skill.ref,
                variants=cost.num_variants,
                segments=cost.num_units,
                present=cost.num_present,
                tokens=cost.num_tokens,
                nbytes=cost.nbytes,
                predicted_ms=round(cost.predicted_ms, 1),
                skipped=cost.skipped or None,
            )
            for cost in plan.costs
        ]
        return cls(
            model=model[0],
            fingerprint=model[1],
            store=store,
            dry_run=elapsed_ms is None,
            skills=skills,
            compiled=0 if elapsed_ms is None else len(plan.missing),
            predicted_ms=round(plan.predicted_ms, 1),
            elapsed_ms=None if elapsed_ms is None else round(elapsed_ms, 1),
        )


class FieldRecord(_Record):
    """A field's value in a segment."""

    name: str
    value: str
    start: int
    stop: int


class FileRecord(_Record):
    """What `inspect` prints of one file."""

    path: str
    key: str
    kind: str
    name: str
    version: int
    tenant: str
    model_type: str
    fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str
    tokens: int
    preamble_tokens: int
    start: int
    nbytes: int
    payload: str
    max_error: float
    rms_error: float
    exact: bool
    signer: str | None = Field(description="public key that signed it, in hex digits")
    encrypted: bool
    created_at: str
    versions: dict[str, str]
    role: str
    variant: dict[str, str]
    fields: list[FieldRecord]
    text: str | None = Field(description="the text it was compiled from, if it is here")

    @classmethod
    def of(cls, opened: OpenFile, text: str | None) -> FileRecord:
        """Return the record of an open file."""
        header = opened.header
        spec, source = header.identity.spec, header.provenance
        return cls(
            path=str(opened.path),
            key=header.key,
            kind=header.kind,
            name=source.name,
            version=source.version,
            tenant=header.tenant,
            model_type=spec.model_type,
            fingerprint=header.fingerprint,
            dtype=spec.dtype,
            layers=spec.num_layers,
            kv_heads=spec.layers[0].num_kv_heads,
            head_dim=spec.layers[0].head_dim,
            rope=", ".join(sorted({rope.kind for rope in spec.ropes})),
            tokens=len(header.token_ids),
            preamble_tokens=len(header.preamble_ids),
            start=header.start,
            nbytes=opened.version.nbytes,
            payload=header.payload.kind,
            max_error=header.payload.max_error,
            rms_error=header.payload.rms_error,
            exact=not header.altered,
            signer=opened.signer or None,
            encrypted=opened.encrypted,
            created_at=header.created.at,
            versions=dict(header.created.versions),
            role=source.role,
            variant=dict(source.variant),
            fields=[FieldRecord(**span.model_dump()) for span in source.spans],
            text=text,
        )


class RecomputedRecord(_Record):
    """K/V of a file, computed again."""

    checked_tokens: int
    tokens: int
    max_gap: float = Field(description="largest difference over the largest value of its layer")
    allowed: float
    agreed: bool

    @classmethod
    def of(cls, result: Recomputed) -> RecomputedRecord:
        """Return the record of an outcome."""
        return cls(
            checked_tokens=result.num_checked,
            tokens=result.num_tokens,
            max_gap=result.max_gap,
            allowed=result.allowed,
            agreed=result.agreed,
        )


class VerifiedFile(_Record):
    """What `verify` found out about one file."""

    path: str
    key: str | None
    segment: str | None = Field(description="name, version and variant")
    ok: bool
    fault: str | None
    signer: str | None
    text_agrees: bool | None = Field(description="null: no text here, or no model was loaded")
    recomputed: RecomputedRecord | None


class VerifyRecord(_Record):
    """What `verify` prints."""

    files: list[VerifiedFile]
    ok: bool


def skill_line(skill: Skill) -> str:
    """Return what kind of skill it is, in a word or two."""
    if skill.is_tool:
        return "tool"
    return "inside a message" if skill.role == "inline" else f"{skill.role} message"


class PrunedFile(_Record):
    """Something that was taken away, or would be."""

    kind: str
    name: str = Field(description="path below the store, or the key of a segment")
    nbytes: int
    reason: str


class PruneRecord(_Record):
    """What `prune` prints."""

    dry_run: bool
    files: list[PrunedFile]
    nbytes: int

    @classmethod
    def of(cls, gone: Sequence[Pruned], *, dry_run: bool) -> PruneRecord:
        """Return the record of what went, or would."""
        files = [
            PrunedFile(kind=item.kind, name=item.name, nbytes=item.nbytes, reason=item.reason)
            for item in gone
        ]
        return cls(dry_run=dry_run, files=files, nbytes=sum(file.nbytes for file in files))

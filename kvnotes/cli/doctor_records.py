"""What `kvnotes doctor --json` prints: a contract that others script against.

Owns the keys and their types. Every key is always there; what was not reached is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvnotes.cli.explain_records import CostRecord
from kvnotes.errors import KVNotesError

Section = Literal["environment", "model"]
Status = Literal["ok", "warning", "fault"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Record):
    """One line of the checklist."""

    section: Section
    name: str
    status: Status = Field(description="warning: usable, but see the way out; fault: not usable")
    fact: str
    way_out: str | None
    error: str | None = Field(description="class of the error that a fault would raise")
    exit_code: int = Field(description="that error's exit code, 0 where there is no fault")

    @classmethod
    def ok(cls, section: Section, name: str, fact: str, way_out: str | None = None) -> Check:
        """Return a line without a complaint."""
        return cls._of(section, name, "ok", fact, way_out)

    @classmethod
    def warning(cls, section: Section, name: str, fact: str, way_out: str | None) -> Check:
        """Return a line about what works, and could be better."""
        return cls._of(section, name, "warning", fact, way_out)

    @classmethod
    def fault(cls, section: Section, name: str, error: KVNotesError) -> Check:
        """Return a line about what does not work: the error that a command would end with."""
        return cls(
            section=section,
            name=name,
            status="fault",
            fact=error.message,
            way_out=error.hint or None,
            error=type(error).__name__,
            exit_code=error.exit_code,
        )

    @classmethod
    def _of(
        cls, section: Section, name: str, status: Status, fact: str, way_out: str | None
    ) -> Check:
        return cls(
            section=section,
            name=name,
            status=status,
            fact=fact,
            way_out=way_out,
            error=None,
            exit_code=0,
        )


class LayerRecord(_Record):
    """What some layers keep per token."""

    kind: str
    window: int = Field(description="tokens that a layer sees, or the size of a chunk; 0: all")
    layers: int
    kv_heads: int
    head_dim: int


class LayoutRecord(_Record):
    """What the model caches, and how its positions work."""

    model_type: str
    fingerprint: str
    dtype: str
    layers: list[LayerRecord]
    attention_heads: int
    rope: str = Field(description="the scaling of its rotary embedding")
    rope_pairing: str = Field(description="which dimensions of a key are rotated together")
    context: int = Field(description="longest sequence, in tokens")
    limit_reason: str = Field(description="why that is less than the model states")
    kv_bytes_per_token: int


class GateRowRecord(_Record):
    """One comparison with a forward that shares nothing with it."""

    case: str
    tokens: int
    gap: float | None = Field(description="relative to the largest logit; null: not a number")
    tolerance: float


class GateRecord(_Record):
    """What moving and recomputing K/V changes."""

    rows: list[GateRowRecord]
    control: float | None = Field(description="gap of a splice that is not rotated; null: none is")


class TemplateRecord(_Record):
    """What the chat template does with messages."""

    system: str = Field(description="keep, merged or none")
    adjacent_system: bool = Field(description="two system messages in a row stay apart")
    late_system: dict[str, str] = Field(
        description="role in which a late system message is sent, by the message before it"
    )
    prefix_stable: bool = Field(description="a new turn never changes what stands before")
    shows_time: bool


class TokenizerRecord(_Record):
    """The tokenizer's control tokens."""

    control_tokens: list[str]
    end_tokens: list[str]


class PredictedRecord(_Record):
    """What 1,000 tokens take on this machine."""

    computed_ms: float
    moved_ms: float


class DoctorRecord(_Record):
    """Everything that was checked."""

    usable: bool
    exit_code: int = Field(description="that of the first fault, 0 without one")
    versions: dict[str, str]
    model: str | None = Field(description="null with --no-model")
    checks: list[Check]
    layout: LayoutRecord | None
    gate: GateRecord | None
    cost: CostRecord | None
    per_1000_tokens: PredictedRecord | None
    template: TemplateRecord | None
    tokenizer: TokenizerRecord | None

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=2)

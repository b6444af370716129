"""What `kvnotes lint --json` prints: a contract that others script against.

Every key is always there; what does not apply is null or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field

from kvnotes.cli.lint_source import LintInput, Taken
from kvnotes.lint import Finding, LogReport, Saving


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FindingRecord(_Record):
    """A value of a prompt that changes from request to request."""

    kind: str = Field(description="datetime, date, time, epoch, uuid, id, digest, token, ...")
    part: str = Field(description="where in the prompt, such as messages[0] system; may be empty")
    start: int = Field(description="first character in the part")
    stop: int = Field(description="character after the last")
    text: str
    line: int = Field(ge=1)
    column: int = Field(ge=1)
    num_invalidated_tokens: int = Field(description="from its first token to the end")
    share: float = Field(description="the same over the prompt's tokens")
    advice: str


class CauseRecord(_Record):
    """What differs between requests of a log, summed."""

    kind: str = Field(description="a kind of value, or changed-text, tools-reordered, ...")
    part: str
    num_requests: int
    num_invalidated_tokens: int = Field(description="behind it; causes count the same tokens")
    num_saved_tokens: int = Field(description="if only this cause is put right")
    share: float = Field(description="of num_reusable_tokens")
    old: str
    new: str
    request: int = Field(description="number of the request where it cost most, from 1")
    advice: str


class MissRecord(_Record):
    """Where a request first differs from the one before it."""

    request: int = Field(ge=1)
    previous: int = Field(ge=1)
    kind: str
    part: str
    start: int
    line: int
    column: int
    old: str
    new: str
    num_differences: int
    num_invalidated_tokens: int
    num_shared_tokens: int = Field(description="tokens that the request before had too")


class LogRecord(_Record):
    """A log of requests."""

    num_requests: int
    num_compared: int = Field(description="those that continue an earlier one, or begin like it")
    num_reusable_tokens: int
    causes: list[CauseRecord] = Field(description="the most expensive first")
    misses: list[MissRecord]


class BestRecord(_Record):
    """The one change that saves most."""

    kind: str
    part: str
    text: str
    num_saved_tokens: int
    advice: str


class LintRecord(_Record):
    """What the lint found."""

    name: str
    taken_as: Taken
    tokenizer: str | None = Field(description="null: token numbers are estimated from bytes")
    num_tokens: int
    num_invalidated_tokens: int = Field(description="behind the first value, or the differences")
    findings: list[FindingRecord] = Field(description="in the order of the prompt")
    best: BestRecord | None
    log: LogRecord | None

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=2)


def prompt_record(
    taken: LintInput,
    findings: Sequence[Finding],
    best: Saving | None,
    *,
    tokenizer: str | None,
    num_tokens: int,
) -> LintRecord:
    """Return the record of a prompt."""
    first = best.finding if best else None
    return LintRecord(
        name=taken.name,
        taken_as=taken.taken_as,
        tokenizer=tokenizer,
        num_tokens=num_tokens,
        num_invalidated_tokens=first.num_invalidated_tokens if first else 0,
        findings=[FindingRecord(**_rounded(asdict(finding))) for finding in findings],
        best=BestRecord(
            kind=first.kind,
            part=first.part,
            text=first.text,
            num_saved_tokens=best.num_tokens,
            advice=first.advice,
        )
        if best and first
        else None,
        log=None,
    )


def log_record(taken: LintInput, report: LogReport, *, tokenizer: str | None) -> LintRecord:
    """Return the record of a log."""
    best = max(report.causes, key=lambda cause: cause.num_saved_tokens, default=None)
    return LintRecord(
        name=taken.name,
        taken_as=taken.taken_as,
        tokenizer=tokenizer,
        num_tokens=report.num_tokens,
        num_invalidated_tokens=report.num_invalidated_tokens,
        findings=[],
        best=BestRecord(
            kind=best.kind,
            part=best.part,
            text=best.new,
            num_saved_tokens=best.num_saved_tokens,
            advice=best.advice,
        )
        if best
        else None,
        log=LogRecord(
            num_requests=report.num_requests,
            num_compared=report.num_compared,
            num_reusable_tokens=report.num_reusable_tokens,
            causes=[CauseRecord(**_rounded(asdict(cause))) for cause in report.causes],
            misses=[MissRecord(**asdict(miss)) for miss in report.misses],
        ),
    )


def _rounded(data: dict[str, object]) -> dict[str, object]:
    share = data["share"]
    assert isinstance(share, float)
    return {**data, "share": round(share, 4)}

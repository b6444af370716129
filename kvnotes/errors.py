"""The error tree: what can go wrong, its exit code and its HTTP status.

Owns every exception kvnotes raises on purpose. Each message names both sides of a
disagreement; `hint` is the way out and is printed on a line of its own. An error is
raised once, at the place that knows; `cli` and `server` map it once, from the class.

    KVNotesError
    |- TemplateError(ValueError)      MissingFieldError, UnknownFieldError, FieldValueError
    |- PlanError(ValueError)          PlanGapError, UnknownSegmentError, LineageError
    |- SpecMismatchError(ValueError)
    |- UnsupportedModelError(NotImplementedError)
    |- ModelNotFoundError(FileNotFoundError)
    |- SegmentFormatError(ValueError)
    |- ScenarioError(ValueError)
    |- StorageError(OSError)
    |- TrustError(PermissionError)
    |- InputError(ValueError)
    `- EngineError(RuntimeError)      OutOfCacheError, ServerError
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class KVNotesError(Exception):
    """Base of every error kvnotes raises on purpose.

    Args:
        message: One line that says what was wrong, both sides of it.
        hint: The way out, without the word "hint".
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class TemplateError(KVNotesError, ValueError):
    """A prompt template, a message or a chat template cannot be rendered as asked."""

    exit_code = 3
    http_status = 400


class MissingFieldError(TemplateError):
    """A slot of the template has no value."""


class UnknownFieldError(TemplateError):
    """A value names a field that the template does not have."""


class FieldValueError(TemplateError):
    """A field's value is not allowed: several lines, too long, or control text."""


class PlanError(KVNotesError, ValueError):
    """A plan cannot be made or does not say what it should."""

    exit_code = 4
    http_status = 400


class PlanGapError(PlanError):
    """The steps of a plan do not cover the target once, in order, with its tokens."""


class UnknownSegmentError(PlanError):
    """A plan or template names a segment that nobody holds."""


class LineageError(PlanError):
    """A run of K/V was computed after other tokens than its place allows."""


class SpecMismatchError(KVNotesError, ValueError):
    """A segment or cache belongs to another model, dtype or rotary embedding."""

    exit_code = 5
    http_status = 409


class UnsupportedModelError(KVNotesError, NotImplementedError):
    """The model holds no per-token K/V, or its positions cannot be moved exactly."""

    exit_code = 6
    http_status = 501


class ModelNotFoundError(KVNotesError, FileNotFoundError):
    """No model is where the given name points."""

    exit_code = 7
    http_status = 404


class SegmentFormatError(KVNotesError, ValueError):
    """A file is damaged, hostile or of a newer format."""

    exit_code = 8
    http_status = 422


class ScenarioError(KVNotesError, ValueError):
    """A scenario file cannot be read as a scenario."""

    exit_code = 9
    http_status = 400


class StorageError(KVNotesError, OSError):
    """A folder or file cannot be read or written, or the disk is full."""

    exit_code = 10
    http_status = 507


class TrustError(KVNotesError, PermissionError):
    """A file is signed by nobody who is trusted, or its key is not there."""

    exit_code = 13
    http_status = 403


class InputError(KVNotesError, ValueError):
    """A prompt, a request or a log of requests cannot be read as one."""

    exit_code = 14
    http_status = 400


class EngineError(KVNotesError, RuntimeError):
    """The engine cannot do what a plan asks."""

    exit_code = 11
    http_status = 500


class OutOfCacheError(EngineError):
    """The tokens do not fit into the model's context or the cache."""

    exit_code = 12
    http_status = 413


class ServerError(EngineError):
    """A server that computes for a session does not answer, or refuses; asking again may help."""

    exit_code = 15
    http_status = 502


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word nearest to `name`, or lists them all."""
    words = sorted(known)
    close = get_close_matches(name, words, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + (", ".join(words) if words else "none")

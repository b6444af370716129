"""The error tree: exit codes, HTTP status, both lines of a message."""

from __future__ import annotations

import inspect

import pytest

from kvnotes import errors
from kvnotes.errors import KVNotesError, nearest

CLASSES = [
    value
    for _, value in sorted(vars(errors).items())
    if inspect.isclass(value) and issubclass(value, KVNotesError)
]

BUILTIN = {
    "TemplateError": ValueError,
    "PlanError": ValueError,
    "SpecMismatchError": ValueError,
    "UnsupportedModelError": NotImplementedError,
    "ModelNotFoundError": FileNotFoundError,
    "SegmentFormatError": ValueError,
    "ScenarioError": ValueError,
    "StorageError": OSError,
    "TrustError": PermissionError,
    "InputError": ValueError,
    "EngineError": RuntimeError,
}

PARENTS = {
    "MissingFieldError": "TemplateError",
    "UnknownFieldError": "TemplateError",
    "FieldValueError": "TemplateError",
    "PlanGapError": "PlanError",
    "UnknownSegmentError": "PlanError",
    "LineageError": "PlanError",
    "OutOfCacheError": "EngineError",
    "ServerError": "EngineError",
}


def test_the_tree_has_the_classes_of_the_design_and_no_others() -> None:
    assert {c.__name__ for c in CLASSES} == {"KVNotesError", *BUILTIN, *PARENTS}


@pytest.mark.parametrize("name", BUILTIN)
def test_each_branch_is_also_the_builtin_error_that_callers_expect(name: str) -> None:
    assert issubclass(getattr(errors, name), BUILTIN[name])


@pytest.mark.parametrize("name", PARENTS)
def test_each_leaf_is_caught_with_its_branch(name: str) -> None:
    assert issubclass(getattr(errors, name), getattr(errors, PARENTS[name]))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_an_exit_code_a_status_and_a_line_of_documentation(
    kind: type[KVNotesError],
) -> None:
    assert 1 <= kind.exit_code < 126
    assert 400 <= kind.http_status < 600
    assert kind.__doc__ and kind.__doc__.strip()


def test_branches_of_the_tree_have_different_exit_codes() -> None:
    codes = [getattr(errors, name).exit_code for name in BUILTIN]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_a_message_is_followed_by_its_hint_on_a_line_of_its_own(kind: type[KVNotesError]) -> None:
    error = kind("3 of 4 tokens", hint="give one more")
    assert str(error) == "3 of 4 tokens\nhint: give one more"
    assert (error.message, error.hint) == ("3 of 4 tokens", "give one more")


def test_a_message_without_a_hint_is_one_line() -> None:
    assert str(KVNotesError("3 of 4 tokens")) == "3 of 4 tokens"


def test_a_hint_names_the_nearest_word_else_all_of_them() -> None:
    assert nearest("order_staus", ["total", "order_status"]) == "did you mean 'order_status'?"
    assert nearest("xyz", ["total", "order_status"]) == "known: order_status, total"
    assert nearest("xyz", []) == "known: none"

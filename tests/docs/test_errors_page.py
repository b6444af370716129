"""docs/errors.md says what kvnotes/errors.py is."""

from __future__ import annotations

import re
from pathlib import Path

from kvnotes import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
ROW = re.compile(r"\| `(\w+)` \| `(\w+)` \| (\d+) \| (\d+) \|")


def test_every_error_class_has_a_line_with_its_codes() -> None:
    listed = {
        name: (base, int(code), int(http))
        for name, base, code, http in ROW.findall(PAGE.read_text())
    }
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KVNotesError)
    }
    assert listed.keys() == classes.keys()
    for name, (base, code, http) in listed.items():
        cls = classes[name]
        assert (cls.exit_code, cls.http_status) == (code, http), name
        assert base in {parent.__name__ for parent in cls.__mro__[1:]}, name

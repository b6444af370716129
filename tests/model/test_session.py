"""Sessions under attack: what a random conversation found, and what a user may do in any order."""

from __future__ import annotations

import pytest
from helpers_session import gap_to_mask, shop

from kvnotes.errors import KVNotesError
from kvnotes.fidelity import MECHANICAL_TOLERANCE

TOLERANCE = MECHANICAL_TOLERANCE["float32"]
CHOICES = ("yes", "no way")


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("doing", ["move", "move before", "delete", "replace"])
@pytest.mark.parametrize("verify", ["cheap", "full"])
def test_moving_or_deleting_an_erratum_never_blocks_later_turns(
    verify: str, doing: str, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvnotes.session import verify as module

    session = shop(strategy="erratum")
    session.user("hello", decide=CHOICES)
    if committed:
        session.edit(status="high", strategy="erratum")
        session.user("first", decide=CHOICES)
    monkeypatch.setattr(module.Checker, "check", lambda *args: (False, 1))  # climb every rung
    session.edit(status="mid", strategy="erratum", verify=verify)  # type: ignore[arg-type]
    session.add("user", "and now")
    erratum = next(m.id for m in session.messages if m.erratum_of)
    try:
        if doing == "move":
            session.move(erratum, before="m1", strategy="erratum")
        elif doing == "move before":
            session.move("t1", before=erratum, strategy="erratum")
        elif doing == "delete":
            session.delete(erratum, strategy="erratum")
        else:
            session.replace(erratum, "It is mid.", strategy="erratum")
    except KVNotesError as error:
        assert error.hint  # refused with the way out: nothing has changed
    session.user("works", decide=CHOICES)
    assert session.values["status"] == "mid"
    assert gap_to_mask(session) <= TOLERANCE

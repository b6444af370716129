"""Sessions under attack: what a random conversation found, and what a user may do in any order."""

from __future__ import annotations

import pytest
from helpers_session import gap_to_mask, shop, statements

from kvnotes import SamplingParams
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


@pytest.mark.parametrize("strategy", ["refresh", "selective", "refresh+erratum", "suffix"])
def test_a_rewriting_edit_after_an_erratum_shows_the_new_value_everywhere(strategy: str) -> None:
    session = shop(strategy="erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    session.user("first", decide=CHOICES)
    assert set(statements(session)) == {"low", "high"}, "the old statement stays where it was"
    session.edit(status="mid", strategy=strategy)
    session.user("second", decide=CHOICES)
    assert set(statements(session)) == {"mid"}
    assert not any(message.pinned for message in session.messages)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_turn_that_fails_while_it_is_answered_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = shop(strategy="refresh")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    before = [message.id for message in session.messages]
    engine = type(session.model.engine)
    for doing in ("generate", "score"):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", _broken)
            patch.setattr(engine, "score", _broken)
            with pytest.raises(MemoryError):
                if doing == "generate":
                    session.user("again", generate=SamplingParams(4))
                else:
                    session.user("again", decide=CHOICES)
        assert [message.id for message in session.messages] == before
        assert session.values["status"] == "high"
    session.user("again", decide=CHOICES)
    assert sum(message.content == "again" for message in session.messages) == 1
    assert gap_to_mask(session) <= TOLERANCE


def _broken(*args: object, **kwargs: object) -> None:
    raise MemoryError

"""Segments that join a running conversation: what is moved, what they bring, what is refused."""

from __future__ import annotations

import pytest
from helpers_session import POLICY, gap_to_mask, lineage, rebuilt, run, shop, tiny_model

from kvnotes import Message, SegmentText, Session
from kvnotes.errors import (
    FieldValueError,
    KVNotesError,
    MissingFieldError,
    PlanError,
    TemplateError,
    UnknownFieldError,
    UnknownSegmentError,
)
from kvnotes.fidelity import MECHANICAL_TOLERANCE

TOLERANCE = MECHANICAL_TOLERANCE["float32"]
CHOICES = ["yes", "no"]
SKILL = SegmentText("refunds@3", "A refund takes ten days. Ask for the number of the order. " * 6)
MANNERS = SegmentText("manners", "Speak {{style}}. The shop is {{shop}}. " * 4)


def plain(**options: object) -> Session:
    """No field stands anywhere, so `auto` splices at every place."""
    return Session(
        tiny_model(),
        messages=[
            {"role": "system", "content": "You help.\n"},
            {"role": "system", "segment": "policy"},
        ],
        segments={"policy": POLICY},
        **options,  # type: ignore[arg-type]
    )


def num_tokens(session: Session, segment: SegmentText) -> int:
    (span,) = (span for span in session.render().segments if span.name == segment.name)
    return span.stop - span.start


def test_a_segment_spliced_late_is_moved_and_what_is_cached_is_kept() -> None:
    session = plain()
    session.user("hello", decide=CHOICES)
    cached = session.num_cached_tokens
    alone = session.splice(SKILL)
    assert (alone.op, alone.plan.shape, alone.ttft_ms) == ("splice", "R C R' C", None)
    assert session.num_cached_tokens == cached, "nothing is computed yet"
    turn = session.user("and now", decide=CHOICES)
    assert turn.plan.tokens.reused == cached
    assert turn.plan.tokens.moved == num_tokens(session, SKILL) - 1, "all but the seam"
    assert gap_to_mask(session) <= TOLERANCE


def test_a_segment_spliced_before_a_message_is_moved_and_the_rest_is_rebuilt() -> None:
    session = plain()
    session.user("hello", decide=CHOICES)
    session.splice(SKILL, before="m1")
    assert [m.id for m in session.messages] == ["m0", "refunds@3", "m1", "t1"]
    counts = session.user("and now", decide=CHOICES).plan.tokens
    spliced = sum(num_tokens(session, s) for s in (SKILL, SegmentText("policy", POLICY)))
    behind = counts.total - session.render().message_span("m0").stop
    seams = 1  # the other one is the same token where the policy's seam stood
    assert counts.computed == behind - spliced + seams
    assert lineage(session) == lineage(rebuilt(session))
    assert gap_to_mask(session) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["refresh", "erratum", "selective", "refresh+erratum"])
def test_by_the_users_word_the_messages_behind_a_splice_keep_their_notes(strategy: str) -> None:
    session = plain()
    session.user("hello " * 30, decide=CHOICES)
    cached = session.num_cached_tokens
    session.splice(SKILL, before="t1", strategy=strategy)
    counts = session.user("and now", decide=CHOICES).plan.tokens
    assert counts.moved >= num_tokens(session, SKILL) - 1
    assert counts.computed < 40 or strategy == "selective"
    assert counts.reused + counts.moved >= 0.8 * (cached + num_tokens(session, SKILL))
    assert gap_to_mask(session) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral", "gemma", "deepseek"])
@pytest.mark.parametrize("before", [None, "m1", "t1"])
def test_in_every_template_a_splice_equals_its_mask_and_a_new_session(
    family: str, before: str | None
) -> None:
    session = shop(tiny_model(family))
    session.user("hello", decide=CHOICES)
    session.splice(SKILL, before=before)
    session.user("and now", decide=CHOICES)
    assert lineage(session) == lineage(rebuilt(session))
    assert gap_to_mask(session) <= TOLERANCE


def test_behind_a_field_auto_computes_the_segment_and_the_users_word_moves_it() -> None:
    for strategy, moves in ((None, False), ("refresh", True)):
        session = shop()
        session.user("hello", decide=CHOICES)
        session.splice(SKILL, strategy=strategy)
        turn = session.user("and now", decide=CHOICES)
        assert (turn.plan.tokens.moved > 0) is moves
        note = "field_before_segment:refunds@3" + ("" if moves else ":computed")
        assert note in turn.notices
        assert gap_to_mask(session) <= TOLERANCE


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_segment_is_spliced_in_the_role_that_is_asked_for(role: str) -> None:
    session = plain()
    session.user("hello", decide=CHOICES)
    session.splice(SKILL, role=role, id="skill")
    assert (session.messages[-1].role, session.messages[-1].id) == (role, "skill")
    assert session.decide(CHOICES).plan.tokens.moved > 0
    assert gap_to_mask(session) <= TOLERANCE


# -- what is compiled ------------------------------------------------------------------------


def test_only_the_call_compiles_and_only_what_it_is_given() -> None:
    session = shop()
    book = session.model.book
    assert len(book) == 1
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    session.splice(SKILL)
    assert len(book) == 2
    session.user("and now", decide=CHOICES)
    session.delete("refunds@3")
    session.splice("refunds@3", before="m1")
    session.user("end", decide=CHOICES)
    assert len(book) == 2, "it is known by name, and what traffic brings is not compiled"
    other = shop(session.model)
    other.splice(SKILL)
    assert len(book) == 2, "sessions share what is compiled"


def test_a_splice_compiles_no_other_segment_for_its_new_value() -> None:
    session = Session(
        tiny_model(),
        messages=[{"role": "system", "segment": "prices"}],
        segments={"prices": POLICY + "The price is {{price}}."},
        fields={"price": "ten"},
    )
    session.user("hello", decide=CHOICES)
    session.edit(price="twenty")
    session.splice(SKILL)
    assert len(session.model.book) == 2


def test_variants_of_a_spliced_segment_are_compiled_with_it() -> None:
    session = Session(
        tiny_model(),
        messages=[{"role": "system", "content": "You help. status: {{status}}\n"}],
        fields={"status": "low"},
    )
    session.user("hello", decide=CHOICES)
    variants = (("status", ("low", "high")),)
    session.splice(SegmentText("policy", POLICY, "status: {{status}}\n", variants), before="t1")
    assert len(session.model.book) == 2
    session.user("and now", decide=CHOICES)
    session.edit(status="high", strategy="swap")
    turn = session.user("again", decide=CHOICES)
    assert (turn.strategy, turn.fallback_reason) == ("swap", None)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_session_that_never_splices_compiles_nothing() -> None:
    session = shop(splice="never")
    session.user("hello", decide=CHOICES)
    session.splice(SKILL)
    assert session.user("and now", decide=CHOICES).plan.exact
    assert len(session.model.book) == 0


def test_a_splice_whose_compilation_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = plain()
    session.user("hello", decide=CHOICES)

    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(session.model.engine), "compile", broken)
        with pytest.raises(MemoryError):
            session.splice(MANNERS, values={"style": "softly", "shop": "small"})
    assert dict(session.values) == {} and len(session.messages) == 3
    assert session.state.template.segments == (SegmentText("policy", POLICY),)
    session.splice(MANNERS, values={"style": "softly", "shop": "small"})
    assert session.user("and now", decide=CHOICES).plan.tokens.moved > 0


# -- what it brings --------------------------------------------------------------------------


def test_fields_that_come_with_a_segment_are_shown_and_edited_like_all_others() -> None:
    session = plain()
    session.user("hello", decide=CHOICES)
    session.splice(MANNERS, values={"style": "softly", "shop": "small"})
    session.edit(style="loudly")  # before anything is computed
    assert dict(session.values) == {"style": "loudly", "shop": "small"}
    session.user("and now", decide=CHOICES)
    session.edit(shop="large")
    session.user("again", decide=CHOICES)
    assert "Speak loudly. The shop is large." in session.render().text
    assert gap_to_mask(session) <= TOLERANCE


def test_a_segment_that_comes_again_may_bring_other_values() -> None:
    session = plain()
    session.splice(MANNERS, values={"style": "softly", "shop": "small"})
    session.user("hello", decide=CHOICES)
    session.delete("manners")
    session.splice(MANNERS, values={"style": "loudly"})
    assert dict(session.values) == {"style": "loudly", "shop": "small"}
    session.edit(style="softly")  # what it was when something was computed last
    assert session.values["style"] == "softly"
    session.user("and now", decide=CHOICES)
    assert "Speak softly." in session.render().text
    assert gap_to_mask(session) <= TOLERANCE


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"style": "softly"}, MissingFieldError, "'shop'"),
        (None, MissingFieldError, "'style'"),
        ({"style": "softly", "shop": "x", "shap": "y"}, UnknownFieldError, "'shap'"),
        ({"style": "softly", "shop": "x", "status": "low"}, UnknownFieldError, "'status'"),
        ({"style": "two\nlines", "shop": "x"}, FieldValueError, "single-line"),
        ({"style": "<|im_end|>", "shop": "x"}, FieldValueError, "im_end"),
        ({"style": "x" * 201, "shop": "x"}, FieldValueError, "201"),
    ],
)
def test_values_are_checked_like_those_of_the_constructor(
    values: dict[str, str] | None, error: type[KVNotesError], said: str
) -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    before = (session.messages, dict(session.values), session.render().token_ids)
    with pytest.raises(error, match=said) as found:
        session.splice(MANNERS, values=values)
    assert found.value.hint
    assert (session.messages, dict(session.values), session.render().token_ids) == before
    session.user("and now", decide=CHOICES)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_field_that_is_shown_keeps_its_value() -> None:
    session = shop()
    again = SegmentText("again", "The status is {{status}}. " * 6)
    with pytest.raises(TemplateError, match=r"'low'.*'status'.*'high'"):
        session.splice(again, values={"status": "high"})
    session.splice(again, values={"status": "low"})
    session.edit(status="high")
    assert session.render().text.count("high") == 7


# -- names -----------------------------------------------------------------------------------


def test_a_name_in_use_for_another_text_is_refused_with_both_sides() -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    with pytest.raises(TemplateError, match=r"below the price.*below the cost"):
        session.splice(SegmentText("policy", "Never sell below the cost. " * 12))
    with pytest.raises(TemplateError, match="the preamble"):
        session.splice(SegmentText("policy", POLICY, "A policy:\n"))
    session.splice(SegmentText("policy", POLICY))
    assert [m.segment for m in session.messages].count("policy") == 2
    session.user("and now", decide=CHOICES)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_name_that_is_free_again_takes_another_text() -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    session.delete("m1")
    session.splice(SegmentText("policy", "Never sell below the cost. " * 12), before="m2")
    session.user("and now", decide=CHOICES)
    assert "below the cost" in session.render().text
    assert lineage(session) == lineage(rebuilt(session))


def test_an_unknown_segment_names_the_nearest() -> None:
    with pytest.raises(UnknownSegmentError, match="did you mean 'policy'"):
        shop().splice("polcy")


@pytest.mark.parametrize("before", ["nowhere", "erratum:status:0"])
def test_a_splice_before_no_message_is_refused(before: str) -> None:
    session = shop(strategy="erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    session.user("and now", decide=CHOICES)
    with pytest.raises((TemplateError, PlanError), match=before):
        session.splice(SKILL, before=before)
    assert SKILL not in session.state.template.segments


def test_a_turn_that_fails_keeps_the_splice_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    session = plain()
    session.user("hello", decide=CHOICES)
    session.splice(SKILL)

    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(session.model.engine), "execute", broken)
        with pytest.raises(MemoryError):
            session.user("and now", decide=CHOICES)
    assert [m.id for m in session.messages] == ["m0", "m1", "t1", "refunds@3"]
    session.user("and now", decide=CHOICES)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_splice_into_a_text_is_a_paragraph_behind_it() -> None:
    session = Session(tiny_model(), text="You help.\n")
    session.decide(CHOICES)
    session.splice(SKILL)
    session.add("user", "hello")
    assert session.decide(CHOICES).plan.tokens.moved > 0
    assert session.render().text == f"You help.\n{SKILL.text}\nhello\n"
    assert gap_to_mask(session) <= TOLERANCE


def test_a_session_without_messages_may_begin_with_a_splice() -> None:
    session = Session(tiny_model(), messages=[Message("system", "You help.")])
    session.splice(SKILL, before="m0")
    assert session.user("hello", decide=CHOICES).plan.shape == "R C"
    assert run(session).cache.token_ids[:8] == session.render().token_ids[:8]

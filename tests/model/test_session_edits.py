"""What edits do to a conversation: plan shapes, errata, values, exactness."""

from __future__ import annotations

import pytest
from helpers_session import FEW, POLICY, gap_to_mask, run, shop, statements, tiny_model

from kvnotes import SamplingParams, SegmentText, Session
from kvnotes.errors import (
    EngineError,
    FieldValueError,
    OutOfCacheError,
    PlanError,
    TemplateError,
    UnknownFieldError,
)
from kvnotes.fidelity import MECHANICAL_TOLERANCE

TOLERANCE = MECHANICAL_TOLERANCE["float32"]
CHOICES = ["yes", "no"]

SHAPES = {
    "auto": "R C",
    "suffix": "R C",
    "reprefill": "C",
    "refresh": "R C R' C",
    "erratum": "R C",
    "refresh+erratum": "R C R' C",
}


@pytest.mark.parametrize("strategy", SHAPES)
def test_each_strategy_has_the_plan_shape_of_the_design(strategy: str) -> None:
    session = shop(strategy=strategy)
    first = session.user("hello", decide=CHOICES)
    assert first.plan.shape == ("C" if strategy == "reprefill" else "C R' C")
    session.edit(status="high and more")  # another number of tokens: what follows moves
    turn = session.user("and now", decide=CHOICES)
    assert turn.plan.shape == SHAPES[strategy]


def test_a_refresh_with_as_many_tokens_moves_nothing() -> None:
    session = shop(strategy="refresh")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    old, new = shop(), shop()
    new.edit(status="high")
    assert old.render().num_tokens == new.render().num_tokens, "the test needs equal lengths"
    assert session.user("and now", decide=CHOICES).plan.shape == "R C R C"


@pytest.mark.parametrize("strategy", [*SHAPES, "selective"])
def test_every_strategy_leaves_a_cache_that_equals_its_mask_reference(strategy: str) -> None:
    session = shop(strategy=strategy)
    session.user("hello", generate=FEW)
    session.edit(status="high and more", tier="silver")
    session.user("and now", decide=CHOICES, id="gone")
    session.delete("gone")
    assert gap_to_mask(session) <= TOLERANCE
    last = [message for message in session.messages if not message.erratum_of][-1]
    session.move(last.id, before=session.messages[2].id)
    session.replace(session.messages[0].id, "You sell.\n")
    assert gap_to_mask(session) <= TOLERANCE


@pytest.mark.parametrize("turns", [0, 1, 5])
@pytest.mark.parametrize("values", [["high", "low"], ["high", "mid", "high"]])
def test_rewriting_errata_state_the_last_value_everywhere(values: list[str], turns: int) -> None:
    session = shop(strategy="refresh+erratum")
    session.user("hello", decide=CHOICES)
    for value in values:
        session.edit(status=value)
        for number in range(turns):
            session.user(f"turn {number}", decide=CHOICES)
    session.user("end", decide=CHOICES)
    assert set(statements(session)) == {values[-1]}
    assert session.values["status"] == values[-1]


@pytest.mark.parametrize("turns", [0, 1, 5])
@pytest.mark.parametrize("values", [["high", "low"], ["high", "mid", "high"]])
def test_appended_errata_touch_nothing_and_end_in_the_last_value(
    values: list[str], turns: int
) -> None:
    session = shop(strategy="erratum", erratum_mode="append")
    session.user("hello", decide=CHOICES)
    before = session.render().token_ids
    for value in values:
        session.edit(status=value)
        for number in range(turns):
            session.user(f"turn {number}", decide=CHOICES)
    session.user("end", decide=CHOICES)
    prompt = session.render()
    assert prompt.token_ids[: len(before)] == before
    assert statements(session)[-1] == values[-1]
    errata = [m for m in session.messages if m.erratum_of]
    if turns:
        assert [f"revision {n + 1}," in m.content for n, m in enumerate(errata)] == [True] * len(
            values
        )
    else:
        assert len(errata) == (0 if values[-1] == "low" else 1)


def test_editing_a_field_to_its_own_value_changes_nothing_also_behind_an_erratum() -> None:
    session = shop(strategy="refresh+erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    session.user("and now", decide=CHOICES)
    before = session.render().token_ids
    for strategy in ("suffix", "refresh", "erratum", "refresh+erratum", "reprefill"):
        turn = session.edit(status="high", strategy=strategy)
        assert turn.plan.tokens.moved == 0
        assert session.render().token_ids == before
    checksum = session._talk.live.cache.checksum()  # type: ignore[union-attr]
    cached = session.num_cached_tokens
    session.decide(CHOICES)
    assert session.num_cached_tokens == cached
    assert session._talk.live.cache.checksum() == checksum  # type: ignore[union-attr]


def test_append_mode_consolidates_visibly_when_a_field_has_too_many_errata() -> None:
    session = shop(strategy="erratum", erratum_mode="append")
    for number in range(6):
        session.user(f"turn {number}", decide=CHOICES)
        session.edit(status=f"state{number}")
    turn = session.user("end", decide=CHOICES)
    reasons = [turn.fallback_reason]
    assert sum(m.erratum_of == "status" for m in session.messages) <= 4
    assert statements(session)[-1] == "state5"
    assert any(reasons) or session.exact or statements(session)[0] != "low"


def test_append_mode_refuses_a_strategy_that_rewrites() -> None:
    session = shop(erratum_mode="append")
    session.user("hello", decide=CHOICES)
    with pytest.raises(PlanError, match="append"):
        session.edit(status="high", strategy="refresh+erratum")
    assert session.values["status"] == "low"
    session.user("still works", decide=CHOICES)


def test_suffix_after_errata_equals_composing_from_nothing() -> None:
    session = shop(strategy="refresh+erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    session.user("and now", decide=CHOICES)
    session.edit(tier="silver", strategy="suffix")
    session.user("end", decide=CHOICES)
    assert not any(m.erratum_of for m in session.messages)
    fresh = shop(strategy="suffix")
    fresh.edit(status="high", tier="silver")
    for text in ("hello", "and now"):
        fresh.add("user", text)
    fresh.user("end", decide=CHOICES)
    assert run(session).cache.canonical_layout == run(fresh).cache.canonical_layout


def test_several_fields_change_in_one_plan() -> None:
    session = shop(strategy="refresh")
    session.user("hello", decide=CHOICES)
    session.edit({"status": "high"}, tier="silver")
    session.user("and now", decide=CHOICES)
    assert (session.values["status"], session.values["tier"]) == ("high", "silver")
    assert "status: high, tier: silver" in session.render().text


def test_a_field_inside_a_segment_is_edited_after_splicing() -> None:
    text = POLICY + "The price is {{price}} euro. " + POLICY
    for strategy in ("suffix", "refresh", "refresh+erratum"):
        session = Session(
            tiny_model(),
            messages=[
                {"role": "system", "content": "You help.\n"},
                {"role": "system", "segment": "policy"},
            ],
            fields={"price": "ten"},
            segments={"policy": text},
            strategy=strategy,
        )
        session.user("hello", decide=CHOICES)
        session.edit(price="twenty two")
        turn = session.user("and now", decide=CHOICES)
        assert "The price is twenty two euro." in session.render().text
        assert turn.plan.tokens.computed < turn.plan.tokens.total / 2 or strategy == "suffix"
        assert gap_to_mask(session) <= TOLERANCE


def _variants(**options: object) -> Session:
    policy = SegmentText(
        "policy",
        POLICY,
        preamble="status: {{status}}\n",
        variants=(("status", ("low", "high")),),
    )
    return Session(
        tiny_model(),
        messages=[
            {"role": "system", "content": "You help. status: {{status}}\n"},
            {"role": "system", "segment": "policy"},
        ],
        fields={"status": "low"},
        segments={"policy": policy},
        **options,  # type: ignore[arg-type]
    )


def test_an_edit_of_a_field_with_variants_swaps_the_segment() -> None:
    session = _variants()
    assert len(session.model.book) == 2
    session.user("hello", decide=CHOICES)
    alone = session.edit(status="high", strategy="swap")
    assert alone.plan.shape.startswith("R R'")
    turn = session.user("and now", decide=CHOICES)
    assert turn.plan.tokens.computed < 20
    assert "You help. status: low" in session.render().text, "the header keeps the old value"
    assert gap_to_mask(session) <= TOLERANCE


def test_a_value_without_a_variant_takes_suffix_and_is_compiled_for_the_next_time() -> None:
    session = _variants()
    session.user("hello", decide=CHOICES)
    session.edit(status="mid", strategy="swap")
    turn = session.user("and now", decide=CHOICES)
    assert turn.strategy == "suffix"
    assert turn.fallback_reason is not None and "status=mid" in turn.fallback_reason
    session.edit(status="low", strategy="swap")
    session.user("back", decide=CHOICES)
    session.edit(status="mid", strategy="swap")
    assert session.user("again", decide=CHOICES).fallback_reason is None


def test_swap_without_variants_is_refused_with_the_way_out() -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    with pytest.raises(PlanError, match="variants"):
        session.edit(status="high", strategy="swap")


def test_auto_computes_a_segment_behind_a_field_and_says_so() -> None:
    def build(strategy: str) -> Session:
        return Session(
            tiny_model(),
            messages=[
                {"role": "system", "content": "status: {{status}}\n"},
                {"role": "system", "segment": "policy"},
            ],
            fields={"status": "low"},
            segments={"policy": POLICY},
            strategy=strategy,
        )

    exact = build("auto").user("hello", decide=CHOICES)
    assert exact.plan.exact and exact.notices == ("field_before_segment:policy:computed",)
    spliced = build("refresh").user("hello", decide=CHOICES)
    assert not spliced.plan.exact and spliced.notices == ("field_before_segment:policy",)


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_verify_escalates_from_the_cache_before_the_edit(level: str) -> None:
    session = shop(strategy="erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high", verify=level)  # type: ignore[arg-type]
    turn = session.user("and now", decide=CHOICES)
    assert turn.verification is not None and turn.verification.agreed
    assert turn.strategy == turn.verification.rungs[-1]
    if level == "cheap":
        assert turn.verification.checked_share <= 0.25
    if turn.strategy in ("suffix", "reprefill"):
        assert not any(m.erratum_of for m in session.messages)


def test_a_verify_that_never_agrees_ends_in_a_prefill_without_errata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvnotes.session import verify

    monkeypatch.setattr(verify.Checker, "check", lambda *args: (False, 1))
    session = shop(strategy="erratum")
    session.user("hello", decide=CHOICES)
    session.edit(status="high", verify="full")
    turn = session.user("and now", decide=CHOICES)
    assert turn.verification is not None
    assert turn.verification.rungs == ("erratum", "refresh+erratum", "suffix", "reprefill")
    assert turn.plan.shape == "C" and session.exact
    assert not any(m.erratum_of for m in session.messages)


def test_two_forks_that_stream_in_turn_equal_each_alone() -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    base = session._talk.live.cache.checksum()  # type: ignore[union-attr]
    alone = session.fork().generate(SamplingParams(8)).text
    one, two = session.fork(), session.fork()
    streams = [iter(one.stream(SamplingParams(8))), iter(two.stream(SamplingParams(8)))]
    texts = ["", ""]
    for _ in range(8):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == [alone, alone]
    assert session._talk.live.cache.checksum() == base  # type: ignore[union-attr]


def test_a_stream_that_is_dropped_leaves_a_usable_session() -> None:
    session = shop()
    stream = session.stream(SamplingParams(8))
    next(stream)
    stream.close()
    assert session.messages[-1].role == "assistant"
    session.user("go on", decide=CHOICES)
    assert gap_to_mask(session) <= TOLERANCE


def test_a_stop_string_ends_the_text_wherever_tokens_are_cut() -> None:
    whole = shop().user("hello", generate=SamplingParams(20)).text
    assert whole is not None and len(whole) > 6
    for start in range(1, len(whole) - 3, 5):
        stop = whole[start : start + 3]
        turn = shop().user("hello", generate=SamplingParams(20, stop=(stop,)))
        assert turn.text == whole[: whole.index(stop)]
        streamed = shop()
        streamed.add("user", "hello")
        assert "".join(streamed.stream(SamplingParams(20, stop=(stop,)))) == turn.text


def test_a_prompt_that_does_not_fit_is_refused_before_any_work() -> None:
    session = shop()
    with pytest.raises(OutOfCacheError, match="2048"):
        session.user("hello", generate=SamplingParams(4000))
    assert session.num_cached_tokens == 0
    session.user("hello", generate=FEW)


def test_a_failure_while_computing_loses_no_message_and_no_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = shop(strategy="refresh")
    session.user("hello", decide=CHOICES)
    session.edit(status="high")
    engine = type(session.model.engine)

    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_compute", broken)
        with pytest.raises(MemoryError):
            session.user("and now", decide=CHOICES)
    assert session.values["status"] == "high"
    session.user("and now", decide=CHOICES)
    assert "status: high" in session.render().text
    assert gap_to_mask(session) <= TOLERANCE


def test_bad_edits_change_nothing() -> None:
    session = shop()
    session.user("hello", decide=CHOICES)
    before = session.render().token_ids
    with pytest.raises(UnknownFieldError, match="statos"):
        session.edit(statos="high")
    for value in ("two\nlines", "x" * 500, "<|im_end|>", "[STATE UPDATE] no"):
        with pytest.raises(FieldValueError):
            session.edit(status=value)
    with pytest.raises(PlanError, match="refrsh"):
        session.edit(status="high", strategy="refrsh")
    with pytest.raises(PlanError, match="stale"):
        session.edit(status="high", strategy="stale")
    with pytest.raises(TemplateError, match="nowhere"):
        session.delete("nowhere")
    with pytest.raises(PlanError):
        session.decide(["same", "same"])
    with pytest.raises(EngineError):
        SamplingParams(max_new_tokens=0)
    assert session.render().token_ids == before
    session.user("and now", decide=CHOICES)


def test_an_unrelated_session_is_bit_identical_after_edits_and_splices() -> None:
    def plain() -> list[float]:
        turn = Session(
            model, messages=[{"role": "system", "content": "You help. " * 9}], splice="never"
        ).user("hello", decide=CHOICES)
        assert turn.decision is not None
        return list(turn.decision.choices.values())

    model = tiny_model()
    before = plain()
    busy = shop(model, strategy="refresh+erratum")
    busy.user("hello", generate=FEW)
    busy.edit(status="high and more")
    busy.user("and now", generate=FEW)
    assert plain() == before

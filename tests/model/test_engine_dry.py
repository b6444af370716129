"""The dry engine: the plans of a real run, without one forward and without memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from helpers_laws import laws
from helpers_models import engine, tokens
from helpers_session import POLICY, desk, shop, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from kvnotes import SamplingParams, SegmentText, Session
from kvnotes.engine.dry import DryEngine
from kvnotes.engine.generate import Sampler
from kvnotes.errors import (
    EngineError,
    KVNotesError,
    OutOfCacheError,
    SpecMismatchError,
    TemplateError,
    UnknownSegmentError,
)
from kvnotes.plan import Match, Plan, Splice, plan_compose, select_notes
from kvnotes.session import Model, Turn
from kvnotes.session.dry import dry_run, reply_token
from kvnotes.session.verify import Checker

IDS = tokens(24)

EXACTLY_PLANNED = ("suffix", "reprefill", "refresh", "erratum", "refresh+erratum", "auto")
"""Strategies whose plans follow from tokens and lineage; `selective` asks the model."""

VARIANTS = SegmentText(
    "policy", POLICY, preamble="status: {{status}}\n", variants=(("status", ("low", "high")),)
)


@pytest.fixture
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the real engine generate what the dry one does: all that is left are the plans."""
    token = reply_token(tiny_model().tokenizer)
    monkeypatch.setattr(Sampler, "choose", lambda self, logits: token)


def planned(turn: Turn) -> tuple[Any, ...]:
    """All of a turn that a dry run claims to know."""
    plan = turn.plan
    # where what is kept is cut depends on where it stands in memory
    steps = [
        (name, [step.target_stop for step in found][-1])
        for name, found in groupby(plan.steps, plan.step_name)
    ]
    return (
        turn.op,
        turn.strategy,
        turn.evidence,
        turn.fallback_reason,
        turn.notices,
        turn.template_rewrote,
        plan.shape,
        plan.tokens,
        plan.exact,
        steps,
        plan.digest(""),
        len(turn.token_ids),
    )


def both(
    build: Callable[[Model], Session], *operations: Callable[[Session], Turn]
) -> tuple[list[Any], list[Any]]:
    """What operations plan on a dry model, and on the model itself."""
    model = tiny_model()
    results: list[list[Any]] = []
    for target in (dry_run(model), model):
        session = build(target)
        said: list[Any] = []
        for operation in operations:
            try:
                said.append(planned(operation(session)))
            except KVNotesError as error:
                said.append((type(error), error.message))
        results.append(said)
    return results[0], results[1]


def ask(session: Session) -> Turn:
    return session.user("Is the price low?", decide=["yes", "no"])


def say(session: Session) -> Turn:
    return session.user("Go on.", generate=SamplingParams(max_new_tokens=4))


def variants(model: Model) -> Session:
    return Session(
        model,
        messages=[
            {"role": "system", "content": "You help. status: {{status}}\n"},
            {"role": "system", "segment": "policy"},
        ],
        fields={"status": "low"},
        segments={"policy": VARIANTS},
    )


# -- the plans of a real run -----------------------------------------------------------------


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("strategy", EXACTLY_PLANNED)
@pytest.mark.parametrize("splice", ["auto", "always", "never"])
def test_a_dry_run_plans_every_turn_as_a_real_one(strategy: str, splice: str) -> None:
    dry, real = both(
        lambda model: shop(model, strategy=strategy, splice=splice),
        ask,
        lambda s: s.edit(status="high"),
        ask,
        say,
        lambda s: s.edit(status="a much longer value", tier="iron"),
        lambda s: s.add("tool", "lookup: 7", id="lookup"),
        say,
        lambda s: s.delete("lookup"),
        ask,
        lambda s: s.consolidate(),
    )
    assert dry == real
    assert len({entry[6] for entry in dry}) > 1, "plans of more than one shape"


@pytest.mark.usefixtures("certain")
def test_errata_that_are_appended_are_planned_as_they_are() -> None:
    edits = [
        lambda s, value=value: (s.edit(status=value), ask(s))[1]
        for value in ("b", "c", "d", "e", "f")
    ]
    dry, real = both(lambda m: shop(m, strategy="erratum", erratum_mode="append"), ask, *edits)
    assert dry == real
    assert any("consolidated" in str(entry[3]) for entry in dry)


@pytest.mark.usefixtures("certain")
def test_swaps_of_variants_are_planned_as_they_are() -> None:
    dry, real = both(
        variants,
        ask,
        lambda s: s.edit(status="high", strategy="swap"),
        ask,
        lambda s: s.edit(status="mid", strategy="swap"),
        ask,
        lambda s: s.edit(status="low", strategy="swap"),
        say,
    )
    assert dry == real
    assert dry[1][6] == "R R' R C"


@pytest.mark.usefixtures("certain")
def test_tools_that_come_and_go_are_planned_as_they_are() -> None:
    dry, real = both(
        desk,
        ask,
        lambda s: s.retract_tool("get_price"),
        ask,
        lambda s: s.reorder_tools(["send_mail", "get_order"]),
        say,
    )
    assert dry == real


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_a_verify_that_agrees_takes_the_rung_that_a_dry_run_shows(
    level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checker, "_decision", lambda self, execution: 0)
    dry, real = both(shop, ask, lambda s: s.edit(status="high", verify=level), ask)
    assert dry == real


def test_a_check_that_cannot_run_is_refused_in_a_dry_run_too() -> None:
    # nothing of the budget is left for a second estimate, whatever the model says
    dry, real = both(
        lambda m: Session(
            m,
            messages=[{"role": "system", "content": "x: {{x}}"}],
            fields={"x": "1"},
        ),
        ask,
        lambda s: s.edit(x="2", verify="cheap"),
        ask,
    )
    assert dry[-1] == real[-1]
    assert "refused refresh+erratum" in dry[-1][3]


STEPS = st.one_of(
    st.tuples(
        st.just("edit"),
        st.sampled_from(["status", "tier"]),
        st.sampled_from(["low", "high", "very high, and rising", "", "12"]),
        st.sampled_from(EXACTLY_PLANNED),
    ),
    st.tuples(st.just("ask")),
    st.tuples(st.just("say")),
    st.tuples(st.just("add"), st.sampled_from(["tool", "system", "user", "assistant"])),
    st.tuples(st.just("delete"), st.integers(0, 6), st.sampled_from(EXACTLY_PLANNED)),
    st.tuples(st.just("move"), st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("replace"), st.integers(0, 6)),
)


def operation(step: tuple[Any, ...]) -> Callable[[Session], Turn]:
    """A step as a call; messages are named by their place."""

    def call(session: Session) -> Turn:
        def name(place: int) -> str:
            ids = [message.id for message in session.messages if not message.is_erratum]
            return ids[place % len(ids)]

        kind, *values = step
        if kind == "edit":
            return session.edit({values[0]: values[1]}, strategy=values[2])
        if kind == "add":
            return session.add(values[0], "A message comes.")
        if kind == "delete":
            return session.delete(name(values[0]), strategy=values[1])
        if kind == "move":
            return session.move(name(values[0]), before=name(values[1]))
        if kind == "replace":
            return session.replace(name(values[0]), "Another text.")
        return ask(session) if kind == "ask" else say(session)

    return call


@pytest.mark.usefixtures("certain")
@laws(25)
@given(steps=st.lists(STEPS, min_size=2, max_size=9))
def test_any_conversation_is_planned_as_it_runs(steps: list[tuple[Any, ...]]) -> None:
    operations = [ask, *map(operation, steps), ask]
    dry, real = both(shop, *operations)
    assert dry == real


def test_selective_recomputes_as_many_notes_as_a_real_run_at_other_places() -> None:
    dry, real = both(
        lambda m: shop(m, strategy="selective"), say, lambda s: s.edit(status="high"), ask
    )
    assert [entry[7] for entry in dry[:2]] == [entry[7] for entry in real[:2]]
    assert dry[2][7].computed == real[2][7].computed
    assert dry[2][9] != real[2][9]


# -- nothing is computed -----------------------------------------------------------------------


def test_a_dry_run_runs_no_forward_and_no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def fails(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(model.engine.model, "forward", fails)  # type: ignore[attr-defined]
    monkeypatch.setattr("kvnotes.engine.execute.turn_keys", fails)
    with pytest.raises(AssertionError, match="something was computed"):
        shop(model)
    session = shop(dry_run(model), strategy="selective")
    say(session)
    session.edit(status="high", verify="full")
    ask(session)
    assert session.num_cached_tokens > 0


def test_a_dry_cache_has_shapes_and_no_memory() -> None:
    dry = DryEngine(engine())
    cache = dry.prefill(IDS).cache
    real = engine().prefill(IDS).cache
    for ours, theirs in zip(cache.buffer.keys, real.buffer.keys, strict=True):
        assert ours.is_meta and ours.dtype == theirs.dtype
        assert ours.shape[::2] == theirs.shape[::2]
    segment = dry.compile(IDS[:5], IDS[5:9])
    assert segment.nbytes == engine().compile(IDS[:5], IDS[5:9]).nbytes
    assert all(layer.is_meta for layer in (*segment.keys, *segment.values))


def test_a_dry_run_leaves_the_model_alone() -> None:
    model = tiny_model()
    session = shop(dry_run(model))
    ask(session)
    assert len(model.book) == 0 and model.store.counters.compiled == 0
    assert list(model.book.known()) == []


# -- what is refused, as the engine refuses it -------------------------------------------------


def refused(call: Callable[[Any], object]) -> list[tuple[type, str]]:
    """Error and message of a call, on the dry engine and on the engine."""
    said = []
    for target in (DryEngine(engine()), engine()):
        with pytest.raises(KVNotesError) as caught:
            call(target)
        said.append((type(caught.value), caught.value.message))
    return said


LONG = tuple(range(80)) * 4

REFUSED: dict[str, tuple[Callable[[Any], object], type[KVNotesError]]] = {
    "a long prompt": (lambda e: e.prefill(LONG), OutOfCacheError),
    "a long segment": (lambda e: e.compile(LONG), OutOfCacheError),
    "an empty prompt": (lambda e: e.prefill(()), EngineError),
    "an empty segment": (lambda e: e.compile(()), EngineError),
    "a reply too long": (
        lambda e: e.generate(e.prefill(IDS), SamplingParams(max_new_tokens=999)),
        OutOfCacheError,
    ),
    "a choice too long": (lambda e: e.score(e.prefill(IDS), [LONG]), OutOfCacheError),
    "no choice": (lambda e: e.score(e.prefill(IDS), []), EngineError),
    "a segment nobody gave": (
        lambda e: e.execute(
            plan_compose(IDS, [Splice("s", engine().compile(IDS[6:16]).run, 0, 10, 6)])
        ),
        UnknownSegmentError,
    ),
    "another model's segment": (
        lambda e: e.execute(Plan.prefill(IDS), segments=[engine("qwen2-bias").compile(IDS[6:16])]),
        SpecMismatchError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_engine_refuses_what_the_engine_refuses(name: str) -> None:
    call, kind = REFUSED[name]
    dry, real = refused(call)
    assert dry == real
    assert dry[0] is kind


def test_a_dry_engine_has_no_reference_and_stands_for_tokens_of_the_model() -> None:
    import torch

    with pytest.raises(EngineError, match="no reference"):
        DryEngine(engine()).masked_forward(IDS, torch.arange(24), torch.ones(24, 24) > 0, [23])
    with pytest.raises(EngineError, match="token 89 cannot stand for a reply"):
        DryEngine(engine(), 89)


# -- placeholders ------------------------------------------------------------------------------


@laws(60)
@given(size=st.integers(2, 600), share=st.floats(0.02, 1))
def test_notes_that_stand_for_the_unknown_ones_are_spread_evenly(size: int, share: float) -> None:
    dry = DryEngine(engine())
    cache = dry.prefill(IDS).cache
    scores = dry.note_scores(cache, IDS, [Match(0, 0, 5), Match(7, 7, size)])
    assert [position for position, _ in scores] == list(range(7, 7 + size))
    count = max(1, round(share * size))
    chosen = select_notes([s for _, s in scores], [p for p, _ in scores], count)
    assert len(chosen) == count
    gaps = [b - a for a, b in zip((6, *chosen), (*chosen, 7 + size), strict=True)]
    assert max(gaps) <= 2.62 * size / count + 2  # the golden ratio squared, rounded up


def test_a_reply_is_as_long_as_it_may_be_and_shows_no_stop_string() -> None:
    model = tiny_model()
    stop = ("a", "the", "xx", "\n")
    session = shop(dry_run(model, stop))
    turn = session.user("Hi", generate=SamplingParams(max_new_tokens=7, stop=stop))
    assert len(turn.token_ids) == 7
    assert turn.text and not any(word in turn.text for word in stop)


def test_a_reply_needs_a_token_beside_the_stop_strings() -> None:
    tokenizer = tiny_model().tokenizer
    with pytest.raises(TemplateError, match="can stand for a reply"):
        reply_token(tokenizer, ("a", "e", "x", "I", "0", "-"))


def test_compiling_has_a_predicted_cost_until_it_is_done() -> None:
    model = tiny_model()
    first = dry_run(model)
    shop(first)
    (wanted,) = first.book.wanted
    assert (wanted.name, wanted.compiled) == ("policy", False)
    ids = model.tokenizer.encode(POLICY)
    assert wanted.predicted_ms == model.engine.cost.predict_ms(
        Plan.prefill((0,) * wanted.num_tokens)
    )
    assert wanted.num_tokens > len(ids)
    shop(model)
    again = dry_run(model)
    session = shop(again)
    (found,) = again.book.wanted
    assert (found.compiled, found.predicted_ms) == (True, 0.0)
    assert ask(session).plan.shape == "C R' C"


def test_every_variant_is_wanted_with_its_values() -> None:
    dry = dry_run(tiny_model())
    variants(dry)
    assert [item.variant for item in dry.book.wanted] == [
        (("status", "low"),),
        (("status", "high"),),
    ]
    assert all(item.num_preamble_tokens for item in dry.book.wanted)

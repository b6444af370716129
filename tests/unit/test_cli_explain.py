"""`kvnotes explain`: what a record says of a plan, and how it is shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers_scenario import check
from helpers_session import POLICY, tiny_model
from rich.console import Console

from kvnotes.cli.explain import Explained, Explainer
from kvnotes.cli.explain_records import CostRecord, ExplainRecord, SegmentPlan, TurnPlan
from kvnotes.cli.explain_table import MAX_STEPS, ExplainTable
from kvnotes.cli.run import new_session, run_turn
from kvnotes.errors import FieldValueError, KVNotesError, OutOfCacheError

DOCS = Path(__file__).resolve().parents[2] / "docs"

SHOP = f"""\
strategy: refresh+erratum
fields: {{status: low, tier: gold}}
segments: {{policy: {{text: "{POLICY}"}}}}
messages:
  - {{role: system, content: "You help.\\n"}}
  - {{role: system, segment: policy}}
  - {{role: system, content: "status: {{{{status}}}}, tier: {{{{tier}}}}\\n", id: order}}
turns:
  - {{user: "Is it low?", decide: ["yes", "no"], id: ask}}
  - {{edit: {{status: high}}}}
  - {{user: "And now?", generate: {{max_new_tokens: 5, stop: ["a", "the"]}}}}
  - {{delete: ask}}
"""

VARIANTS = f"""\
fields: {{status: low}}
segments:
  policy:
    text: "{POLICY}"
    preamble: "status: {{{{status}}}}\\n"
    variants: {{status: [low, high]}}
messages:
  - {{role: system, content: "You help. status: {{{{status}}}}\\n"}}
  - {{role: system, segment: policy}}
turns:
  - {{decide: ["yes", "no"]}}
  - {{edit: {{status: mid}}, strategy: swap}}
  - {{decide: ["yes", "no"]}}
"""


def explained(text: str, **overrides: str) -> list[TurnPlan]:
    """The plans of a scenario's turns, on a tiny model."""
    return [item.record for item in explainer(text, **overrides)]


def explainer(text: str, **overrides: str) -> Explainer:
    prepared = check(text)
    scenario = prepared.scenario.model_copy(update=overrides)
    return Explainer(replace(prepared, scenario=scenario), tiny_model())


def record_of(text: str) -> ExplainRecord:
    made = explainer(text)
    turns = [item.record for item in made]
    return ExplainRecord(
        model="tiny",
        fingerprint="f" * 64,
        dtype="float32",
        versions={"kvnotes": "1"},
        threads=1,
        cost=made.cost,
        segments=made.segments,
        turns=turns,
        totals=made.totals,
    )


def shown(text: str, width: int) -> str:
    file = io.StringIO()
    table = ExplainTable(Console(file=file, width=width, highlight=False))
    made = explainer(text)
    table.start(
        model="tiny",
        fingerprint="f" * 64,
        dtype="float32",
        threads=1,
        versions={"kvnotes": "1"},
        cost=made.cost,
        segments=made.segments,
    )
    for item in made:
        table.add(item)
    table.finish(made.totals)
    return file.getvalue()


def flat(text: str) -> str:
    """Output with its line breaks taken out, to look for phrases."""
    return " ".join(text.split())


# -- records -----------------------------------------------------------------------------------


def test_turns_have_the_plans_that_a_session_makes() -> None:
    prepared, model = check(SHOP), tiny_model()
    session = new_session(prepared, model)
    real = [
        run_turn(session, index, spec, compare=False)
        for index, spec in enumerate(prepared.scenario.turns[:3])
    ]
    for plan, turn in zip(explained(SHOP), real, strict=False):
        tokens = turn.plan.tokens
        assert (plan.plan, plan.strategy, plan.exact) == (
            turn.plan.shape,
            turn.strategy,
            turn.plan.exact,
        )
        assert plan.tokens.model_dump() == {
            "total": tokens.total,
            "reused": tokens.reused,
            "moved": tokens.moved,
            "computed": tokens.computed,
        }
        assert plan.evidence == turn.evidence.detail
        assert plan.waits == (turn.ttft_ms is None)


def test_steps_cover_the_prompt_once_and_differ_from_their_neighbours() -> None:
    for turn in explained(SHOP):
        position = 0
        for step in turn.steps:
            assert step.start == position < step.stop
            position = step.stop
        assert position == turn.tokens.total
        kinds = [(step.step, step.source) for step in turn.steps]
        assert all(a != b for a, b in pairwise(kinds))
        computed = sum(s.stop - s.start for s in turn.steps if s.step == "C")
        assert computed == turn.tokens.computed


def test_steps_name_the_messages_segments_and_fields_they_cover() -> None:
    first, edit, _, delete = explained(SHOP)
    head, policy, rest = first.steps
    assert [covered.name for covered in head.covers] == ["m0", "m1"]
    assert (head.covers[0].whole, head.covers[1].whole) == (True, False)
    assert (head.covers[0].segments, head.covers[1].segments) == ([], ["policy"])
    assert (policy.source, policy.covers[0].segments) == ("segment:policy", ["policy"])
    order, asked, generation = rest.covers[-3:]
    assert (order.name, order.fields) == ("order", {"status": "low", "tier": "gold"})
    assert (asked.name, generation.name) == ("ask", "")
    changed = [step for step in edit.steps if step.step == "C"]
    assert changed[0].covers[0].fields == {"status": "high"}
    assert changed[1].covers[0].name == "erratum:status:0"
    assert {step.source for step in edit.steps if step.step == "R"} == {"cache"}
    assert any(step.step == "R'" for step in delete.steps)


def test_seam_tokens_are_named_where_a_segment_is_spliced_and_nowhere_else() -> None:
    first, *later = explained(SHOP)
    (seam,) = first.seams
    policy = first.steps[1]
    assert (seam.segment, seam.stop - seam.start, seam.stop) == ("policy", 1, policy.start)
    assert not any(turn.seams for turn in later)
    wider = explained(SHOP.replace("strategy:", "num_seam_tokens: 4\nstrategy:"))[0].seams
    assert [(s.start, s.stop - s.start) for s in wider] == [(seam.start, 4)]
    none = explained(SHOP.replace("strategy:", "num_seam_tokens: 0\nstrategy:"))[0].seams
    assert none == []


def test_changed_value_at_the_start_of_a_segment_is_no_seam() -> None:
    text = SHOP.replace('{text: "', '{text: "{{status}} is the state. ').replace(
        'content: "You help.\\n"', 'content: "{{segment:policy}}"'
    )
    text = text.replace("  - {role: system, segment: policy}\n", "")
    text = text.replace("strategy: refresh+erratum", "strategy: refresh\nsplice: always")
    first, edit, *_ = explained(text.replace("status: high", "status: very high indeed"))
    assert [seam.segment for seam in first.seams] == ["policy"]
    assert "R' C" in edit.plan and edit.seams == []


def test_predicted_times_are_those_of_the_cost_model_and_add_up() -> None:
    made = explainer(SHOP)
    turns = [item.record for item in made]
    for turn in turns:
        steps = sum(step.predicted_ms for step in turn.steps)
        assert turn.predicted_ms == pytest.approx(made.cost.ms_per_pass + steps, abs=0.02)
        assert turn.full_predicted_ms > 0
        assert turn.speedup == pytest.approx(turn.full_predicted_ms / turn.predicted_ms, rel=0.05)
    ran = [turn for turn in turns if not turn.waits]
    assert made.totals.answers == len(ran) == 2
    assert made.totals.predicted_ms == pytest.approx(sum(t.predicted_ms for t in ran), abs=0.02)
    assert made.totals.compile_predicted_ms == made.segments[0].predicted_ms > 0


def test_reply_is_as_long_as_the_turn_allows_also_beside_stop_strings() -> None:
    assert [turn.assumed_reply_tokens for turn in explained(SHOP)] == [None, None, 5, None]


def test_segments_that_are_compiled_late_are_named_at_their_turn() -> None:
    made = explainer(VARIANTS)
    turns = [item.record for item in made]
    assert [s.variant for s in made.segments] == [{"status": "low"}, {"status": "high"}]
    assert [len(turn.compiles) for turn in turns] == [0, 0, 1]
    late = turns[2].compiles[0]
    assert late.variant == {"status": "mid"} and late.predicted_ms > 0
    assert turns[2].fallback_reason and "no variant status=mid" in turns[2].fallback_reason
    whole = made.totals.compile_predicted_ms
    assert whole == pytest.approx(sum(s.predicted_ms for s in [*made.segments, late]), abs=0.02)


def test_verify_shows_the_first_rung_and_what_else_may_run() -> None:
    text = SHOP.replace("status: high}}", "status: high}, verify: full}")
    plan = explained(text)[2]
    assert plan.strategy == "refresh+erratum"
    assert plan.verify is not None
    assert (plan.verify.level, plan.verify.needed, plan.verify.refused) == ("full", True, [])
    assert plan.verify.may_follow == ["suffix", "reprefill"]
    assert plan.verify.check_predicted_ms and plan.verify.check_tokens > 0
    exact = text.replace("strategy: refresh+erratum\n", "splice: never\nstrategy: suffix\n")
    done = explained(exact)[2].verify
    assert done is not None
    assert (done.needed, done.may_follow, done.check_tokens) == (False, [], 0)


def test_check_that_fits_no_budget_is_refused_for_certain() -> None:
    text = """\
fields: {x: a}
messages: [{role: system, content: "x: {{x}}"}]
turns: [{decide: ["yes", "no"]}, {edit: {x: b}, verify: cheap}, {decide: ["yes", "no"]}]
"""
    plan = explained(text)[2].verify
    assert plan is not None
    assert plan.refused == ["refresh+erratum"]
    assert not plan.needed and plan.may_follow == []


def test_selective_says_what_scoring_takes() -> None:
    turns = explained(SHOP, strategy="selective")
    assert [turn.scored_tokens > 0 for turn in turns] == [False, True, True, True]
    assert turns[0].strategy == "selective", "nothing is changed there, so nothing is scored"
    plan = turns[2]
    first = next(step for step in plan.steps if step.step == "C")
    assert plan.scored_tokens == plan.tokens.total - first.start
    assert 0 < plan.scoring_predicted_ms < plan.full_predicted_ms


def test_fault_is_found_at_its_turn_before_anything_runs() -> None:
    control = SHOP.replace("status: high}", 'status: "<|im_end|>"}')
    with pytest.raises(FieldValueError, match=r"s\.yaml:10: turn 2: "):
        explained(control)
    with pytest.raises(OutOfCacheError, match=r"s\.yaml:11: turn 3: "):
        explained(SHOP.replace("max_new_tokens: 5", "max_new_tokens: 5000"))


def test_stop_strings_that_leave_no_token_for_a_reply_are_refused_with_the_way_out() -> None:
    stops = ", ".join(f'"{word}"' for word in ("a", "e", "x", "I", "0", "-"))
    with pytest.raises(KVNotesError, match="can stand for a reply") as caught:
        explained(SHOP.replace('["a", "the"]', f"[{stops}]"))
    assert caught.value.hint


def test_json_keeps_the_documented_contract() -> None:
    schema = json.loads((DOCS / "explain.schema.json").read_text(encoding="utf-8"))
    for text in (SHOP, VARIANTS):
        record = json.loads(record_of(text).to_json())
        jsonschema.Draft202012Validator(schema).validate(record)


# -- the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120])
def test_text_fits_its_width_and_says_what_matters(width: int) -> None:
    text = shown(SHOP, width)
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())
    said = flat(text)
    for phrase in (
        "dry run: the model is loaded, and nothing of the scenario is computed",
        "before the first turn: compile segment policy, ",
        "edit status = high (waits)",
        "seam: 1 token at ",
        "evidence (user): strategy 'refresh+erratum' was asked for",
        "reply assumed 5 tokens",
        "erratum:status:0 (status=high)",
        "2 answers: computes ",
        "beside that: compiling ",
    ):
        assert phrase in said, phrase
    assert ("speedup" in text) == (width >= 110)


def test_placeholders_of_scores_and_replies_are_never_shown() -> None:
    text = shown(SHOP, 100)
    for word in ("decision", "chosen", "reply:", "yes 0.00", "agreed"):
        assert word not in text


def test_notes_are_explained() -> None:
    before = SHOP.replace('content: "You help.\\n"', 'content: "You help. {{status}}\\n"')
    said = flat(shown(before.replace("strategy: refresh+erratum\n", ""), 120))
    assert (
        "note: field_before_segment:policy:computed (a field stands before it: computed, so that "
        "it holds notes about the field)"
    ) in said
    spliced = flat(shown("splice: always\n" + before, 120))
    assert "note: field_before_segment:policy (a field stands before it, so its tokens" in spliced
    short = SHOP.replace(POLICY, "Buy low.")
    assert "note: below_break_even:policy:computed (too short for a splice to pay)" in flat(
        shown(short, 120)
    )


def test_verify_and_selective_are_said_in_words() -> None:
    text = SHOP.replace("status: high}}", "status: high}, verify: full}")
    said = flat(shown(text, 120))
    assert "verify full: refresh+erratum is compared with a clean prefill (" in said
    assert "; if refused, then suffix, reprefill" in said
    cheap = flat(shown(text.replace("verify: full", "verify: cheap"), 120))
    assert "verify cheap: refresh+erratum is checked by computing at most " in cheap
    selective = flat(shown(SHOP.replace("refresh+erratum", "selective"), 120))
    assert "which of them it recomputes is not known before" in selective


def many_steps(count: int) -> Any:
    """A turn whose plan has `count` steps."""
    base = explained(SHOP)[0]
    step = base.steps[0].model_copy(update={"covers": []})
    steps = [step.model_copy(update={"start": i, "stop": i + 1}) for i in range(count)]
    return base.model_copy(update={"steps": steps, "seams": []})


@pytest.mark.parametrize("count", [MAX_STEPS, MAX_STEPS + 1, 300])
def test_long_plan_loses_its_middle_and_says_how_much(count: int) -> None:
    file = io.StringIO()
    table = ExplainTable(Console(file=file, width=100, highlight=False))
    table.add(Explained(many_steps(count), "user: a"))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("    C  [")]
    if count <= MAX_STEPS:
        assert len(lines) == count
        assert "more steps" not in file.getvalue()
    else:
        assert len(lines) == MAX_STEPS - 1
        assert f"... {count - len(lines)} more steps" in file.getvalue()
        assert lines[-1].split()[1:3] == [f"[{count - 1},", f"{count})"]


def test_scenario_without_answers_has_no_totals() -> None:
    text = SHOP[: SHOP.index("turns:")] + "turns: [{edit: {status: high}}]\n"
    assert "nothing would be computed" in shown(text, 100)


def test_segment_that_is_there_costs_nothing_and_is_said_to_be() -> None:
    prepared, model = check(SHOP), tiny_model()
    new_session(prepared, model)
    made = Explainer(prepared, model)
    assert made.segments == [
        SegmentPlan(
            name="policy",
            variant={},
            tokens=made.segments[0].tokens,
            preamble_tokens=0,
            compiled=True,
            predicted_ms=0.0,
        )
    ]
    assert isinstance(made.cost, CostRecord)


def test_control_characters_are_shown_and_not_sent() -> None:
    text = shown(SHOP.replace('user: "And now?"', 'user: "\\x1b[2J And now?"'), 100)
    assert "\x1b" not in text
    assert r"user: \x1b[2J And now?" in text

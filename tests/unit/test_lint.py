"""The lint of one prompt: what it finds, where, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvnotes.bench.lint_items import load_items, score
from kvnotes.lint import (
    CHANGES,
    KINDS,
    OffsetCounter,
    Part,
    advice_for,
    best_saving,
    lint_parts,
    lint_text,
    num_tokens,
    parse_request,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"

LEAST = 0.95
"""Precision and recall that each half of the labelled lines must reach."""

HALVES = ("dev", "heldout")


def found(text: str) -> list[tuple[str, str]]:
    return [(finding.kind, finding.text) for finding in lint_text(text)]


def characters(text: str, start: int) -> int:
    """A tokenizer whose tokens are characters."""
    return len(text) - start


# -- labelled lines ----------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_precision_and_recall_are_high_on_labelled_lines(half: str) -> None:
    scores = score(load_items(half))
    for name in ("line_precision", "line_recall", "value_precision", "value_recall", "kind"):
        assert getattr(scores, name).value >= LEAST, (name, getattr(scores, name))


@pytest.mark.parametrize("half", HALVES)
def test_about_half_of_many_labelled_lines_are_decoys(half: str) -> None:
    items = load_items(half)
    assert len(items) >= 120
    assert 0.4 <= sum(not item.values for item in items) / len(items) <= 0.6


@pytest.mark.parametrize("half", HALVES)
def test_every_kind_is_among_the_labelled_values(half: str) -> None:
    assert {value.kind for item in load_items(half) for value in item.values} == set(KINDS)


def test_no_line_is_in_both_halves() -> None:
    dev, heldout = ({item.text for item in load_items(half)} for half in HALVES)
    assert not dev & heldout


def test_score_counts_misses_and_false_findings() -> None:
    items = load_items("dev")
    decoy = next(item for item in items if not item.values)
    value = next(item for item in items if len(item.values) == 1)
    swapped = [
        type(decoy)(decoy.text, "", value.values[:1]),  # a label where nothing is found
        type(value)(value.text, "", ()),  # a finding where no label is
        value,
    ]
    scores = score(swapped)
    assert (scores.line_precision.num_hits, scores.line_precision.num_cases) == (1, 2)
    assert (scores.line_recall.num_hits, scores.line_recall.num_cases) == (1, 2)
    assert (scores.value_precision.value, scores.value_recall.value) == (0.5, 0.5)
    assert len(scores.faults) == 2
    low, high = scores.value_recall.interval
    assert 0.05 < low < 0.1 and 0.9 < high < 0.95  # Wilson, 1 of 2


# -- what is found -----------------------------------------------------------------------------


def test_reported_cases_are_found_with_offsets_and_cost() -> None:
    text = (
        "x-billing: key=cli; checksum=9f31c2ab;\n"
        "Now: 2024-05-14T09:12:44Z\n"
        "request 6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e5\n"
        "epoch: 1715677964\n"
        "Today is 14 May 2024.\n"
        "Orders placed before 2024-01-31 are refunded.\n"
    )
    findings = lint_text(text, count_tokens=characters)
    assert [(f.kind, f.text, f.line) for f in findings] == [
        ("digest", "9f31c2ab", 1),
        ("datetime", "2024-05-14T09:12:44Z", 2),
        ("uuid", "6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e5", 3),
        ("epoch", "1715677964", 4),
        ("date", "14 May 2024", 5),
    ]
    for finding in findings:
        assert text[finding.start : finding.stop] == finding.text
        assert finding.num_invalidated_tokens == len(text) - text.index(finding.text)
        assert finding.share == pytest.approx(1 - text.index(finding.text) / len(text))
        assert text.splitlines()[finding.line - 1][finding.column - 1 :].startswith(finding.text)


@pytest.mark.parametrize(
    "text",
    [
        "The nearest cue decides: today we refund orders placed before 2024-01-31.",
        "If the current date is 2024-01-31 or later, refuse.",
        "Current opening hours: 9:00-17:00",
        "Currently the shop opens at 9:00.",
        "now = datetime(2024, 5, 14, 9, 12, 44)",
        "Midnight is 2024-05-14T00:00:00Z.",
        "session ids look like 6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e5",
        "{{clock}} and {{today}} and \\{{ are slots",
        "",
    ],
)
def test_what_belongs_to_the_text_itself_is_not_found(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("quiet", "kind"),
    [
        ("```python\n{}\n```\n", "fence of a program"),
        ("<example>\n{}\n</example>\n", "tag"),
        ("## Examples\n{}\n## Rules\n", "section"),
    ],
)
def test_examples_and_programs_are_quiet_until_they_end(quiet: str, kind: str) -> None:
    line = "Current time: 14:32:07"
    text = quiet.format(line) + line
    assert [finding.start for finding in lint_text(text)] == [text.rindex("14:32:07")], kind


def test_fence_of_data_is_searched() -> None:
    assert found('```json\n{"now": "2024-05-14T09:12:44Z"}\n```') != []


def test_heading_and_line_with_a_colon_lead_the_next_line() -> None:
    assert found("## Current time\n\n14:32") == [("time", "14:32")]
    assert found("Today's date:\n2024-05-14") == [("date", "2024-05-14")]
    assert found("The offer ends:\n2024-05-14 14:32") == []


def test_longer_of_two_values_that_overlap_is_kept() -> None:
    assert found("saved to /tmp/6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e5/out") == [
        ("path", "/tmp/6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e5/out")
    ]


def test_kind_that_is_ignored_is_not_reported() -> None:
    text = "Today is 2024-05-14, the time is 14:32."
    assert [f.kind for f in lint_text(text, ignore={"date"})] == ["time"]


def test_real_policy_has_no_volatile_values(shared_data: Path) -> None:
    text = (shared_data / "tau2_retail_policy.md").read_text(encoding="utf-8")
    assert len(text) > 6000
    assert found(text) == []


def test_real_wishes_of_customers_have_no_volatile_values(shared_data: Path) -> None:
    tasks = json.loads((shared_data / "tau2_retail_tasks.json").read_text(encoding="utf-8"))
    wishes = [task["user_scenario"]["instructions"] for task in tasks]
    text = "\n".join(f"{wish['reason_for_call']}\n{wish['known_info']}" for wish in wishes)
    assert len(text) > 40_000
    assert found(text) == []


def test_clock_before_the_real_policy_costs_all_of_it(shared_data: Path) -> None:
    policy = (shared_data / "tau2_retail_policy.md").read_text(encoding="utf-8")
    (finding,) = lint_text(f"The time is 14:32.\n{policy}")
    assert finding.text == "14:32"
    assert finding.share > 0.99


# -- what it costs -----------------------------------------------------------------------------


def test_tokens_of_later_parts_are_invalidated_too() -> None:
    parts = (Part("no value", "a"), Part("clock: 14:32", "b"), Part("x" * 100, "c"))
    (finding,) = lint_parts(parts, count_tokens=characters)
    assert (finding.part, finding.num_invalidated_tokens) == ("b", 5 + 100)
    assert finding.share == pytest.approx(105 / 120)


def test_value_inside_of_a_token_invalidates_that_token() -> None:
    stops = [4, 9, 12, 20]
    counter = OffsetCounter(lambda text: stops)
    assert [counter("", start) for start in (0, 3, 4, 10, 12, 19)] == [4, 4, 3, 2, 1, 1]


def test_estimate_counts_four_bytes_to_a_token_at_every_place() -> None:
    text = "Grüße, 世界 14:32! " * 300
    (total,) = [-(-len(text.encode()) // 4)]
    assert num_tokens(text) == total
    finding = lint_text(f"{text}\nclock: 14:32")[-1]
    assert finding.num_invalidated_tokens == 2


def test_best_change_saves_what_no_other_value_invalidates() -> None:
    text = "clock: 14:32 and again clock: 14:32\nturn: 17\n"
    saving = best_saving(lint_text(text, count_tokens=characters))
    assert saving is not None
    assert saving.finding.text == "14:32"
    assert saving.num_tokens == text.index("17") - text.index("14:32")
    assert best_saving(()) is None


# -- requests ----------------------------------------------------------------------------------


def test_history_of_a_request_is_counted_and_not_searched() -> None:
    line = "Current time: 14:32"
    request = parse_request(
        {
            "tools": [{"function": {"name": "a", "description": line}}],
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": line}]},
                {"role": "user", "content": line},
                {"role": "assistant", "content": line, "tool_calls": [{"id": "call_1"}]},
                {"role": "tool", "content": line},
                {"role": "user", "content": line},
            ],
        }
    )
    findings = lint_parts(request.parts, count_tokens=characters)
    assert [finding.part for finding in findings] == [
        "tools[0] a",
        "messages[0] system",
        "messages[1] user",
    ]
    assert findings[-1].num_invalidated_tokens >= 4 * len(line) - len("Current time: ")


def test_every_kind_has_advice_and_a_line_in_the_documents() -> None:
    page = (DOCS / "lint.md").read_text(encoding="utf-8")
    for kind in (*KINDS, *CHANGES):
        assert len(advice_for(kind)) > 10
        assert f"`{kind}`" in page

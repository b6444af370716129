"""Laws of the lint: places point at the text, logs agree with common prefixes, time is linear."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from helpers_laws import laws
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.bench.lint_items import load_items
from kvnotes.lint import lint_requests, lint_text
from kvnotes.lint.hunks import hunks
from kvnotes.lint.text import RULES

FACTOR = 8
"""How much longer the second text is."""

MAX_RATIO = 3 * FACTOR
"""Of the times of both texts; a quadratic search takes FACTOR**2 = 64 times as long."""

PIECES = sorted({item.text for half in ("dev", "heldout") for item in load_items(half)})
MARKS = [" ", "\n", ": ", "=", "```", "```python\n", "## Example\n", "<example>\n", "{{a}}", "["]

texts = st.lists(
    st.one_of(st.sampled_from(PIECES), st.sampled_from(MARKS), st.text(max_size=12)), max_size=12
).map("".join)
anything = st.text(st.characters(), max_size=200)  # surrogates too


def characters(text: str, start: int) -> int:
    return len(text) - start


# -- one text ----------------------------------------------------------------------------------


@laws(200)
@given(st.one_of(texts, anything))
def test_places_point_at_the_text_and_values_do_not_overlap(text: str) -> None:
    lines = text.split("\n")
    done = 0
    for finding in lint_text(text, count_tokens=characters):
        assert done <= finding.start < finding.stop <= len(text)
        assert text[finding.start : finding.stop] == finding.text
        assert lines[finding.line - 1][finding.column - 1 :].startswith(finding.text.split("\n")[0])
        assert finding.num_invalidated_tokens == len(text) - finding.start
        done = finding.stop


@laws(100)
@given(texts)
def test_estimate_never_grows_towards_the_end(text: str) -> None:
    tokens = [finding.num_invalidated_tokens for finding in lint_text(text)]
    assert tokens == sorted(tokens, reverse=True)
    assert all(number >= 1 for number in tokens)


@laws(100)
@given(st.sampled_from(PIECES), st.sampled_from(PIECES))
def test_lines_are_judged_alone(one: str, other: str) -> None:
    """A line below does not change what is found above, unless it is a fence, a tag or a title."""
    both = lint_text(f"{one}\n{other}")
    above = [f.text for f in both if f.start < len(one)]
    assert above == [finding.text for finding in lint_text(one)]


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern.pattern[:30])
def test_no_pattern_is_unbounded(rule: Any) -> None:
    for pattern in (rule.pattern, rule.prefix):
        if pattern is not None:
            widest = parser.parse(pattern.pattern, pattern.flags).getwidth()[1]
            assert widest < constants.MAXREPEAT
            assert widest < 12_000


def seconds(text: str) -> float:
    """The least CPU time of two searches."""
    best = float("inf")
    for _ in range(2):
        start = time.process_time()
        lint_text(text)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize(
    "unit",
    [
        *("1", "a1", "1,", "1.", "1:", "2024-", "00:00:00 ", "a-", "a_1", "0123456789abcdef"),
        *("/tmp/", "C:\\a\\", "eyJ", "eyJaaaaaa.", "May 1 ", "1 May ", "turn 1 of ", "now ", "=a1"),
        *("(", "[1]", '{"id": ', "\n", "\n\n# a", "```\n", "<example>\n", "\u4eca\u65e5", "e.g. "),
        *("12:34 now", "10.0.0.1:", "request id a1b2c3 ", "ago 5 s ", "-- step 1 ", "\u0660"),
    ],
)
def test_time_grows_with_the_length_and_not_faster(unit: str) -> None:
    short = (unit * 1000)[:1000]
    least = max(seconds(short), 1e-3)  # shorter times are noise
    assert seconds(short * FACTOR) < MAX_RATIO * least


# -- two texts, and logs -----------------------------------------------------------------------


lines = st.lists(st.sampled_from("abcdefgh"), max_size=12).map(
    lambda names: "".join(f"line {name} of the text\n" for name in names)
)


@laws(200)
@given(st.one_of(lines, texts), st.one_of(lines, texts))
def test_hunks_turn_the_old_text_into_the_new_one(old: str, new: str) -> None:
    result, done = "", 0
    for hunk in hunks(old, new):
        assert hunk.old_start >= done
        result += old[done : hunk.old_start]
        assert len(result) == hunk.start
        result += new[hunk.start : hunk.stop]
        done = hunk.old_stop
    assert result + old[done:] == new


@laws(60)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=2),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_log_that_only_appends_has_no_causes(
    messages: list[tuple[str, str]], steps: list[int]
) -> None:
    said = [{"role": role, "content": text} for role, text in messages]
    requests, num = [], 1
    for step in steps:
        requests.append({"messages": said[:num]})
        num = min(len(said), num + step)
    report = lint_requests(requests)
    assert report.causes == () and report.num_invalidated_tokens == 0


HEX = "0123456789abcdef"
nonces = st.text(HEX, min_size=12, max_size=12).filter(lambda t: re.search(r"\d", t) is not None)


@laws(60)
@given(st.integers(0, 30), st.integers(3, 30), st.lists(nonces, min_size=2, max_size=4))
def test_difference_stands_where_the_prompts_part(
    before: int, behind: int, values: list[str]
) -> None:
    def prompt(value: str) -> str:
        rules = [f"Rule {i}: the agent does thing number {i}, politely.\n" for i in range(60)]
        return "".join(rules[:before]) + f"nonce: {value}\n" + "".join(rules[30 : 30 + behind])

    prompts = [prompt(value) for value in values]
    report = lint_requests(prompts, count_tokens=characters)
    changed = [(a, b) for a, b in pairwise(values) if a != b]
    start = prompts[0].index("nonce: ") + len("nonce: ")
    assert [miss.start for miss in report.misses] == [start] * len(changed)
    assert report.num_invalidated_tokens == len(changed) * (len(prompts[0]) - start)
    assert report.num_reusable_tokens == (len(values) - 1) * len(prompts[0])


@laws(60)
@given(st.lists(texts, max_size=4))
def test_any_prompts_make_a_log(prompts: list[str]) -> None:
    report = lint_requests(prompts)
    assert report.num_invalidated_tokens <= report.num_reusable_tokens <= report.num_tokens
    for cause in report.causes:
        assert 0 <= cause.num_saved_tokens <= cause.num_invalidated_tokens

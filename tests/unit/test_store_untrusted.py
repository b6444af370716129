"""What a hostile header may cost before it is refused, and how it is quoted."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_store import canonical, segment_of

from kvnotes.errors import SegmentFormatError
from kvnotes.store.header import Creation, Payload, Provenance, SegmentHeader, make_header
from kvnotes.store.untrusted import MAX_VALUES, quoted

HUGE = 1_000_000
MIB = 1 << 20
HOSTILE = "\x1b[31m\u202e" + "n" * 100_000

HEADER = json.loads(
    make_header(
        segment_of(),
        kind="segment",
        tenant="",
        provenance=Provenance(),
        payload=Payload(source_dtype="float32"),
        created=Creation(at="2026-01-02T03:04:05+00:00", versions=()),
        digests=("a" * 64, "b" * 64),
    ).to_json()
)


def refusal(text: str) -> str:
    with pytest.raises(SegmentFormatError) as caught:
        SegmentHeader.from_json(text, "f")
    return caught.value.message


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        '"token_ids":[' + "-1," * HUGE + "1]",
        '"token_ids":[' + '"",' * HUGE + "1]",
        '"preamble_ids":[' + "0.5," * HUGE + "1]",
        '"layer_kinds":[' + "0," * HUGE + "1]",
        '"identity":{"spec":{"layers":[' + "0," * HUGE + "1]}}",
        '"tensors":[' + "[0]," * HUGE + "1]",
        ",".join(f'"{index}":1' for index in range(HUGE // 4)),
    ],
    ids=["negative", "texts", "floats", "kinds", "layers", "nested", "keys"],
)
def test_many_wrong_values_do_not_become_as_many_errors(body: str, traced: None) -> None:
    # an error of pydantic takes 700 bytes: 16 MB of wrong values would take 12 GB
    assert refusal('{"version":1,' + body + "}")
    assert tracemalloc.get_traced_memory()[1] < 100 * MIB


def test_as_many_values_as_allowed_are_looked_at_and_no_more() -> None:
    names = len(HEADER) - 2
    fits = {**HEADER, "layer_kinds": ["full"] * (MAX_VALUES // 2)}
    assert "layer_kinds" in refusal(canonical(fits))
    assert names < MAX_VALUES // 2
    over = {**HEADER, "layer_kinds": ["full"] * MAX_VALUES}
    assert f"more than {MAX_VALUES} values besides its tokens" in refusal(canonical(over))


def test_a_header_of_a_million_tokens_is_not_too_much() -> None:
    long = {**HEADER, "token_ids": [1] * HUGE}
    assert "layer_kinds" not in refusal(canonical(long))  # but longer than the model's context
    assert "longer than the context" in refusal(canonical(long))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({HOSTILE: 1}, "\\x1b[31m\\u202ennn"),
        ({"altered": "n" * 900}, "nnn"),
        ({"version": HOSTILE}, "\\x1b[31m\\u202ennn"),
        ({"version": {HOSTILE: 1}}, "dict"),
        ({"layer_kinds": ["n" * 1000] * 1000}, "nnn"),
        ({"identity": {**HEADER["identity"], HOSTILE: 1}}, "\\x1b[31m\\u202ennn"),
    ],
)
def test_messages_hold_nothing_that_a_terminal_obeys_and_end_soon(
    change: dict[str, Any], shown: str
) -> None:
    message = refusal(canonical({**HEADER, **change}))
    assert shown in message
    assert message.isprintable() and len(message) < 500


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (True, "True"), ("\x1b", "'\\x1b'"), ([1], "list"), (None, "NoneType")],
)
def test_a_value_is_quoted_by_its_kind_or_in_ascii(value: object, text: str) -> None:
    assert quoted(value) == text
    assert len(quoted("x" * 1000)) == 80

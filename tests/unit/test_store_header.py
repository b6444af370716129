"""Headers: what they say, how that is written, and every way to contradict oneself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers_store import (
    HALF,
    PLAIN,
    TEXT,
    TEXT_OF_HEADER,
    at,
    canonical,
    changed,
    header,
    leaves,
    of_model,
    segment_of,
)

from kvnotes.errors import SegmentFormatError
from kvnotes.plan import Run
from kvnotes.store.header import FieldSpan, Provenance, SegmentHeader, make_header


def refusal(text: str) -> str:
    with pytest.raises(SegmentFormatError) as caught:
        SegmentHeader.from_json(text, "f")
    assert caught.value.hint
    return caught.value.message


# -- what is written -----------------------------------------------------------------------


def test_a_header_is_read_as_it_was_written() -> None:
    found = SegmentHeader.from_json(TEXT_OF_HEADER, "f")
    assert found == header() and found.to_json() == TEXT_OF_HEADER
    assert found.provenance.text == TEXT
    assert found.run() == segment_of(3, 2).run


def test_a_header_is_ascii_with_sorted_keys_and_no_blanks_outside_of_texts() -> None:
    assert TEXT_OF_HEADER.isascii()
    assert canonical(json.loads(TEXT_OF_HEADER)) == TEXT_OF_HEADER
    assert "\\u20ac" in TEXT_OF_HEADER


# -- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 0, -1, "1", None, 1.5, [1], {"a": 1}, 10**30])
def test_another_version_of_the_format_is_named_before_anything_else(version: Any) -> None:
    text = canonical({"version": version, "unknown": "from the future"})
    assert "has format version" in refusal(text) and "reads 1" in refusal(text)


@pytest.mark.parametrize("version", [True, 1.0])
def test_a_version_that_only_equals_ours_is_refused(version: Any) -> None:
    assert "not in its canonical form" in refusal(changed(at("version", version)))


@pytest.mark.parametrize("text", ["", "x", "[]", "1", "null", "{}", '{"version":1}', "[" * 50000])
def test_what_is_no_header_is_refused(text: str) -> None:
    assert refusal(text)


CONTRADICTIONS = [
    ("token_ids", [], "it has no tokens"),
    ("fingerprint", "0" * 64, "is not that of the model it describes"),
    ("identity.weights_digest", "2" * 64, "is not that of the model it describes"),
    ("layer_kinds", ["full", "full"], "differ from the model's"),
    ("layer_kinds", ["sliding"], "differ from the model's"),
    ("altered", "int8:float32", "is altered 'int8:float32' with a payload of kind 'exact'"),
    ("altered", "\u00e9", "is altered"),
    ("payload.kind", "int8", "is altered '' with a payload of kind 'int8'"),
    ("payload.source_dtype", "float64", "computed in 'float64', which has no place"),
    ("payload.source_dtype", "float16", "computed in 'float16' and stored for a model of dtype"),
    ("payload.max_error", 0.5, "an error is stated for exact K/V"),
    ("payload.rms_error", 0.5, "an error is stated for exact K/V"),
    ("token_ids", [1, 2, 50], "a token id lies outside of the vocabulary of 50"),
    ("preamble_ids", [1, 50], "a token id lies outside of the vocabulary of 50"),
    ("start", 1, "computed behind other tokens than its declared preamble"),
    ("attended", "0" * 64, "computed behind other tokens than its declared preamble"),
    ("preamble_ids", [7, 0], "computed behind other tokens than its declared preamble"),
    ("preamble_ids", [], "computed behind other tokens than its declared preamble"),
    ("kind", "run", "a run has no preamble of its own"),
    ("token_ids", [1, 2], "2 tensors, 2 expected; they differ at number 0"),
    ("tensors.0.dtype", "F16", "they differ at number 0"),
    ("tensors.1.name", "values.1", "they differ at number 1"),
    ("tensors.1.shape", [1, 2, 3], "they differ at number 1"),
    ("tensors", [], "0 tensors, 2 expected; they differ at number 0"),
    ("provenance.spans.0.stop", 4, "the span of field 'limit' lies outside of its tokens"),
    ("provenance.spans.0.start", 3, "the span of field 'limit' lies outside of its tokens"),
    ("provenance.text", "other", "its text is not the one whose digest it states"),
    ("provenance.text_sha256", "", "its text is not the one whose digest it states"),
]


@pytest.mark.parametrize(("path", "value", "message"), CONTRADICTIONS)
def test_a_header_that_contradicts_itself_is_refused(path: str, value: Any, message: str) -> None:
    assert message in refusal(changed(at(path, value)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layer_kinds"),
        ({"layers__0__kind": "latent"}, "layer_kinds"),
        ({"layers__0__head_dim": 4}, "they differ at number 0"),
        ({"layers__0__head_dim": 0}, "sizes that none can have"),
        ({"layers__0__num_kv_heads": -1}, "sizes that none can have"),
        ({"max_positions": 4}, "longer than the context of its model"),
        ({"max_positions": -1}, "longer than the context of its model"),
        ({"vocab_size": 28}, "outside of the vocabulary of 28"),
        ({"dtype": "float64"}, "computed in 'float32' and stored for a model of dtype 'float64'"),
        ({"model_type": "\x1b[2J"}, "characters that cannot be printed"),
    ],
)
def test_a_model_that_cannot_have_computed_it_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(of_model(**changes))


def test_a_layer_that_moves_by_what_the_model_has_not_is_refused() -> None:
    for index in (1, -1):
        text = of_model(layers__0__moves=[["keys", index]])
        assert "moves by a rotary embedding that it has not" in refusal(text)
    for moves in ([["index", 0]], [["values", 0]]):
        text = of_model(layers__0__moves=moves, layers__0__value_dim=1)
        assert "turns dimensions that its" in refusal(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("token_ids", [True]),
        ("token_ids", [1.0]),
        ("token_ids", ["1"]),
        ("token_ids", [-1]),
        ("token_ids", [2**31]),
        ("token_ids", [[1]]),
        ("token_ids", {"0": 1}),
        ("token_ids", None),
        ("token_ids", "123"),
        ("preamble_ids", [None]),
        ("start", -1),
        ("start", True),
        ("start", 2.0),
        ("start", 2**48),
        ("attended", "A" * 64),
        ("attended", "a" * 63),
        ("attended", "a" * 64 + "\n"),
        ("tenant", "a\x1b[31m"),
        ("tenant", "a\n"),
        ("tenant", "a" * 1001),
        ("tenant", None),
        ("kind", "session"),
        ("payload.kind", "int4"),
        ("payload.max_error", -0.1),
        ("payload.max_error", "0.0"),
        ("created.at", "yesterday"),
        ("created.at", "2026-01-02T03:04:05+01:00"),
        ("created.versions", [["kvnotes"]]),
        ("provenance.version", -1),
        ("provenance.family", "0"),
        ("provenance.text_sha256", "0" * 65),
        ("provenance.spans", [1]),
        ("provenance.variant", [["a", "b", "c"]]),
        ("tensors.0.sha256", "z" * 64),
        ("tensors.0.shape", [1, 0, 2]),
        ("tensors.0.shape", [1, -3, -2]),
        ("tensors.0.shape", [1, 3, 2, 1, 1]),
        ("identity.spec.ropes.0.pairing", "both"),
        ("identity.spec.ropes.0.attention_factor", "1"),
        ("identity.spec.layers.0.kind", "unknown"),
        ("identity.spec.hidden_size", "2"),
        ("identity.spec.hidden_size", True),
        ("identity.spec.constants", [["a"]]),
        ("identity", {}),
    ],
)
def test_a_value_of_another_type_or_size_is_refused(path: str, value: Any) -> None:
    assert path.split(".")[0] in refusal(changed(at(path, value)))


@pytest.mark.parametrize("path", ["", "identity.", "identity.spec.", "provenance.", "tensors.0."])
def test_an_unknown_or_missing_key_is_refused_at_every_level(path: str) -> None:
    assert "unknown" in refusal(changed(at(path + "unknown", 1)))
    data = json.loads(TEXT_OF_HEADER)
    names = [name for name, _ in leaves(data) if name.startswith(path)]
    assert names

    def without(name: str) -> Callable[[Any], None]:
        def change(data: Any) -> None:
            *way, last = name.split(".")
            for step in way:
                data = data[int(step)] if step.isdigit() else data[step]
            del data[int(last) if last.isdigit() else last]

        return change

    for name in names:
        assert refusal(changed(without(name))), name


# -- one canonical form --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        TEXT_OF_HEADER + " ",
        " " + TEXT_OF_HEADER,
        TEXT_OF_HEADER.replace(":", ": ", 1),
        TEXT_OF_HEADER.replace("\\u20ac", "\u20ac"),
        TEXT_OF_HEADER.replace("\\u20ac", "\\u20AC"),
        TEXT_OF_HEADER.replace('"policy"', '"\\u0070olicy"'),
        TEXT_OF_HEADER.replace('"rms_error":0.0', '"rms_error":0.00'),
        TEXT_OF_HEADER.replace('"rms_error":0.0', '"rms_error":0e0'),
        TEXT_OF_HEADER.replace('"rms_error":0.0', '"rms_error":0'),
        TEXT_OF_HEADER.replace('"attention_factor":1.0', '"attention_factor":1'),
        json.dumps(dict(reversed(json.loads(TEXT_OF_HEADER).items())), separators=(",", ":")),
    ],
)
def test_another_way_to_write_the_same_header_is_refused(text: str) -> None:
    assert text != TEXT_OF_HEADER and refusal(text)


def test_a_key_that_stands_twice_is_refused() -> None:
    assert "stands twice" in refusal(TEXT_OF_HEADER.replace('"start":2', '"start":2,"start":2'))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_know_are_refused(number: str) -> None:
    assert refusal(TEXT_OF_HEADER.replace('"rms_error":0.0', f'"rms_error":{number}'))
    factor = '"attention_factor":1.0'
    assert refusal(TEXT_OF_HEADER.replace(factor, f'"attention_factor":{number}'))


@pytest.mark.parametrize("text", ["\ud800", "\\ud800", "\\udc00\\ud800"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    assert refusal(TEXT_OF_HEADER.replace('"policy"', f'"{text}"'))


# -- runs ----------------------------------------------------------------------------------


def test_a_part_of_a_session_has_no_run_without_its_lineage() -> None:
    part = segment_of(3, 0)
    before = Run((1, 2)).whole().run.after
    run = Run(part.run.token_ids, 2, before)
    data = json.loads(make_header(part, **PLAIN).to_json())
    data.update(kind="run", start=2, attended=run.attended)
    found = SegmentHeader.from_json(canonical(data), "f")
    assert found.run(run) is run
    with pytest.raises(SegmentFormatError, match="says by digest only what they saw before"):
        found.run()
    with pytest.raises(SegmentFormatError, match=f"holds the run {run.digest[:12]}"):
        found.run(Run(run.token_ids, 2, Run((1, 3)).whole().run.after))


def test_a_header_that_cannot_be_written_is_no_header() -> None:
    with pytest.raises(SegmentFormatError, match="cannot be stored: tenant"):
        header(tenant="a\nb")
    with pytest.raises(SegmentFormatError, match=r"cannot be stored: .*'float16' and stored for"):
        make_header(segment_of(3, 2), **{**PLAIN, "payload": HALF})


def test_a_long_field_value_can_be_stored() -> None:
    long = "v" * 5000
    source = Provenance(
        spans=(FieldSpan(name="a", value=long, start=0, stop=1),), variant=(("a", long),)
    )
    text = header(provenance=source).to_json()
    assert SegmentHeader.from_json(text, "f").provenance.spans[0].value == long

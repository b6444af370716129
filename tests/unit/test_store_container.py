"""The outer form of a file: what is read, what is refused, and what refusing may cost."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from helpers_store import PAGE, joined

from kvnotes.errors import SegmentFormatError
from kvnotes.store import container, untrusted
from kvnotes.store.container import MAX_HEADER_NBYTES, MAX_TENSORS, Container, Place

MIB = 1 << 20
TABLE = {
    "__metadata__": {"a": "b"},
    "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "y": {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]},
    "z": {"dtype": "BF16", "shape": [], "data_offsets": [28, 30]},
}


def parse(content: bytes) -> Container:
    size = container.header_size(content[:8], len(content), "f")
    return container.parse(content[8 : 8 + size], len(content), "f")


def table(**changes: Any) -> dict[str, Any]:
    """TABLE with one entry changed: `x=...` replaces keys of tensor x, None removes it."""
    result = json.loads(json.dumps(TABLE))
    for name, change in changes.items():
        if change is None:
            del result[name]
        elif isinstance(change, dict):
            result.setdefault(name, {}).update(change)
        else:
            result[name] = change
    return result


def refusal(content: bytes) -> str:
    with pytest.raises(SegmentFormatError) as caught:
        parse(content)
    assert caught.value.hint
    return caught.value.message


# -- what is read --------------------------------------------------------------------------


def test_a_header_says_where_each_tensor_lies() -> None:
    content = joined(TABLE, bytes(30))
    assert parse(content) == Container(
        {"a": "b"},
        (
            Place("x", "F32", (2, 3), PAGE, PAGE + 24),
            Place("y", "I8", (4,), PAGE + 24, PAGE + 28),
            Place("z", "BF16", (), PAGE + 28, PAGE + 30),
        ),
        PAGE + 30,
    )


def test_tensors_stand_in_the_order_of_their_bytes_not_of_their_names() -> None:
    shuffled = dict(reversed(TABLE.items()))
    assert [place.name for place in parse(joined(shuffled, bytes(30))).places] == ["x", "y", "z"]


def test_what_is_built_can_be_parsed_and_begins_its_tensors_on_a_page() -> None:
    tensors = [("a", "F32", (3, 5)), ("b", "I8", (2,)), ("c", "F16", (1, 1, 7))]
    for least in (0, 3 * PAGE):
        first, places = container.build({"k": 'v"\u00e9\n'}, tensors, least)
        assert len(first) == max(PAGE, least) == places[0].start
        found = parse(first + bytes(60 + 2 + 14))
        assert found.places == places
        assert found.metadata == {"k": 'v"\u00e9\n'}
        assert [(p.name, p.dtype, p.shape) for p in places] == tensors


# -- other files ---------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_never_loaded(protocol: int) -> None:
    content = pickle.dumps({"weights": list(range(1000))}, protocol)
    message = refusal(content)
    assert ("pickle" in message) == (protocol >= 2)  # 0 and 1 are plain text


def test_a_torch_file_is_called_what_it_is() -> None:
    for old in (False, True):
        file = io.BytesIO()
        torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=not old)
        assert "is a pickle or zip file" in refusal(file.getvalue())


def test_a_header_of_640_bytes_is_not_taken_for_a_pickle() -> None:
    # 640 is 80 02 as two bytes: what a pickle begins with
    content = joined({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1", page=648)
    assert content[:2] == b"\x80\x02"
    assert [place.name for place in parse(content).places] == ["x"]


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_a_size_is_too_short(size: int) -> None:
    assert "too few" in refusal(bytes(size))


# -- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10**12, 2**63, 2**64 - 1, MAX_HEADER_NBYTES + 1])
def test_a_header_longer_than_allowed_is_refused_by_its_size_alone(size: int) -> None:
    message = refusal(struct.pack("<Q", size) + b"{}")
    assert str(size) in message and str(MAX_HEADER_NBYTES) in message


def test_a_header_longer_than_the_file_is_refused() -> None:
    assert "claims a header of 100 bytes and has 20" in refusal(struct.pack("<Q", 100) + b" " * 12)


def test_claimed_elements_cost_no_memory() -> None:
    content = joined(table(x={"shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}), bytes(30))
    tracemalloc.start()
    try:
        assert "4000000000000 bytes" in refusal(content)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", ["[],", "{},", '{"":[]},', "[[]],"])
def test_empty_lists_and_objects_do_not_multiply_the_size_of_a_header(piece: str) -> None:
    body = '{"__metadata__":[' + piece * (MAX_HEADER_NBYTES // len(piece) - 20) + "1]}"
    content = struct.pack("<Q", len(body)) + body.encode()
    tracemalloc.start()
    try:
        assert "brackets" in refusal(content)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_HEADER_NBYTES
    finally:
        tracemalloc.stop()


def test_metadata_of_the_largest_size_are_read() -> None:
    body = json.dumps(table(__metadata__={"a": "b" * (MAX_HEADER_NBYTES - 2 * PAGE)}))
    assert len(parse(joined(body, bytes(30))).metadata["a"]) == MAX_HEADER_NBYTES - 2 * PAGE


def test_a_header_that_gets_too_long_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [("x", "F32", (1,))]
    with pytest.raises(SegmentFormatError, match="larger than the 33554432 and 1048576 allowed"):
        container.build({"a": "b" * MAX_HEADER_NBYTES}, tensors)
    monkeypatch.setattr(container, "MAX_BRACKETS", 100)
    with pytest.raises(SegmentFormatError, match="split the segment"):
        container.build({"a": "{" * 101}, tensors)


# -- JSON ----------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "no JSON object"),
        ("null", "no JSON object"),
        ("", "no JSON object"),
        (" " + json.dumps(TABLE), "no JSON object"),
        ("\ufeff" + json.dumps(TABLE), "no JSON object"),
        ("{", "not JSON"),
        ('{"a":1', "not JSON"),
        (json.dumps(TABLE) + "x", "not JSON"),
        (json.dumps(TABLE) + "\0", "not JSON"),
        ('{"x":' + DEEP + "}", "not JSON"),
        ('{"__metadata__":{"a":"b"},"__metadata__":{}}', "a key stands twice"),
        ('{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "stands twice"),
        ('{"x":NaN}', "holds NaN"),
        ('{"x":[-Infinity]}', "holds -Infinity"),
        ('{"x":' + "9" * 5000 + "}", "not JSON"),
        ('{"x":"' + "a\n" + '"}', "not JSON"),
    ],
)
def test_what_is_not_one_json_object_is_refused(text: str, message: str) -> None:
    assert message in refusal(joined(text, bytes(30)))


def test_what_is_not_utf_8_is_refused() -> None:
    body = json.dumps(TABLE).encode().replace(b'"b"', b'"\xff"')
    assert "not JSON" in refusal(struct.pack("<Q", len(body)) + body + bytes(30))


# -- tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # metadata
        ({"__metadata__": ["a"]}, "metadata are not texts"),
        ({"__metadata__": {"a": 1}}, "metadata are not texts"),
        ({"__metadata__": {"a": None}}, "metadata are not texts"),
        ({"__metadata__": "a"}, "metadata are not texts"),
        ({"x": None, "y": None, "z": None}, "has 0 tensors"),
        # offsets: a gap, an overlap, the same bytes twice, out of order, out of the file
        ({"y": {"data_offsets": [25, 29]}}, "'y' begins at byte 4121, the one before ends at 4120"),
        ({"y": {"data_offsets": [22, 26]}}, "the one before ends at"),
        ({"y": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, "the one before ends at"),
        ({"x": {"data_offsets": [24, 0]}}, "takes 24 bytes, its place is"),
        ({"x": {"data_offsets": [4, 28]}}, "'x' begins at byte 4100, the one before ends at 4096"),
        ({"z": {"data_offsets": [28, 32], "shape": [2]}}, "its place is [4124, 4128) of 4126"),
        ({"z": None}, "its tensors end at byte 4124, the file has 4126"),
        # lists that are no sizes
        ({"x": {"data_offsets": [-24, 0]}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": [0]}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": [0, 24, 24]}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": [0.0, 24]}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": [False, 24]}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": "ab"}}, "no valid shape or offsets"),
        ({"x": {"data_offsets": {"0": 0, "1": 24}}}, "no valid shape or offsets"),
        ({"x": {"shape": [True, 6]}}, "no valid shape or offsets"),
        ({"x": {"shape": [2.0, 3]}}, "no valid shape or offsets"),
        ({"x": {"shape": [-2, -3]}}, "no valid shape or offsets"),
        ({"x": {"shape": [1, 1, 1, 2, 3]}}, "no valid shape or offsets"),
        ({"x": {"shape": [2**60, 0]}}, "no valid shape or offsets"),
        ({"x": {"shape": 6}}, "no valid shape or offsets"),
        ({"x": {"shape": None}}, "no valid shape or offsets"),
        ({"x": {"shape": [[2], [3]]}}, "no valid shape or offsets"),
        ({"x": {"shape": [2, 4]}}, "takes 32 bytes"),
        ({"x": {"shape": [0]}}, "takes 0 bytes"),
        # dtypes
        ({"x": {"dtype": ["F32"]}}, "has the dtype \"['F32']\""),
        ({"x": {"dtype": None}}, "has the dtype 'None'"),
        ({"x": {"dtype": "F64"}}, "has the dtype 'F64'"),
        ({"x": {"dtype": "f32"}}, "has the dtype 'f32'"),
        ({"x": {"dtype": {}}}, "has the dtype '{}'"),
        # entries
        ({"x": 5}, "described by other keys"),
        ({"x": []}, "described by other keys"),
        ({"x": {"more": 1}}, "described by other keys"),
        # alignment: a float32 behind an odd number of bytes
        (
            {
                "y": {"dtype": "I8", "shape": [3], "data_offsets": [24, 27]},
                "z": {"dtype": "BF16", "shape": [1], "data_offsets": [27, 29]},
            },
            "'z' begins at byte 4123, no multiple of its item size",
        ),
    ],
)
def test_tensors_that_do_not_fill_the_file_in_order_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(joined(table(**changes), bytes(30)))


def test_one_byte_more_or_less_is_refused() -> None:
    assert "its place is [4124, 4126) of 4125" in refusal(joined(TABLE, bytes(29)))
    assert "end at byte 4126, the file has 4127" in refusal(joined(TABLE, bytes(31)))


def test_more_tensors_than_allowed_are_refused() -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    many = {str(index): entry for index in range(MAX_TENSORS + 1)}
    assert f"has {MAX_TENSORS + 1} tensors" in refusal(joined(many))
    del many["0"]
    assert len(parse(joined(many)).places) == MAX_TENSORS


def test_a_tensor_whose_items_would_not_be_aligned_is_not_built() -> None:
    with pytest.raises(SegmentFormatError, match="would begin at byte 3"):
        container.build({}, [("levels", "I8", (1, 1, 3)), ("scale", "F16", (1, 1, 1))])


def test_names_of_tensors_are_quoted_short_in_messages() -> None:
    name = "\x1b[31m" + "n" * 1000
    message = refusal(joined({name: {}}))
    assert "\x1b" not in message and len(message) < 300


def test_the_limits_are_those_of_the_specification() -> None:
    assert (MAX_HEADER_NBYTES, MAX_TENSORS) == (32 * MIB, 8192)
    assert (container.PAGE, untrusted.MAX_BRACKETS, untrusted.MAX_VALUES) == (4096, MIB, 131072)

"""One text for each tool: canonical, bounded, and unable to open a slot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnotes.errors import TemplateError
from kvnotes.prompt import Message, PromptTemplate, SegmentText, tool_name, tool_segment, tool_text
from kvnotes.prompt.tools import MAX_TOOL_CHARS, MAX_TOOL_DEPTH

ORDER: dict[str, Any] = {
    "name": "get_order",
    "description": "Read an order.",
    "parameters": {
        "type": "object",
        "properties": {
            "order_id": {"type": "string", "description": "Begins with #."},
            "fields": {"type": "array", "items": {"enum": ["total", "address", "items"]}},
        },
        "required": ["order_id", "fields"],
    },
}

_numbers = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False)
)
_texts = st.text(
    st.characters(exclude_categories=["Cs", "Co"]) | st.sampled_from('{}\\"\n'), max_size=8
)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=12,
)


@st.composite
def _schemas(draw: st.DrawFn) -> dict[str, Any]:
    extra = draw(st.dictionaries(st.sampled_from(["strict", "return", "zeta"]), _values))
    given = {"name": "f", "description": draw(_texts), "parameters": draw(_objects), **extra}
    kept = draw(st.sets(st.sampled_from(["description", "parameters"])))
    return {key: value for key, value in given.items() if key not in kept}


_objects = st.dictionaries(_texts, _values, max_size=3)


def shuffled(value: object, draw: Any) -> object:
    """Return the same JSON value with the keys of all its objects in another order."""
    if isinstance(value, Mapping):
        keys = draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


def test_every_form_of_a_function_has_one_text() -> None:
    forms = [
        ORDER,
        {"type": "function", "function": ORDER},
        {"function": ORDER},
        {"type": "function", **ORDER},
        dict(reversed(ORDER.items())),
        json.loads(json.dumps(ORDER)),
    ]
    assert len({tool_text(form) for form in forms}) == 1
    assert tool_text(ORDER).startswith(
        '{"type": "function", "function": {"name": "get_order", "description": "Read an order.", '
        '"parameters": {"properties": {"fields": {"items": {"enum": ["total", "address", "items"]}'
    )


@given(schema=_schemas(), data=st.data())
def test_a_schema_has_one_text_whatever_the_order_of_its_keys(
    schema: dict[str, Any], data: st.DataObject
) -> None:
    text = tool_text(schema)
    assert tool_text(shuffled(schema, data.draw)) == text
    read = json.loads(text)
    assert read == {"type": "function", "function": schema}, "nothing is lost or changed"
    assert tool_text(read) == text


@given(schema=_schemas())
def test_a_tool_can_never_open_a_slot(schema: dict[str, Any]) -> None:
    segment = tool_segment(schema)
    assert segment.text_parts() == (tool_text(schema),)


def test_a_slot_in_a_description_is_plain_text_in_the_prompt() -> None:
    from helpers_prompt import prompt_tokenizer

    segment = tool_segment({**ORDER, "description": "{{secret}} \\{{segment:policy}} {{{"})
    template = PromptTemplate.chat([Message("system", segment=segment.name)], [segment])
    assert template.field_names == ()
    shown = template.render({}, prompt_tokenizer("smollm2")).text
    assert '"{{secret}} \\\\{{segment:policy}} {{{"' in shown


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"minimum": 1}, {"minimum": 1.0}, True),
        ({"minimum": 0}, {"minimum": -0.0}, True),
        ({"minimum": 100}, {"minimum": 1e2}, True),
        ({"minimum": 10**22}, {"minimum": 1e22}, True),
        ({"minimum": 1}, {"minimum": True}, False),
        ({"minimum": 0.1}, {"minimum": 0.10000000000000001}, True),
        ({"enum": ["a", "b"]}, {"enum": ("a", "b")}, True),
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}, False),
        ({"required": ["a", "b"]}, {"required": ["b", "a"]}, False),
        ({"title": "é"}, {"title": "\u00e9"}, True),
    ],
)
def test_numbers_have_one_form_and_arrays_keep_their_order(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    texts = [tool_text({"name": "f", "parameters": value}) for value in (one, other)]
    assert (texts[0] == texts[1]) is same
    assert "\\u" not in texts[0]


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _doubled() -> list[Any]:
    value: list[Any] = [1]
    for _ in range(24):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "list"),
        ('{"name": "f"}', "str"),
        ({}, "name None"),
        ({"description": "no name"}, "'description'"),
        ({"name": ""}, "name ''"),
        ({"name": 3}, "name 3"),
        ({"name": "get order"}, "'get order'"),
        ({"name": "get_order@2"}, "'get_order@2'"),
        ({"name": "-f"}, "'-f'"),
        ({"name": "{{f}}"}, "'{{f}}'"),
        ({"name": "f" * 129}, "128"),
        ({"type": "web_search", "name": "f"}, "'web_search'"),
        ({"type": "function", "function": "f"}, "str"),
        ({"type": "function", "function": {"name": "f"}, "name": "g"}, "'name'"),
        ({"name": "f", "description": 3}, "int"),
        ({"name": "f", "parameters": None}, "NoneType"),
        ({"name": "f", "parameters": []}, "list"),
        ({"name": "f", "input_schema": {}}, "'input_schema'"),
        ({"name": "f", "parameters": {1: 2}}, "key 1"),
        ({"name": "f", 2: 2}, "key 2"),
        ({"name": "f", "parameters": {"enum": {"a"}}}, "set"),
        ({"name": "f", "parameters": {"default": b"a"}}, "bytes"),
        ({"name": "f", "parameters": {"default": float("nan")}}, "nan"),
        ({"name": "f", "parameters": {"default": float("inf")}}, "inf"),
        ({"name": "f", "parameters": {"default": 1 << 1024}}, "309 digits"),
        ({"name": "f", "description": "\ud800"}, "U\\+D800"),
        ({"name": "f", "description": "\U000f0000"}, "U\\+F0000"),
        ({"name": "f", "parameters": _nested(MAX_TOOL_DEPTH - 2)}, str(MAX_TOOL_DEPTH)),
        ({"name": "f", "parameters": {"x": _itself()}}, str(MAX_TOOL_DEPTH)),
        ({"name": "f", "parameters": {"x": _doubled()}}, str(MAX_TOOL_CHARS)),
        ({"name": "f", "description": "x" * MAX_TOOL_CHARS}, str(MAX_TOOL_CHARS)),
        ({"name": "f", "description": '"' * (MAX_TOOL_CHARS // 2)}, str(MAX_TOOL_CHARS)),
    ],
)
def test_a_malformed_schema_is_refused_with_both_sides(schema: object, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as error:
        tool_segment(schema)
    assert error.value.hint


def test_the_deepest_schema_is_taken() -> None:
    # the tool, its function and what holds the innermost object
    assert tool_text({"name": "f", "parameters": _nested(MAX_TOOL_DEPTH - 3)})


@pytest.mark.parametrize("version", ["2", "2026-01-31", "v1.0_b"])
def test_a_version_tells_segments_of_one_tool_apart(version: str) -> None:
    segment = tool_segment(ORDER, version=version)
    assert segment == SegmentText(f"tool/get_order@{version}", segment.text)
    assert tool_segment(ORDER).name == "tool/get_order"
    assert tool_name(segment.name) == tool_name("tool/get_order") == "get_order"


def test_a_segment_that_is_no_tool_shows_none() -> None:
    assert tool_name("policy") is None and tool_name("tools/get_order") is None


@pytest.mark.parametrize("version", ["", "a b", "1@2", "../x", "{{v}}"])
def test_a_version_of_other_characters_is_refused(version: str) -> None:
    with pytest.raises(TemplateError, match="version"):
        tool_segment(ORDER, version=version)

"""Laws of prompts, for all texts."""

from __future__ import annotations

import re

import pytest
from helpers_laws import laws
from helpers_prompt import FAMILIES, family_tokenizer, prompt_tokenizer
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from kvnotes.errors import FieldValueError, TemplateError
from kvnotes.prompt import (
    ErratumStyle,
    Field,
    Message,
    PromptTemplate,
    PromptTokenizer,
    SegmentText,
    TokenizedPrompt,
)
from kvnotes.prompt.stream import StreamDecoder
from kvnotes.prompt.tokenizer import _reached_into
from kvnotes.prompt.tokens import longest_match

LIGHT = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = sorted(FAMILIES)
SMOL = prompt_tokenizer("smollm2")

SCRIPTS = st.sampled_from(
    [
        "12", "1", "2", "0", " ", "  ", "a", "the", "price", "\u00e9", "e\u0301", "\u0301",
        "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "\u200f", "\u4f60\u597d",
        "\U0001f469\u200d\U0001f680", "\U0001f1e9\U0001f1ea", "\u0e01\u0e33", "\u0915\u094d\u0937",
        "\ufb01", "\u212a", "\u00df", "\ue000", "<", "|>", "[", "{{", "}}", "\\", ".", ":",
    ]
)  # fmt: skip
LINE = st.lists(
    SCRIPTS | st.characters(blacklist_categories=("Cc", "Cs", "Co", "Zl", "Zp")), max_size=6
).map("".join)
TEXT = st.lists(SCRIPTS | st.sampled_from(["\n", "\n\n", "\t"]) | st.characters(), max_size=8).map(
    "".join
)
NAMES_OF_FIELDS = ("a", "b", "c")
VALUES = st.fixed_dictionaries({name: LINE for name in NAMES_OF_FIELDS})
# Literals without slot syntax, or None for a slot.
PARTS = st.lists(
    st.sampled_from(NAMES_OF_FIELDS)
    | st.sampled_from(["1", "2", "x", " ", ". ", "\n", "\u00e9", "\u0301", "the "]).map(
        lambda text: ("literal", text)
    ),
    min_size=1,
    max_size=10,
)


def written(parts: list[str | tuple[str, str]]) -> str:
    return "".join(f"{{{{{p}}}}}" if isinstance(p, str) else p[1] for p in parts)


def places(parts: list, values: dict[str, str]) -> list[tuple[str, int, int]]:
    """(field, first character, character after the last) of each slot, by concatenation."""
    found, size = [], 0
    for part in parts:
        text = values[part] if isinstance(part, str) else part[1]
        if isinstance(part, str):
            found.append((part, size, size + len(text)))
        size += len(text)
    return found


def used(parts: list, values: dict[str, str]) -> dict[str, str]:
    return {p: values[p] for p in parts if isinstance(p, str)}


def check_values(values: dict[str, str], tokenizer: PromptTokenizer) -> None:
    try:
        for name, value in values.items():
            Field(name, 1000).check(value, tokenizer)
    except FieldValueError:
        assume(False)


def covering(text: str, start: int, stop: int, name: str) -> tuple[int, int]:
    """The slow reference: look at every token of the whole text."""
    tokens = family_tokenizer(name)(
        text, add_special_tokens=False, return_offsets_mapping=True
    ).offset_mapping
    if start == stop:
        first = next((k for k, (_, b) in enumerate(tokens) if b > start), len(tokens))
        return first, first
    inside = [k for k, (a, b) in enumerate(tokens) if a < stop and b > start]
    return inside[0], inside[-1] + 1


@LIGHT
@given(PARTS, VALUES)
@example(["a", "b"], {"a": "1", "b": "2", "c": ""})
@example(["a", "b", "a"], {"a": "", "b": "", "c": ""})
@example(["a", ("literal", "x"), "b"], {"a": "\U0001f469\u200d\U0001f680", "b": "\u0301", "c": ""})
def test_every_slot_has_the_smallest_span_that_covers_its_value(
    parts: list, values: dict[str, str]
) -> None:
    values = used(parts, values)
    check_values(values, SMOL)
    prompt = PromptTemplate.text_template(written(parts)).render(values, SMOL)
    spans = sorted(
        (s for s in prompt.spans if s.kind == "field"), key=lambda s: (s.name, s.occurrence)
    )
    expected = sorted(places(parts, values), key=lambda p: p[0])
    assert [(s.name, s.value) for s in spans] == [(n, values[n]) for n, _, _ in expected]
    for span, (_, start, stop) in zip(spans, expected, strict=True):
        assert (span.start, span.stop) == covering(prompt.text, start, stop, "smollm2")
        assert span.value in SMOL.decode(prompt.token_ids[span.start : span.stop])


@LIGHT
@given(PARTS, VALUES, st.sampled_from(NAMES))
def test_decoding_a_span_of_a_chat_gives_text_that_contains_the_value(
    parts: list, values: dict[str, str], name: str
) -> None:
    tokenizer = prompt_tokenizer(name)
    values = used(parts, values)
    check_values(values, tokenizer)
    messages = [Message("system", f"Hi. {written(parts)} End."), Message("user", "x")]
    messages += [Message("system", f"Late: {written(parts)}.")]
    prompt = PromptTemplate.chat(messages).render(values, tokenizer)
    num_slots = 2 * sum(isinstance(p, str) for p in parts)
    spans = [s for s in prompt.spans if s.kind == "field"]
    assert len(spans) == num_slots
    for span in spans:
        assert values[span.name] == span.value
        assert span.value in tokenizer.decode(prompt.token_ids[span.start : span.stop])
        block = prompt.message_span(span.message_id)
        assert block.start <= span.start <= span.stop <= block.stop + 1


@LIGHT
@given(st.lists(TEXT, min_size=3, max_size=3), st.booleans(), st.sampled_from(NAMES))
def test_tokens_are_those_of_the_text_and_blocks_partition_them(
    texts: list[str], asked: bool, name: str
) -> None:
    tokenizer = prompt_tokenizer(name)
    roles = ("user", "assistant", "user")
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=True)]
    prompt = PromptTemplate.chat(messages).render({}, tokenizer, add_generation_prompt=asked)
    whole = family_tokenizer(name)(prompt.text, add_special_tokens=False).input_ids
    assert list(prompt.token_ids) == whole
    assert [s.kind for s in prompt.spans] == ["message"] * 3 + ["generation"]
    assert [s.start for s in prompt.spans] == [0, *(s.stop for s in prompt.spans[:-1])]
    assert prompt.spans[-1].stop == prompt.num_tokens


HOSTILE = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(
            st.lists(
                st.sampled_from(sorted(prompt_tokenizer(name).control_strings))
                | st.sampled_from(["<", "|", ">", "\\", "[", "im_end", "x", "\n", "</", "think>"])
                | st.characters(),
                max_size=6,
            ).map("".join),
            min_size=3,
            max_size=3,
        ),
    )
)


@LIGHT
@given(HOSTILE)
def test_untrusted_text_adds_no_control_token(case: tuple[str, list[str]]) -> None:
    name, texts = case
    tokenizer = prompt_tokenizer(name)
    roles = ("user", "assistant", "user")
    chat = [Message(role, text) for role, text in zip(roles, texts, strict=True)]
    plain = [Message(role, text) for role, text in zip(roles, "xyz", strict=True)]
    count = tokenizer.count_controls(PromptTemplate.chat(chat).render({}, tokenizer).token_ids)
    empty = PromptTemplate.chat(plain).render({}, tokenizer)
    assert count == tokenizer.count_controls(empty.token_ids)


@LIGHT
@given(HOSTILE)
def test_escaping_leaves_no_control_string_and_is_stable(case: tuple[str, list[str]]) -> None:
    name, texts = case
    tokenizer = prompt_tokenizer(name)
    once = tokenizer.escape("".join(texts))
    assert not any(word in once.text for word in tokenizer.control_strings)
    assert tokenizer.escape(once.text).text == once.text
    if not once.found:
        assert once.text == "".join(texts)


@LIGHT
@given(
    st.lists(
        st.sampled_from(["[", " ", "STATE", "state", "UPDATE", "update", "]", "\u200b", "x"]),
        max_size=12,
    ).map("".join)
)
def test_no_erratum_marker_is_left_in_untrusted_text(text: str) -> None:
    prompt = PromptTemplate.chat([Message("user", text)]).render({}, SMOL)
    assert not re.search(r"\[[\s\u200b]*state[\s\u200b]+update", prompt.text, re.IGNORECASE)


IDS = st.lists(st.integers(min_value=2, max_value=400), max_size=12).map(tuple)


@LIGHT
@given(IDS, IDS, st.booleans())
def test_generated_ids_stand_in_the_prompt_as_generated(
    first: tuple[int, ...], second: tuple[int, ...], ended: bool
) -> None:
    end = (int(family_tokenizer("smollm2").eos_token_id),) if ended else ()
    chat = PromptTemplate.chat(
        [
            Message("user", "Hello"),
            Message("assistant", id="a", generated_ids=first + end),
            Message("user", "More"),
            Message("assistant", id="b", generated_ids=second + end),
        ]
    )
    prompt = chat.render({}, SMOL, add_generation_prompt=True)
    header = SMOL.encode("<|im_start|>assistant\n")
    for name, ids in (("a", first), ("b", second)):
        block = prompt.message_span(name)
        assert prompt.token_ids[block.start : block.stop] == (
            *header, *ids, *SMOL.encode("<|im_end|>\n")
        )  # fmt: skip
    assert prompt.rewrites == ()


@LIGHT
@given(st.lists(st.integers(min_value=0, max_value=400), max_size=30))
def test_streamed_text_is_the_decoding_of_all_ids(ids: list[int]) -> None:
    decoder = SMOL.stream()
    pieces = [decoder.push(i) for i in ids]
    assert not any("\ufffd" in piece[-1:] for piece in pieces)
    pieces.append(decoder.finish())
    assert "".join(pieces) == family_tokenizer("smollm2").decode(ids, skip_special_tokens=True)


@LIGHT
@given(TEXT)
def test_streamed_characters_are_never_cut(text: str) -> None:
    assume("\ufffd" not in text)
    text = SMOL.escape(text).text
    decoder = SMOL.stream()
    pieces = [decoder.push(i) for i in SMOL.encode(text)]
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_stream_of_a_decoder_that_strips_the_first_space() -> None:
    words = {0: " a", 1: " b", 2: "c"}

    def decode(ids) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    decoder = StreamDecoder(decode, frozenset({9}))
    assert [decoder.push(i) for i in (0, 9, 1, 2, 1)] == ["a", "", " b", "c", " b"]


SEGMENTS = st.lists(
    st.sampled_from(["1", "2", "the", " the", " ", "price", "\n", "\u00e9", "\u0301", ".", "x"]),
    min_size=1,
    max_size=10,
).map("".join)


@LIGHT
@given(SEGMENTS, st.sampled_from(["", "1", "x", " ", "\n", "e", "pri"]), SEGMENTS)
def test_segment_and_prompt_share_the_tokens_between_the_edges(
    text: str, before: str, after: str
) -> None:
    template = PromptTemplate.text_template(
        f"{before}{{{{segment:s}}}}{after}", [SegmentText("s", text)]
    )
    prompt = template.render({}, SMOL)
    (span,) = prompt.segments
    left, right = span.start + span.num_edge_left, span.stop - span.num_edge_right
    assert (
        prompt.token_ids[left:right]
        == (span.token_ids[span.standalone_start : span.standalone_stop])
    )
    assert span.token_ids == SMOL.encode(text)
    assert (span.start, span.stop) == covering(
        prompt.text, len(before), len(before) + len(text), "smollm2"
    )
    assert text in SMOL.decode(prompt.token_ids[span.start : span.stop])


TOKENS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=10)


@LIGHT
@given(TOKENS, TOKENS)
def test_longest_match_is_a_common_run_and_none_is_longer(first: list, second: list) -> None:
    def spread(lengths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        tokens, place = [], 0
        for token_id, size in lengths:
            tokens.append((place, place + size, token_id))
            place += size
        return tokens

    a, b = spread(first), spread(second)
    match = longest_match(a, b)
    assert a[match.start : match.stop] == b[match.other_start : match.other_stop]
    longest = max(
        (
            n
            for i in range(len(a))
            for j in range(len(b))
            for n in range(1, min(len(a) - i, len(b) - j) + 1)
            if a[i : i + n] == b[j : j + n]
        ),
        default=0,
    )
    assert match.stop - match.start == longest


def first_difference(old: TokenizedPrompt, new: TokenizedPrompt) -> int:
    pairs = zip(old.token_ids, new.token_ids, strict=False)
    same = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
    return min(old.num_tokens, new.num_tokens) if same is None else same


@LIGHT
@given(LINE, LINE, st.sampled_from(NAMES))
def test_edit_changes_no_token_before_the_first_span(old: str, new: str, name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    check_values({"a": old, "b": new}, tokenizer)
    chat = PromptTemplate.chat(
        [
            Message("system", "The value is: {{a}}."),
            Message("user", "x"),
            ErratumStyle().message("a", revision=None, id="e"),
        ]
    )
    first, second = chat.render({"a": old}, tokenizer), chat.render({"a": new}, tokenizer)
    # A token that joins the value with its neighbour may begin up to one token earlier.
    starts = [min(s.start for s in p.field_spans("a")) for p in (first, second)]
    assert old == new or first_difference(first, second) >= min(starts) - 1
    if old == new:
        assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_many_turns_keep_every_generated_answer(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    end = tokenizer.shape.gaps("assistant", "user")[0].terminator
    stop = tokenizer.encode(end)[:1]
    messages = [Message("system", "The stock is {{stock}}.")]
    for turn in range(12):
        ids = tuple(i for letter in f"answer{turn}" for i in tokenizer.encode(letter))
        messages.append(Message("user", f"Question {turn}"))
        messages.append(Message("assistant", id=f"a{turn}", generated_ids=(*ids, *stop)))
    prompt = PromptTemplate.chat(messages).render({"stock": "12"}, tokenizer)
    text = prompt.text
    for turn in range(12):
        message = next(m for m in messages if m.id == f"a{turn}")
        assert message.generated_ids is not None
        block = prompt.message_span(message.id)
        held = prompt.token_ids[block.start : block.stop]
        joined = ",".join(map(str, held))
        assert ",".join(map(str, message.generated_ids[:-1])) in joined
        assert f"answer{turn}" in text


def test_refusals_of_values_come_before_rendering() -> None:
    with pytest.raises(TemplateError):
        PromptTemplate.text_template("{{a}}").render({"a": "x\ny"}, SMOL)


@given(st.sets(st.text("ab<", min_size=1, max_size=5), max_size=8))
@laws(300)
def test_words_that_another_reaches_into_are_found(words: set[str]) -> None:
    def reaches(first: str, second: str) -> bool:
        ends = [first[k:] for k in range(1, len(first))]
        return any(second.startswith(end) or end.startswith(second) for end in ends)

    expected = {word for word in words if any(reaches(other, word) for other in words)}
    assert set(_reached_into(words)) == expected

"""Prompt templates: their changes, their values and the spans of what they show."""

from __future__ import annotations

import pytest
from helpers_prompt import build_tokenizer, family_tokenizer, prompt_tokenizer

from kvnotes.errors import (
    FieldValueError,
    MissingFieldError,
    TemplateError,
    UnknownFieldError,
    UnknownSegmentError,
)
from kvnotes.prompt import (
    ErratumStyle,
    Message,
    PromptTemplate,
    PromptTokenizer,
    SegmentText,
    TokenizedPrompt,
)

TOKENIZER = prompt_tokenizer("smollm2")
CHAT = PromptTemplate.chat(
    [
        Message("system", "Stock {{stock}}, price {{price}}.", id="sys"),
        Message("user", "Hello {{stock}}"),
        Message("assistant", "Hi"),
    ]
)
VALUES = {"stock": "12", "price": "10:45"}


def ids_of(template: PromptTemplate) -> list[str]:
    return [m.id for m in template.messages]


def spelled(prompt: TokenizedPrompt, start: int, stop: int) -> str:
    return TOKENIZER.decode(prompt.token_ids[start:stop])


def test_messages_get_ids_that_no_other_message_has() -> None:
    assert ids_of(CHAT) == ["sys", "m0", "m1"]
    assert ids_of(CHAT.append(Message("user", "x"))) == ["sys", "m0", "m1", "m2"]
    assert ids_of(PromptTemplate.chat([Message("user", id="m7"), Message("user")])) == ["m7", "m8"]


def test_two_messages_of_one_id_are_refused() -> None:
    with pytest.raises(TemplateError, match="two messages have the id 'sys'"):
        CHAT.append(Message("user", "x", id="sys"))


def test_changes_return_new_templates() -> None:
    user = Message("user", "x", id="x")
    assert ids_of(CHAT.insert(user, "m0")) == ["sys", "x", "m0", "m1"]
    assert ids_of(CHAT.insert(user, None)) == ["sys", "m0", "m1", "x"]
    assert ids_of(CHAT.remove("m0")) == ["sys", "m1"]
    assert ids_of(CHAT.replace("m0", user)) == ["sys", "x", "m1"]
    assert ids_of(CHAT.replace("m0", Message("user", "y"))) == ["sys", "m0", "m1"]
    assert ids_of(CHAT.move("sys", None)) == ["m0", "m1", "sys"]
    assert ids_of(CHAT.move("sys", "m1")) == ["m0", "sys", "m1"]
    assert ids_of(CHAT.move("m1", "sys")) == ["m1", "sys", "m0"]
    assert ids_of(CHAT.move("m0", "m0")) == ["sys", "m0", "m1"]
    assert ids_of(CHAT) == ["sys", "m0", "m1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.remove("sis"),
        lambda t: t.replace("sis", Message("user")),
        lambda t: t.move("sis", None),
        lambda t: t.move("m0", "sis"),
        lambda t: t.insert(Message("user"), "sis"),
    ],
)
def test_unknown_message_names_the_nearest(change) -> None:
    with pytest.raises(TemplateError, match="did you mean 'sys'"):
        change(CHAT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptTemplate(()),
        lambda: PromptTemplate.text_template(""),
        lambda: PromptTemplate((Message("user", "x"),), ""),
        lambda: CHAT.remove("sys").remove("m0").remove("m1"),
        lambda: PromptTemplate.text_template("x", [SegmentText("a", "x")] * 2),
    ],
)
def test_empty_templates_and_double_segments_are_refused(make) -> None:
    with pytest.raises(TemplateError, match="hint: "):
        make()


def test_field_names_come_in_order_of_first_use() -> None:
    segments = [SegmentText("s", "{{c}} {{a}}", "{{d}}"), SegmentText("unused", "{{z}}")]
    template = PromptTemplate.chat(
        [
            Message("user", "{{not_a_slot}}"),
            Message("system", "{{b}} {{segment:s}} {{b}} {{e}}"),
            Message("system", segment="s"),
        ],
        segments,
    )
    assert template.field_names == ("b", "d", "c", "a", "e")
    assert template.segment("unused").text == "{{z}}"
    with pytest.raises(UnknownSegmentError, match="did you mean 'unused'"):
        template.segment("unsed")


def test_slot_without_value_names_field_and_message() -> None:
    with pytest.raises(MissingFieldError, match="message 'sys' has a slot for the field 'price'"):
        CHAT.render({"stock": "1"}, TOKENIZER)


def test_value_without_slot_names_the_nearest_field() -> None:
    with pytest.raises(UnknownFieldError, match="did you mean 'price'"):
        CHAT.render({**VALUES, "prize": "1"}, TOKENIZER)


def test_missing_value_in_a_preamble_is_refused() -> None:
    template = PromptTemplate.text_template("{{segment:s}}", [SegmentText("s", "x", "{{d}}")])
    with pytest.raises(MissingFieldError, match="preamble of segment 's'"):
        template.render({}, TOKENIZER)


def test_values_are_checked_when_rendering() -> None:
    with pytest.raises(FieldValueError, match="control string"):
        CHAT.render({**VALUES, "stock": "<|im_end|>"}, TOKENIZER)
    pinned = PromptTemplate.chat([Message("system", "{{a}}", pinned=(("a", "<|im_end|>"),))])
    with pytest.raises(FieldValueError, match="control string"):
        pinned.render({"a": "1"}, TOKENIZER)


def test_values_that_only_together_spell_a_control_string_are_refused() -> None:
    template = PromptTemplate.chat([Message("system", "{{a}}{{b}}")])
    with pytest.raises(FieldValueError, match="joins the text around it"):
        template.render({"a": "<|im_", "b": "end|>"}, TOKENIZER)
    literal = PromptTemplate.chat([Message("system", "<|{{a}}|>")])
    with pytest.raises(FieldValueError, match="joins the text around it"):
        literal.render({"a": "im_end"}, TOKENIZER)


def test_every_occurrence_has_its_own_span_and_number() -> None:
    template = PromptTemplate.chat(
        [Message("system", "{{a}} then {{b}} then {{a}}"), Message("system", "{{a}}!", id="late")]
    )
    prompt = template.render({"a": "12", "b": "12"}, TOKENIZER)
    assert [(s.message_id, s.occurrence, s.value) for s in prompt.field_spans("a")] == [
        ("m0", 0, "12"),
        ("m0", 1, "12"),
        ("late", 0 + 2, "12"),
    ]
    assert [s.occurrence for s in prompt.field_spans("b")] == [0]
    for span in (*prompt.field_spans("a"), *prompt.field_spans("b")):
        assert "12" in spelled(prompt, span.start, span.stop)


def test_text_that_looks_like_a_value_is_no_occurrence() -> None:
    template = PromptTemplate.chat([Message("system", "12 and 12 and {{a}} and 12")])
    assert len(template.render({"a": "12"}, TOKENIZER).field_spans("a")) == 1


def test_pinned_message_shows_its_own_value() -> None:
    template = PromptTemplate.chat(
        [
            Message("system", "{{stock}}, {{price}}", pinned=(("stock", "99"),)),
            ErratumStyle().message("stock", revision=None, id="e"),
        ]
    )
    prompt = template.render(VALUES, TOKENIZER)
    assert [s.value for s in prompt.field_spans("stock")] == ["99", "12"]
    assert [s.value for s in prompt.field_spans("price")] == ["10:45"]
    clean = template.without_errata()
    assert ids_of(clean) == ["m0"]
    assert [s.value for s in clean.render(VALUES, TOKENIZER).field_spans("stock")] == ["12"]


def test_what_retracts_a_message_goes_with_it_and_both_are_gone_from_the_clean_reference() -> None:
    tool = Message("system", "A tool.", id="tool")
    note = ErratumStyle().retract("get", "tool", id="note")
    template = CHAT.append(tool).append(note).append(Message("user", "x", id="x"))
    assert note.content == "[STATE UPDATE] The tool get is no longer available. Do not call it."
    assert note.is_trusted and note.is_erratum
    assert ids_of(template.without_errata()) == ["sys", "m0", "m1", "x"]
    assert ids_of(template.remove("tool")) == ["sys", "m0", "m1", "x"]
    assert ids_of(template.remove("note")) == ["sys", "m0", "m1", "tool", "x"]


@pytest.mark.parametrize(
    "options",
    [{"trusted": False}, {"erratum_of": "stock"}, {"generated_ids": (1,), "role": "assistant"}],
)
def test_a_retraction_is_a_trusted_message_of_its_own(options) -> None:
    with pytest.raises(TemplateError, match="retracts 'tool'"):
        Message(**{"role": "user", "content": "x", "retracts": "tool", **options})


def test_a_segment_joins_under_a_name_that_no_other_text_uses() -> None:
    policy, other = SegmentText("policy", "Never sell."), SegmentText("policy", "Never buy.")
    held = CHAT.with_segment(policy)
    assert held.segments == (policy,) and held.with_segment(policy) is held
    assert held.with_segment(other).segments == (other,)
    used = held.append(Message("system", "Mind: {{segment:policy}}"))
    assert used.with_segment(policy) is used
    with pytest.raises(TemplateError, match=r"'Never sell\.' at character 0.*'Never buy\.'"):
        used.with_segment(other)


def test_span_is_every_token_that_covers_a_character_of_the_value() -> None:
    # The value's digit merges with the digit of its neighbour into one token.
    template = PromptTemplate.text_template("{{a}}{{b}}")
    prompt = template.render({"a": "1", "b": "2"}, TOKENIZER)
    assert prompt.num_tokens == 1
    assert [(s.start, s.stop) for s in prompt.spans if s.kind == "field"] == [(0, 1), (0, 1)]


def test_empty_value_owns_no_token() -> None:
    template = PromptTemplate.text_template("a {{x}} b{{x}}")
    prompt = template.render({"x": ""}, TOKENIZER)
    assert prompt.text == "a  b"
    spans = prompt.field_spans("x")
    assert all(span.start == span.stop for span in spans)
    assert spelled(prompt, 0, spans[0].start) == "a "
    assert spans[1].start == prompt.num_tokens


def test_empty_value_inside_a_merged_token_stands_at_that_token() -> None:
    prompt = PromptTemplate.text_template("1{{x}}2").render({"x": ""}, TOKENIZER)
    assert prompt.num_tokens == 1
    assert [(s.start, s.stop) for s in prompt.field_spans("x")] == [(0, 0)]


@pytest.mark.parametrize("value", ["", "a"])
def test_value_may_be_the_whole_content(value: str) -> None:
    prompt = PromptTemplate.chat([Message("system", "{{x}}"), Message("user", "u")]).render(
        {"x": value}, TOKENIZER
    )
    (span,) = prompt.field_spans("x")
    block = prompt.message_span("m0")
    assert block.start <= span.start <= span.stop <= block.stop
    assert spelled(prompt, span.start, span.stop) == value


@pytest.mark.parametrize("value", [" 12", "12 ", "\u00a012"])
def test_trimmed_value_is_refused_and_both_texts_are_named(value: str) -> None:
    template = PromptTemplate.chat([Message("system", "{{x}}")])
    template.render({"x": value}, TOKENIZER)
    with pytest.raises(TemplateError) as caught:
        template.render({"x": value}, prompt_tokenizer("llama3"))
    assert repr(value) in str(caught.value)
    assert "'12'" in str(caught.value)
    assert "hint: " in str(caught.value)


def test_empty_value_at_a_trimmed_edge_is_taken() -> None:
    template = PromptTemplate.chat([Message("system", " {{y}} x is {{x}} ")])
    prompt = template.render({"x": "", "y": ""}, prompt_tokenizer("llama3"))
    assert prompt.text.endswith("x is<|eot_id|>")
    assert all(s.start == s.stop for s in prompt.spans if s.kind == "field")


@pytest.mark.parametrize("change", ["upper", "replace('12', '13')", "reverse"])
def test_altered_value_is_refused(change: str) -> None:
    source = "{% for m in messages %}[{{ m.content | CHANGE }}]{% endfor %}".replace(
        "CHANGE", change
    )
    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), source)
    template = PromptTemplate.chat([Message("system", "ab {{x}} cd")])
    with pytest.raises(TemplateError, match=r"'x'.*m0|m0.*'x'"):
        template.render({"x": "a12z"}, tokenizer)


def test_template_that_looks_at_its_content_is_refused_only_for_fields() -> None:
    source = (
        "{% for m in messages %}{% if m.content.startswith('ab') %}<{{ m.content }}>"
        "{% else %}({{ m.content }}){% endif %}{% endfor %}"
    )
    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), source)
    plain = PromptTemplate.chat([Message("user", "abc"), Message("system", "x{{x}}")])
    prompt = plain.render({"x": "1"}, tokenizer)
    assert prompt.text == "<abc>(x1)"
    assert [spelled(prompt, s.start, s.stop) for s in prompt.field_spans("x")] == ["1"]
    with pytest.raises(TemplateError, match="depending on the text itself"):
        PromptTemplate.chat([Message("system", "ab{{x}}")]).render({"x": "1"}, tokenizer)


def test_content_that_a_template_shows_twice_has_two_occurrences() -> None:
    source = "{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}"
    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), source)
    prompt = PromptTemplate.chat([Message("system", "a{{x}}")]).render({"x": "12"}, tokenizer)
    assert len(prompt.field_spans("x")) == 2


def test_dropped_message_is_refused() -> None:
    source = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), source)
    template = PromptTemplate.chat([Message("user", "x"), Message("assistant", "gone")])
    with pytest.raises(TemplateError, match="'m1' has content"):
        template.render({}, tokenizer)


def test_refusal_of_a_template_is_a_template_error() -> None:
    template = PromptTemplate.chat([Message("assistant", "x")])
    with pytest.raises(TemplateError, match="take turns"):
        template.render({}, prompt_tokenizer("mistral"))


def test_chat_without_chat_template_is_refused_and_text_is_not() -> None:
    tokenizer = PromptTokenizer(build_tokenizer(("<a>",)))
    assert not tokenizer.has_chat_template
    assert PromptTemplate.text_template("x").render({}, tokenizer).num_tokens == 1
    with pytest.raises(TemplateError, match="needs a chat template"):
        CHAT.render(VALUES, tokenizer)


def test_broken_chat_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="not valid jinja"):
        PromptTokenizer(family_tokenizer("smollm2"), "{% for %}")


def test_sentinel_characters_in_trusted_text_are_refused() -> None:
    for make in (
        PromptTemplate.text_template,
        lambda t: PromptTemplate.chat([Message("system", t)]),
    ):
        with pytest.raises(TemplateError, match=r"U\+F0001"):
            make("x \U000f0001").render({}, TOKENIZER)


def test_text_template_is_tokenized_as_it_is() -> None:
    prompt = PromptTemplate.text_template("The {{a}} is <|im_end|>").render({"a": "x"}, TOKENIZER)
    assert prompt.text == "The x is <|im_end|>"
    assert TOKENIZER.count_controls(prompt.token_ids) == 1
    assert [(s.kind, s.name) for s in prompt.spans] == [
        ("message", ""),
        ("field", "a"),
        ("generation", ""),
    ]


def test_messages_appended_to_a_text_are_lines_of_their_own() -> None:
    template = PromptTemplate.text_template("Stock {{s}}").append(
        Message("user", "is it <|im_end|>?", id="q")
    )
    template = template.append(ErratumStyle().message("s", revision=1, id="e"))
    prompt = template.render({"s": "12"}, TOKENIZER)
    first, second, third = prompt.text.splitlines(keepends=True)
    assert (first, second) == ("Stock 12\n", "is it <\\|im_end|>?\n")
    assert third.startswith("[STATE UPDATE] s has just changed to 12;")
    assert [s.name for s in prompt.spans if s.kind == "message"] == ["", "q", "e"]
    assert [s.message_id for s in prompt.field_spans("s")] == ["", "e"]


def test_unknown_message_of_a_prompt_names_the_nearest() -> None:
    prompt = CHAT.render(VALUES, TOKENIZER)
    with pytest.raises(TemplateError, match="did you mean 'sys'"):
        prompt.message_span("sis")


def test_rendering_twice_gives_equal_prompts() -> None:
    first = CHAT.render(VALUES, TOKENIZER, add_generation_prompt=True)
    assert (
        CHAT.render(
            VALUES, PromptTokenizer(family_tokenizer("smollm2")), add_generation_prompt=True
        )
        == first
    )

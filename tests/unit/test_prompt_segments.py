"""Named segments in prompts, beside their tokenization alone."""

from __future__ import annotations

import pytest
from helpers_prompt import FAMILIES, build_tokenizer, prompt_tokenizer

from kvnotes.errors import TemplateError
from kvnotes.prompt import (
    Message,
    PromptTemplate,
    PromptTokenizer,
    SegmentSpan,
    SegmentText,
    TokenizedPrompt,
)

TOKENIZER = prompt_tokenizer("smollm2")
POLICY = SegmentText("policy", "Never sell below {{price}}.")
VALUES = {"price": "10:45"}


def check_edges(prompt: TokenizedPrompt, span: SegmentSpan) -> None:
    left, right = span.start + span.num_edge_left, span.stop - span.num_edge_right
    alone = span.token_ids[span.standalone_start : span.standalone_stop]
    assert prompt.token_ids[left:right] == alone
    assert span.start <= left <= right <= span.stop


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_whole_message_is_the_same_alone_or_joined_into_its_neighbour(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    template = PromptTemplate.chat(
        [Message("system", "Be brief."), Message("system", segment="policy"), Message("user", "x")],
        [POLICY],
    )
    prompt = template.render(VALUES, tokenizer)
    (span,) = prompt.segments
    check_edges(prompt, span)
    assert (span.name, span.message_id, span.occurrence) == ("policy", "m1", 0)
    text = tokenizer.decode(span.token_ids)
    if tokenizer.capabilities.adjacent_system:
        block = prompt.message_span("m1")
        assert (span.start, span.stop) == (block.start, block.stop)
        assert (span.num_edge_left, span.num_edge_right) == (0, 0)
        assert span.token_ids == prompt.token_ids[block.start : block.stop]
        if name != "deepseek":
            assert text != "Never sell below 10:45."
    else:
        assert text == "Never sell below 10:45."
    assert "Never sell below 10:45." in text


@pytest.mark.parametrize("name", ["llama3", "gemma", "smollm2"])
def test_first_message_as_a_segment_leaves_the_begin_token_out(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    template = PromptTemplate.chat(
        [Message("user", segment="policy"), Message("assistant", "x")], [POLICY]
    )
    prompt = template.render(VALUES, tokenizer)
    (span,) = prompt.segments
    check_edges(prompt, span)
    assert span.start == (0 if name == "smollm2" else 1)
    assert (span.num_edge_left, span.num_edge_right) == (0, 0)
    assert prompt.message_span("m0").start == 0


def test_inline_segment_has_its_text_alone_and_its_edges_counted() -> None:
    # "the" and " the" are different tokens, and so the first token differs.
    segment = SegmentText("s", "the price is high")
    template = PromptTemplate.text_template("x {{segment:s}} y", [segment])
    prompt = template.render({}, TOKENIZER)
    (span,) = prompt.segments
    check_edges(prompt, span)
    assert span.token_ids == TOKENIZER.encode("the price is high")
    assert TOKENIZER.decode(prompt.token_ids[span.start : span.stop]) == " the price is high"
    assert span.num_edge_left == 1
    assert TOKENIZER.decode(span.token_ids[: span.standalone_start]) == "the"
    assert (span.num_edge_right, span.standalone_stop) == (0, len(span.token_ids))


def test_inline_segment_at_a_line_of_its_own_has_no_edges() -> None:
    template = PromptTemplate.text_template("x\n{{segment:policy}}\n", [POLICY])
    prompt = template.render(VALUES, TOKENIZER)
    (span,) = prompt.segments
    assert span.token_ids == prompt.token_ids[span.start : span.stop]
    assert (span.num_edge_left, span.num_edge_right) == (0, 0)
    assert (span.standalone_start, span.standalone_stop) == (0, len(span.token_ids))


def test_segment_inside_one_merged_token_matches_nothing() -> None:
    template = PromptTemplate.text_template("1{{segment:s}}", [SegmentText("s", "2")])
    prompt = template.render({}, TOKENIZER)
    (span,) = prompt.segments
    check_edges(prompt, span)
    assert (span.start, span.stop) == (0, 1)
    assert (span.standalone_start, span.standalone_stop) == (0, 0)
    assert span.num_edge_left + span.num_edge_right == 1


def test_segment_of_an_empty_field_owns_no_token() -> None:
    template = PromptTemplate.text_template("a{{segment:s}}b", [SegmentText("s", "{{x}}")])
    (span,) = template.render({"x": ""}, TOKENIZER).segments
    assert span.start == span.stop
    assert span.token_ids == ()


def test_fields_inside_a_segment_have_spans_in_the_prompt() -> None:
    template = PromptTemplate.chat(
        [Message("system", "{{price}} {{segment:policy}}"), Message("system", segment="policy")],
        [POLICY],
    )
    prompt = template.render(VALUES, TOKENIZER)
    assert [s.message_id for s in prompt.field_spans("price")] == ["m0", "m0", "m1"]
    assert [(s.name, s.occurrence) for s in prompt.segments] == [("policy", 0), ("policy", 1)]
    kinds = [s for s in prompt.spans if s.kind == "segment"]
    assert [(s.start, s.stop) for s in kinds] == [(s.start, s.stop) for s in prompt.segments]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_preamble_and_segment_stand_as_the_two_messages_would(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    segment = SegmentText("s", "Never sell.", "The price is {{price}}.", (("price", ("1", "2")),))
    template = PromptTemplate.chat(
        [Message("system", "Be brief."), Message("system", segment="s"), Message("user", "x")],
        [segment],
    )
    prompt = template.render(VALUES, tokenizer)
    (span,) = prompt.segments
    assert span.variant_values == (("price", "10:45"),)
    assert "Be brief." in prompt.text
    assert "The price is" not in prompt.text
    alone = PromptTemplate.chat(
        [Message("system", "The price is 10:45."), Message("system", "Never sell.")]
    ).render({}, tokenizer)
    joined = (*span.preamble_ids, *span.token_ids)
    assert tokenizer.decode(alone.token_ids).startswith(tokenizer.decode(joined))
    if tokenizer.capabilities.adjacent_system:
        assert joined == alone.token_ids


def test_preamble_follows_the_current_value_and_not_the_pinned_one() -> None:
    segment = SegmentText("s", "Never sell.", "The price is {{price}}.")
    template = PromptTemplate.chat(
        [Message("system", segment="s", pinned=(("price", "1"),))], [segment]
    )
    spans = [template.render({"price": v}, TOKENIZER).segments[0] for v in ("10", "20")]
    assert [s.variant_values for s in spans] == [(("price", "10"),), (("price", "20"),)]
    assert spans[0].preamble_ids != spans[1].preamble_ids
    assert spans[0].token_ids == spans[1].token_ids
    assert TOKENIZER.decode(spans[0].preamble_ids) == (
        "<|im_start|>system\nThe price is 10.<|im_end|>\n"
    )


def test_preamble_of_an_inline_segment_ends_with_the_header_of_its_message() -> None:
    segment = SegmentText("s", "Never sell.", "The price.")
    template = PromptTemplate.chat([Message("user", "See {{segment:s}}", trusted=True)], [segment])
    (span,) = template.render({}, TOKENIZER).segments
    assert TOKENIZER.decode(span.preamble_ids) == (
        "<|im_start|>system\nThe price.<|im_end|>\n<|im_start|>user\n"
    )


def test_preamble_of_a_text_template_is_its_text() -> None:
    segment = SegmentText("s", "Never sell.", "The {{x}}. ")
    template = PromptTemplate.text_template("{{segment:s}}", [segment])
    (span,) = template.render({"x": "12"}, TOKENIZER).segments
    assert span.preamble_ids == TOKENIZER.encode("The 12. ")


def test_segments_match_also_where_offsets_are_trimmed() -> None:
    trimming = PromptTokenizer(build_tokenizer(("<a>",), trim_offsets=True))
    plain = PromptTokenizer(build_tokenizer(("<a>",)))
    template = PromptTemplate.text_template(
        "a {{x}} b {{segment:s}} {{y}}c", [SegmentText("s", " the price \n")]
    )
    values = {"x": " ", "y": " "}
    first, second = template.render(values, trimming), template.render(values, plain)
    assert (first.spans, first.segments) == (second.spans, second.segments)


@pytest.mark.parametrize("text", ["Never sell.\n", "\n Never sell.", "\n"])
def test_segment_may_be_trimmed_by_the_template_and_shows_what_is_left(text: str) -> None:
    tokenizer = prompt_tokenizer("llama3")
    for message in (Message("system", segment="s"), Message("system", "{{segment:s}}")):
        template = PromptTemplate.chat([Message("system", "x"), message], [SegmentText("s", text)])
        prompt = template.render({}, tokenizer)
        (span,) = prompt.segments
        check_edges(prompt, span)
        shown = tokenizer.decode(prompt.token_ids[span.start : span.stop])
        assert text.strip() in shown
        assert tokenizer.decode(span.token_ids).strip() == shown.strip()
        assert "\n\n\n" not in prompt.text


def test_segment_that_the_template_changes_is_refused_in_few_words() -> None:
    source = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    tokenizer = PromptTokenizer(build_tokenizer(("<a>",)), source)
    template = PromptTemplate.chat([Message("system", segment="s")], [SegmentText("s", "ab" * 999)])
    with pytest.raises(TemplateError, match=r"'ababab.*\.\.\..*'ABABAB") as caught:
        template.render({}, tokenizer)
    assert len(str(caught.value)) < 500

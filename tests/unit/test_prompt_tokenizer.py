"""The tokenizer: identity, pieces that concatenate, stop tokens, chat templates."""

from __future__ import annotations

import pytest
from helpers_prompt import build_tokenizer, family_tokenizer, prompt_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvnotes.errors import TemplateError
from kvnotes.prompt import Message, PromptTemplate, PromptTokenizer
from kvnotes.prompt.tokens import Match, TokenMap, longest_match

BLOCKS = "{% for m in messages %}<a>{{ m.content }}{% endfor %}"


def render(tokenizer: PromptTokenizer, *texts: str) -> tuple[int, ...]:
    chat = PromptTemplate.chat([Message("user", text) for text in texts])
    return chat.render({}, tokenizer).token_ids


def test_identity_is_that_of_tokenizer_and_template() -> None:
    base = build_tokenizer(("<a>",))
    same = PromptTokenizer(build_tokenizer(("<a>",)), BLOCKS)
    assert PromptTokenizer(base, BLOCKS).identity == same.identity
    others = {
        PromptTokenizer(base, BLOCKS + " ").identity,
        PromptTokenizer(base).identity,
        PromptTokenizer(build_tokenizer(("<b>",)), BLOCKS).identity,
        PromptTokenizer(build_tokenizer(("<a>",), eos="<a>"), BLOCKS).identity,
        same.identity,
    }
    assert len(others) == 5


def test_later_changes_of_the_tokenizer_are_not_seen() -> None:
    base = build_tokenizer(("<a>",))
    wrapped = PromptTokenizer(base, BLOCKS)
    before = wrapped.encode("the <new> price")
    base.add_tokens(["<new>"])
    base.backend_tokenizer.enable_truncation(2)
    assert wrapped.encode("the <new> price") == before
    fresh = PromptTokenizer(base, BLOCKS)
    assert fresh.encode("the <new> price") != before
    assert len(fresh.encode("the <new> price")) > 2


def test_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TemplateError, match="fast tokenizer is needed"):
        PromptTokenizer(object())


def test_default_of_several_chat_templates_is_used() -> None:
    base = build_tokenizer(("<a>",))
    base.chat_template = {"default": BLOCKS, "tools": "x"}
    assert PromptTokenizer(base).identity == PromptTokenizer(base, BLOCKS).identity


def test_special_tokens_are_decoded_and_streamed_text_leaves_them_out() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    ids = tokenizer.encode("<|im_start|>the price<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>the price<|im_end|>"
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == "the price"


def test_shape_knows_how_a_turn_opens_when_it_is_the_last_and_when_not() -> None:
    headers = [gap.header for gap in prompt_tokenizer("qwen3").shape.gaps("user", "assistant")]
    assert headers == [
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_start|>assistant\n",
    ]


def pieces(tokenizer: PromptTokenizer, text: str, *borders: int) -> list[str]:
    return [text[p.start : p.stop] for p in TokenMap(text, borders, (), tokenizer).pieces]


def test_text_is_cut_at_borders_before_control_tokens_only() -> None:
    tokenizer = PromptTokenizer(build_tokenizer(("<a>",)), BLOCKS)
    assert pieces(tokenizer, "xx<a>yy", 1, 2) == ["xx", "<a>yy"]
    assert pieces(tokenizer, "xx<a>yy") == ["xx<a>yy"]


@pytest.mark.parametrize(
    "specials",
    [
        (AddedToken("<a>", lstrip=True, special=True),),
        ("<a>", "x<a>"),
        ("<a>", " <a"),
    ],
)
def test_text_is_not_cut_where_a_control_token_reaches_to_the_left(specials: tuple) -> None:
    base = build_tokenizer(())
    base.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer = PromptTokenizer(base, BLOCKS)
    assert pieces(tokenizer, "x  <a>y", 3) == ["x  <a>y"]
    assert pieces(tokenizer, "xx  <a>y", 4) == ["xx  <a>y"]


def test_white_space_that_a_control_token_takes_in_is_still_untrusted_text() -> None:
    base = build_tokenizer(())
    base.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<a>", lstrip=True, rstrip=True, special=True)]}
    )
    tokenizer = PromptTokenizer(base, BLOCKS)
    for text in ("ends in blanks  ", "  begins", " "):
        whole = base(f"<a>{text}<a>more", add_special_tokens=False).input_ids
        assert list(render(tokenizer, text, "more")) == whole
    template = PromptTemplate.chat([Message("system", "{{x}} {{y}}")])
    prompt = template.render({"x": " 1", "y": ""}, tokenizer)
    (span,) = prompt.field_spans("x")
    assert (span.start, span.stop) == (0, 2)


def test_text_behind_a_generated_end_token_is_tokenized_behind_it() -> None:
    tokenizer = prompt_tokenizer("phi")
    ids = tokenizer.encode("no<|end|>")
    chat = [Message("user", "x"), Message("assistant", generated_ids=ids), Message("user", "y")]
    prompt = PromptTemplate.chat(chat).render({}, tokenizer)
    # The line break is part of the end token, and no token of its own.
    assert prompt.token_ids == tokenizer.encode(prompt.text)
    assert prompt.rewrites == ()


def test_unknown_token_for_ordinary_text_is_no_control_token() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<a>": 1, "the": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    base = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=["<a>"]
    )
    tokenizer = PromptTokenizer(base, BLOCKS)
    assert render(tokenizer, "the price") == (1, 2, 0)
    assert tokenizer.encode_untrusted("<unk> <a>").count(1) == 0


def test_longest_match_is_the_longest_of_several() -> None:
    first = [(0, 1, 7), (1, 2, 8), (2, 3, 9), (3, 4, 9), (4, 6, 1), (6, 7, 2)]
    second = [(0, 1, 7), (1, 3, 5), (3, 4, 9), (4, 6, 1), (6, 7, 3)]
    assert longest_match(first, second) == Match(3, 5, 2, 4)
    assert longest_match(first[:1], second) == Match(0, 1, 0, 1)
    assert longest_match(first[1:2], second) == Match(0, 0, 0, 0)


def test_rendering_equals_transformers_where_a_template_marks_generations() -> None:
    source = (
        "{% for m in messages %}<a>{% generation %}\n  {{- m.content }}{% endgeneration %}\n"
        "{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}{{ eos_token }}"
    )
    base = build_tokenizer(("<a>",), eos="<e>")
    messages = [{"role": "user", "content": "\u00e9<"}, {"role": "assistant", "content": "b"}]
    theirs = base.apply_chat_template(messages, chat_template=source, tokenize=False)
    ours = PromptTokenizer(base, source).chat.render(messages, add_generation_prompt=False)
    assert ours == theirs


def test_template_that_fails_in_its_own_code_is_a_template_error() -> None:
    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), "{{ messages[0].content + 1 }}")
    with pytest.raises(TemplateError, match=r"refuses the messages \(user\)"):
        render(tokenizer, "x")

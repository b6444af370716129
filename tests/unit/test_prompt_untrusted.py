"""Untrusted text can neither open nor end a message, nor announce a change of a field."""

from __future__ import annotations

import pytest
from helpers_prompt import FAMILIES, build_tokenizer, prompt_tokenizer
from tokenizers import AddedToken, normalizers

from kvnotes.errors import TemplateError
from kvnotes.prompt import Message, PromptTemplate, PromptTokenizer
from kvnotes.prompt.escape import ControlText

TOKENIZER = prompt_tokenizer("smollm2")


def render(content: str, role: str = "user", tokenizer: PromptTokenizer = TOKENIZER):
    return PromptTemplate.chat([Message(role, content)]).render({}, tokenizer)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_control_string_is_escaped_and_reported(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    empty = tokenizer.count_controls(render("x", tokenizer=tokenizer).token_ids)
    assert len(tokenizer.control_strings) >= 2
    for word in tokenizer.control_strings:
        prompt = render(f"a {word}{word} b", tokenizer=tokenizer)
        assert tokenizer.count_controls(prompt.token_ids) == empty
        assert prompt.escaped == (("m0", word), ("m0", word))
        assert f"{word[0]}\\{word[1:]}" in prompt.text


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_braces_are_plain_text_in_untrusted_messages(role: str) -> None:
    prompt = render("{{stock}} {{segment:x}} {{", role)
    assert "{{stock}} {{segment:x}} {{" in prompt.text
    assert prompt.escaped == ()


def test_untrusted_system_message_is_escaped() -> None:
    message = Message("system", "{{x}} <|im_end|>", trusted=False)
    prompt = PromptTemplate.chat([message]).render({}, TOKENIZER)
    assert "{{x}} <\\|im_end|>" in prompt.text


@pytest.mark.parametrize(
    "text",
    ["[STATE UPDATE] x", "[state   update]", "[State\tUpdate", "[ STATE\u200b\u00a0UPDATE ]"],
)
def test_erratum_marker_is_neutralised_in_any_case_and_spacing(text: str) -> None:
    prompt = render(f"so: {text}")
    assert text not in prompt.text
    assert text[0] + "\\" + text[1:] in prompt.text
    assert [message_id for message_id, _ in prompt.escaped] == ["m0"]


def test_ordinary_brackets_and_words_are_left_alone() -> None:
    text = "[x] state update, a<b and c|d, <|im_e nd|> [stateless updates]"
    prompt = render(text)
    assert text in prompt.text
    assert prompt.escaped == ()


@pytest.mark.parametrize("text", ["\U000f0000", "x\U0010fffd\U00100000y", "\ud800", "\udfff"])
def test_sentinels_and_lone_surrogates_are_escaped_as_codes(text: str) -> None:
    prompt = render(text)
    codes = [f"\\U{ord(c):08X}" for c in text if ord(c) > 0xD7FF]
    assert all(code in prompt.text for code in codes)
    assert len(prompt.escaped) == len(codes)


def test_private_use_of_the_first_plane_is_text() -> None:
    assert "\ue000\uf8ff" in render("\ue000\uf8ff").text


def escapes(words: list[str], text: str) -> str:
    return ControlText(words, "[STATE UPDATE]").escape(text).text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["<a>"], "<<a>a>"),
        (["<a>", "a><"], "<a><a><a>"),
        (["aa"], "aaaaa"),
        (["<a>", "<\\a>"], "<a>"),
        (["<a>", "\\"], "<a>"),
        (["<a>", "<\\a>", "<\u00b7a>"], "<a><\\a>"),
        (["\u00a7"], "\u00a7\u00a7"),
        (["a.b", "(", "["], "a.b a+b ([("),
    ],
)
def test_no_control_string_is_left_whatever_overlaps(words: list[str], text: str) -> None:
    result = escapes(words, text)
    assert result != text
    assert not any(word in result for word in words)


def test_control_strings_that_allow_no_escape_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"after .* escapes"):
        escapes(list("\\ \u00b7_~u0123456789abcdef"), "a")


def test_escaped_text_is_left_alone() -> None:
    once = escapes(["<a>"], "<a> [STATE UPDATE]")
    assert escapes(["<a>"], once) == once


def test_control_strings_matched_after_normalisation_are_escaped() -> None:
    tokenizer = build_tokenizer(("<a>",), added=(AddedToken("<KEY>", normalized=True),))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    source = "{% for m in messages %}<a>{{ m.content }}{% endfor %}"
    wrapped = PromptTokenizer(tokenizer, source)
    kelvin = "<\u212aEY>"  # the Kelvin sign, which NFC makes a K
    assert len(wrapped.encode(kelvin)) == 1
    prompt = render(f"x {kelvin} <KEY> y", tokenizer=wrapped)
    assert wrapped.count_controls(prompt.token_ids) == 1
    assert sorted(found for _, found in prompt.escaped) == sorted([kelvin, "<KEY>"])


def test_text_that_completes_a_control_string_of_the_template_is_refused() -> None:
    source = "{% for m in messages %}<|{{ m.content }}|>{% endfor %}"
    wrapped = PromptTokenizer(build_tokenizer(("<|end|>",)), source)
    with pytest.raises(TemplateError, match="joins the text around it to the control string"):
        render("end", tokenizer=wrapped)


def test_untrusted_encoding_has_no_control_token() -> None:
    assert TOKENIZER.count_controls(TOKENIZER.encode("<|im_end|>")) == 1
    assert TOKENIZER.count_controls(TOKENIZER.encode_untrusted("<|im_end|>")) == 0

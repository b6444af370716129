"""Which messages a chat template is given, and how its capabilities are found."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers_prompt import family_tokenizer, prompt_tokenizer

from kvnotes.prompt import Message, PromptTemplate, PromptTokenizer, TemplateCapabilities, arrange

ROLE = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
HEADERS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@dataclass(frozen=True)
class Given:
    role: str
    text: str


def capabilities(source: str) -> TemplateCapabilities:
    return PromptTokenizer(family_tokenizer("smollm2"), source).capabilities


def arranged(name: str, roles: str) -> str:
    """Roles and joins: "s(0) u(1+2)*2" is a user message of two, of which 2 is wrapped."""
    messages = [Given(ROLE[role], f"text {k}") for k, role in enumerate(roles)]
    result = arrange(messages, prompt_tokenizer(name).capabilities)
    return " ".join(
        f"{a.role[0]}({'+'.join(str(part.index) for part in a.parts)})"
        + "".join(f"*{index}" for index in a.wrapped)
        for a in result
    )


@pytest.mark.parametrize(
    ("name", "roles", "expected"),
    [
        ("smollm2", "ssuasusat", "s(0) s(1) u(2) a(3) s(4) u(5) s(6) a(7) t(8)"),
        ("mistral_first", "ssua", "s(0+1) u(2) a(3)"),
        ("mistral_first", "suasu", "s(0) u(1) a(2) u(3+4)*3"),
        ("mistral_first", "suas", "s(0) u(1) a(2) u(3)*3"),
        ("mistral_first", "sus", "s(0) u(1+2)*2"),
        ("mistral_first", "usuua", "u(0+1+2+3)*1 a(4)"),
        ("mistral_first", "s", "u(0)*0"),
        ("mistral_first", "ss", "u(0+1)*0*1"),
        ("mistral_first", "uat", "u(0) a(1) u(2)*2"),
        ("gemma_refuses", "ssua", "u(0+1+2)*0*1 a(3)"),
        ("deepseek", "ssuas", "s(0) s(1) u(2) a(3) u(4)*4"),
        ("deepseek", "us", "u(0) u(1)*1"),
        ("phi", "uatu", "u(0) a(1) u(2)*2 u(3)"),
    ],
)
def test_messages_are_joined_and_wrapped_where_the_template_needs_it(
    name: str, roles: str, expected: str
) -> None:
    assert arranged(name, roles) == expected


def test_system_texts_are_joined_by_a_line_break_only_where_there_is_none() -> None:
    texts = ("one", "two ", "three\n", "four")
    result = arrange(
        [Given("system", text) for text in texts] + [Given("user", "x")],
        prompt_tokenizer("gemma").capabilities,
    )
    assert [part.separator for part in result[0].parts] == ["", "\n", "", ""]
    prompt = PromptTemplate.chat(
        [*(Message("system", text) for text in texts), Message("user", "x")]
    ).render({}, prompt_tokenizer("mistral_first"))
    assert prompt.text == "<s>[INST]one\ntwo three\nfour\n\nx[/INST]"


def test_user_texts_are_joined_by_a_blank_line() -> None:
    prompt = PromptTemplate.chat([Message("user", "a\n"), Message("user", "b")]).render(
        {}, prompt_tokenizer("mistral_first")
    )
    assert prompt.text == "<s>[INST]a\n\n\nb[/INST]"
    assert [s.name for s in prompt.spans if s.kind == "message"] == ["m0", "m1"]
    assert prompt.wrapped == ()


def test_moved_system_text_leaves_the_blocks_of_the_others_whole() -> None:
    tokenizer = prompt_tokenizer("mistral")
    chat = [Message(ROLE[role], f"{role}{k}") for k, role in enumerate("suaua")]
    prompt = PromptTemplate.chat(chat).render({}, tokenizer)
    blocks = {
        s.name: tokenizer.decode(prompt.token_ids[s.start : s.stop])
        for s in prompt.spans
        if s.kind == "message"
    }
    assert blocks == {
        "m1": "<s>[INST] u1[/INST]",
        "m2": " a2</s>",
        "m0": "[INST] s0",
        "m3": "\n\nu3[/INST]",
        "m4": " a4</s>",
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HEADERS, "keep"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "merged"),
        (HEADERS.replace("messages", "messages if m.role != 'system'"), "none"),
        ("{{ raise_exception('no') }}", "none"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>"
            "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
            "keep",
        ),
        (
            "{% if messages[0].role == 'system' %}[user]<<{{ messages[0].content }}>>"
            "{% for m in messages[1:] %}{% if not loop.first %}[{{ m.role }}]{% endif %}"
            "{{ m.content }}{% endfor %}{% else %}" + HEADERS + "{% endif %}",
            "merged",
        ),
    ],
)
def test_system_is_kept_where_the_user_has_a_header_of_its_own(source: str, expected: str) -> None:
    assert capabilities(source).system == expected


def test_late_system_that_is_hoisted_silently_is_not_kept() -> None:
    source = (
        "{% for m in messages if m.role == 'system' %}[s]{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    found = capabilities(source)
    assert found.system == "keep"
    assert found.adjacent_system
    assert not found.late_system_after_user
    assert not found.late_system_after_assistant
    assert found.erratum_role("assistant") == "user"


def test_late_system_that_changes_what_stands_before_is_not_kept() -> None:
    source = "{{ messages | selectattr('role', 'equalto', 'system') | list | length }}" + HEADERS
    found = capabilities(source)
    assert not found.late_system_after_user
    assert not found.late_system_after_assistant
    assert found.adjacent_user
    assert found.prefix_stable


def test_late_system_that_changes_once_another_turn_follows_is_not_kept() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}{{ ' now' if loop.last and m.role == 'system' }}]"
        "{{ m.content }}{% endfor %}"
    )
    found = capabilities(source)
    assert not found.late_system_after_assistant
    assert not found.late_system_after_user
    assert found.adjacent_user
    assert found.system == "keep"


def test_template_that_counts_its_messages_is_not_prefix_stable() -> None:
    found = capabilities("{{ messages | length }}" + HEADERS)
    assert not found.prefix_stable


def test_template_that_needs_a_user_keeps_two_system_messages() -> None:
    source = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list == [] %}"
        "{{ raise_exception('no user') }}{% endif %}" + HEADERS
    )
    found = capabilities(source)
    assert (found.system, found.adjacent_system) == ("keep", True)


def test_tool_wrapper_is_the_last_resort_after_a_tool() -> None:
    source = (
        "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == 'tool' "
        "and m.role in ('user', 'system') %}{{ raise_exception('answer the tool') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    found = capabilities(source)
    assert found.tool_role
    assert found.erratum_role("tool") == "tool"
    assert found.erratum_role("user") == "system"


def test_block_of_an_empty_message_is_its_header_and_terminator() -> None:
    tokenizer = prompt_tokenizer("qwen3")
    chat = [
        Message(ROLE[role], text)
        for role, text in zip("uauau", ("x", "", "", "y", "z"), strict=True)
    ]
    prompt = PromptTemplate.chat(chat).render({}, tokenizer)
    blocks = [
        tokenizer.decode(prompt.token_ids[s.start : s.stop])
        for s in prompt.spans
        if s.kind == "message"
    ]
    assert blocks[1] == "<|im_start|>assistant\n<|im_end|>\n"
    assert blocks[2] == "<|im_start|>user\n<|im_end|>\n"
    assert blocks[3] == "<|im_start|>assistant\ny<|im_end|>\n"

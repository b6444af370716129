"""What the chat templates of eight families do, and that prompts hold on each of them."""

from __future__ import annotations

from datetime import datetime

import pytest
from helpers_prompt import FAMILIES, family_tokenizer, prompt_tokenizer

from kvnotes.prompt import (
    ErratumStyle,
    Message,
    PromptTemplate,
    PromptTokenizer,
    TemplateCapabilities,
    TokenizedPrompt,
)

NAMES = sorted(FAMILIES)
KEEPS_ALL = TemplateCapabilities(
    system="keep",
    adjacent_system=True,
    late_system_after_user=True,
    late_system_after_assistant=True,
    late_system_after_tool=True,
    adjacent_user=True,
    user_after_tool=True,
    tool_role=True,
    prefix_stable=True,
)
ALTERNATES = TemplateCapabilities(
    system="merged",
    adjacent_system=False,
    late_system_after_user=False,
    late_system_after_assistant=False,
    late_system_after_tool=False,
    adjacent_user=False,
    user_after_tool=False,
    tool_role=False,
    prefix_stable=True,
)


def changed(base: TemplateCapabilities, **fields: object) -> TemplateCapabilities:
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return TemplateCapabilities(**{**values, **fields})


EXPECTED = {
    "smollm2": KEEPS_ALL,
    "llama3": KEEPS_ALL,
    "qwen25": KEEPS_ALL,
    "qwen3": changed(KEEPS_ALL, prefix_stable=False),
    "mistral": changed(ALTERNATES, prefix_stable=False),
    "mistral_first": ALTERNATES,
    "gemma": ALTERNATES,
    "gemma_refuses": changed(ALTERNATES, system="none"),
    "phi": changed(KEEPS_ALL, tool_role=False, late_system_after_tool=False, user_after_tool=False),
    "deepseek": changed(
        KEEPS_ALL,
        late_system_after_user=False,
        late_system_after_assistant=False,
        late_system_after_tool=False,
    ),
}
CHAT = (
    Message("system", "The stock is {{stock}}.", id="sys"),
    Message("user", "What is the stock?", id="u1"),
    Message("assistant", "It is known.", id="a1"),
    Message("user", "Say it.", id="u2"),
    Message("assistant", "12", id="a2"),
    Message("user", "Thanks", id="u3"),
)
ERRATUM = ErratumStyle().message("stock", revision=None, id="e1")


def render(
    name: str, messages: tuple[Message, ...], *, add_generation_prompt: bool = False
) -> TokenizedPrompt:
    return PromptTemplate.chat(messages).render(
        {"stock": "12"}, prompt_tokenizer(name), add_generation_prompt=add_generation_prompt
    )


def block(name: str, prompt: TokenizedPrompt, message_id: str) -> str:
    span = prompt.message_span(message_id)
    return prompt_tokenizer(name).decode(prompt.token_ids[span.start : span.stop])


def first_change(old: TokenizedPrompt, new: TokenizedPrompt) -> str | None:
    """The message of `old` whose tokens `new` does not begin with; None for a prefix."""
    for index, token_id in enumerate(old.token_ids):
        if index >= new.num_tokens or new.token_ids[index] != token_id:
            return next(
                s.name for s in old.spans if s.kind == "message" and s.start <= index < s.stop
            )
    return None


@pytest.mark.parametrize("name", NAMES)
def test_capabilities_are_what_the_template_does(name: str) -> None:
    assert prompt_tokenizer(name).capabilities == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "after", "role"),
    [
        ("smollm2", "user", "system"),
        ("smollm2", "start", "system"),
        ("gemma", "start", "system"),
        ("gemma", "user", "user"),
        ("gemma", "assistant", "user"),
        ("gemma_refuses", "start", "user"),
        ("gemma_refuses", "system", "user"),
        ("deepseek", "assistant", "user"),
        ("deepseek", "tool", "user"),
        ("mistral", "tool", "user"),
        ("phi", "tool", "user"),
    ],
)
def test_erratum_role_is_the_one_kept_in_place(name: str, after: str, role: str) -> None:
    assert prompt_tokenizer(name).capabilities.erratum_role(after) == role


@pytest.mark.parametrize("name", NAMES)
def test_our_rendering_equals_that_of_transformers(name: str) -> None:
    tokenizer = family_tokenizer(name)
    ours = PromptTokenizer(tokenizer, clock=datetime.now())
    chat = [
        {"role": "user", "content": " one\n"},
        {"role": "assistant", "content": "<think>\nno\n</think>\n\n two"},
        {"role": "user", "content": "three"},
    ]
    system = {"role": "system", "content": "zero"}
    for messages in ([*chat], [system, *chat], [system, chat[0]]):
        for asked in (False, True):
            try:
                theirs = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=asked
                )
            except Exception as error:
                assert "no system role here" in str(error)
                continue
            assert ours.chat.render(messages, add_generation_prompt=asked) == theirs


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_whole_text(name: str) -> None:
    for asked in (False, True):
        prompt = render(name, (*CHAT, ERRATUM), add_generation_prompt=asked)
        whole = family_tokenizer(name)(prompt.text, add_special_tokens=False).input_ids
        assert list(prompt.token_ids) == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", range(2, len(CHAT)))
def test_n_messages_are_a_prefix_of_n_plus_1_or_the_change_is_known(name: str, count: int) -> None:
    old, new = render(name, CHAT[:count]), render(name, CHAT[: count + 1])
    expected = None
    if name == "qwen3" and CHAT[count - 1].role == "assistant":
        expected = CHAT[count - 1].id  # the last turn has an empty think block
    if name == "mistral" and CHAT[count].role == "user":
        expected = "sys"  # the system text moves to the new question
    assert first_change(old, new) == expected


@pytest.mark.parametrize("name", NAMES)
def test_prompt_before_generation_is_a_prefix_of_the_next_turn(name: str) -> None:
    tokenizer = prompt_tokenizer(name)
    asked = render(name, CHAT[:2], add_generation_prompt=True)
    ids = (*tokenizer.encode("It is 12."), family_tokenizer(name).eos_token_id)
    if name.startswith("gemma"):
        ids = (*ids[:-1], *tokenizer.encode("<end_of_turn>"))
    answer = Message("assistant", id="a1", generated_ids=ids)
    follow = (CHAT[0], CHAT[1], answer, CHAT[3])
    prompt = render(name, follow, add_generation_prompt=True)
    held = asked.token_ids + ids
    if name == "mistral":
        # The template writes a blank before every answer, and moves the system text.
        assert [r.message_id for r in prompt.rewrites] == ["a1"]
    elif name == "deepseek":
        # The generation prompt opens a think block that older turns do not have.
        assert [r.message_id for r in prompt.rewrites] == ["a1"]
        assert "opened otherwise" in prompt.rewrites[0].reason
    else:
        assert prompt.token_ids[: len(held)] == held
        assert prompt.rewrites == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", ["u2", "a2"])
def test_erratum_stays_where_it_was_put(name: str, after: str) -> None:
    index = [m.id for m in CHAT].index(after) + 1
    prompt = render(name, (*CHAT[:index], ERRATUM, *CHAT[index:]))
    order = [s.name for s in prompt.spans if s.kind == "message" and s.name != "sys"]
    assert order == [m.id for m in (*CHAT[1:index], ERRATUM, *CHAT[index:])]
    assert "has just changed to 12" in block(name, prompt, "e1")
    in_place = EXPECTED[name].erratum_role("user" if after == "u2" else "assistant") == "system"
    assert ("e1" in prompt.wrapped) == (not in_place)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_merged_or_wrapped_message_has_its_span(name: str) -> None:
    prompt = render(name, (*CHAT, ERRATUM))
    spans = prompt.field_spans("stock")
    assert [s.message_id for s in sorted(spans, key=lambda s: s.message_id)] == ["e1", "sys"]
    for span in spans:
        text = prompt_tokenizer(name).decode(prompt.token_ids[span.start : span.stop])
        assert "12" in text


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_generation_prompt_partition_the_tokens(name: str) -> None:
    prompt = render(name, CHAT, add_generation_prompt=True)
    spans = [s for s in prompt.spans if s.kind in ("message", "generation")]
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
    assert spans[-1].stop == prompt.num_tokens
    assert spans[-1].kind == "generation"


BLOCKS = {
    "smollm2": ("<|im_start|>user\nSay it.<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama3": (
        "<|start_header_id|>user<|end_header_id|>\n\nSay it.<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "qwen25": ("<|im_start|>user\nSay it.<|im_end|>\n", "<|im_start|>assistant\n"),
    "qwen3": ("<|im_start|>user\nSay it.<|im_end|>\n", "<|im_start|>assistant\n"),
    "mistral": ("[INST] Say it.[/INST]", ""),
    "mistral_first": ("[INST]Say it.[/INST]", ""),
    "gemma": ("<start_of_turn>user\nSay it.<end_of_turn>\n", "<start_of_turn>model\n"),
    "gemma_refuses": ("<start_of_turn>user\nSay it.<end_of_turn>\n", "<start_of_turn>model\n"),
    # Its control tokens take in the line breaks behind them.
    "phi": ("<|user|>Say it.<|end|>", "<|assistant|>"),
    "deepseek": ("<|User|>Say it.", "<|Assistant|><think>\n"),
}


@pytest.mark.parametrize("name", NAMES)
def test_block_is_header_content_and_terminator(name: str) -> None:
    prompt = render(name, CHAT, add_generation_prompt=True)
    generation = prompt.spans[-1]
    shown = prompt_tokenizer(name).decode(prompt.token_ids[generation.start :])
    assert (block(name, prompt, "u2"), shown) == BLOCKS[name]


def test_clock_of_a_template_is_frozen_and_can_be_set() -> None:
    tokenizer = PromptTokenizer(family_tokenizer("llama3"))
    tokenizer.clock = datetime(2024, 2, 3)
    prompt = PromptTemplate.chat(CHAT[1:2]).render({}, tokenizer)
    assert "Date: 03 Feb 2024" in prompt.text
    tokenizer.clock = None
    PromptTemplate.chat(CHAT[1:2]).render({}, tokenizer)
    frozen = tokenizer.clock
    PromptTemplate.chat(CHAT[1:2]).render({}, tokenizer)
    assert frozen is not None
    assert tokenizer.clock is frozen

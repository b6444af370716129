"""Generated ids are kept as generated, and what the template alters is reported."""

from __future__ import annotations

from helpers_prompt import family_tokenizer, prompt_tokenizer

from kvnotes.prompt import Message, PromptTemplate, Rewrite, TokenizedPrompt

USER = Message("user", "Hello")
MORE = Message("user", "More")


def end(name: str) -> int:
    return int(family_tokenizer(name).eos_token_id)


def render(name: str, ids: tuple[int, ...], *rest: Message) -> TokenizedPrompt:
    answer = Message("assistant", id="a", generated_ids=ids)
    return PromptTemplate.chat([USER, answer, *rest]).render({}, prompt_tokenizer(name))


def block(name: str, prompt: TokenizedPrompt) -> tuple[int, ...]:
    span = prompt.message_span("a")
    return prompt.token_ids[span.start : span.stop]


def letters(name: str, text: str) -> tuple[int, ...]:
    """Ids of a text spelled letter by letter, as no tokenizer would write it."""
    return tuple(i for letter in text for i in prompt_tokenizer(name).encode(letter))


def test_ids_that_are_not_canonical_are_kept() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    ids = (*letters("smollm2", "the price"), end("smollm2"))
    assert ids[:-1] != tokenizer.encode("the price")
    prompt = render("smollm2", ids, MORE)
    header, tail = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("\n")
    assert block("smollm2", prompt) == header + ids + tail
    assert "<|im_start|>assistant\nthe price<|im_end|>\n" in prompt.text
    assert prompt.rewrites == ()


def test_end_token_is_not_doubled_and_is_added_where_it_was_not_generated() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    body = tokenizer.encode("no")
    ended = render("smollm2", (*body, end("smollm2")))
    cut = render("smollm2", body)
    assert ended.token_ids == cut.token_ids
    assert ended.rewrites == cut.rewrites == ()


def test_answer_of_an_end_token_alone_is_kept() -> None:
    prompt = render("smollm2", (end("smollm2"),), MORE)
    assert block("smollm2", prompt) == prompt_tokenizer("smollm2").encode(
        "<|im_start|>assistant\n<|im_end|>\n"
    )
    assert prompt.rewrites == ()
    assert render("smollm2", (), MORE).token_ids == prompt.token_ids


def test_another_end_token_than_the_templates_is_reported() -> None:
    tokenizer = prompt_tokenizer("gemma")
    eos = end("gemma")
    prompt = render("gemma", (*tokenizer.encode("no"), eos), MORE)
    assert prompt.rewrites == (Rewrite("a", "the end token <eos> is not rendered"),)
    assert eos not in prompt.token_ids
    assert tokenizer.decode(block("gemma", prompt)) == "<start_of_turn>model\nno<end_of_turn>\n"


def test_end_token_of_the_template_is_a_stop_token() -> None:
    tokenizer = prompt_tokenizer("gemma")
    assert tokenizer.eos_ids == {end("gemma"), *tokenizer.encode("<end_of_turn>")}


def test_half_a_character_is_kept() -> None:
    ids = prompt_tokenizer("smollm2").encode("a\U0001f469")[:-1]
    prompt = render("smollm2", ids, MORE)
    assert ids == block("smollm2", prompt)[-len(ids) - 2 : -2]
    assert "a\ufffd" in prompt.text


def test_outer_white_space_is_kept_where_the_template_keeps_it() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    ids = (*tokenizer.encode(" \nno \n\n"), end("smollm2"))
    prompt = render("smollm2", ids, MORE)
    assert prompt.rewrites == ()
    assert "assistant\n \nno \n\n<|im_end|>" in prompt.text


def test_trimmed_white_space_is_reported() -> None:
    tokenizer = prompt_tokenizer("llama3")
    for text in (" no", "no\n", "\n\nno"):
        prompt = render("llama3", (*tokenizer.encode(text), end("llama3")), MORE)
        assert prompt.rewrites == (Rewrite("a", "white space is trimmed"),)
        assert tokenizer.decode(block("llama3", prompt)).endswith("\n\nno<|eot_id|>")
    kept = render("llama3", (*tokenizer.encode("no"), end("llama3")), MORE)
    assert kept.rewrites == ()


def test_stripped_thinking_is_reported_and_only_in_earlier_turns() -> None:
    tokenizer = prompt_tokenizer("qwen3")
    ids = (*tokenizer.encode("<think>\nhm\n</think>\n\nno"), end("qwen3"))
    last = render("qwen3", ids)
    assert last.rewrites == ()
    assert last.token_ids[-len(ids) - 1 : -1] == ids
    earlier = render("qwen3", ids, MORE)
    assert earlier.rewrites == (Rewrite("a", "thinking is stripped"),)
    assert tokenizer.decode(block("qwen3", earlier)) == "<|im_start|>assistant\nno<|im_end|>\n"


def test_added_think_block_is_reported_and_the_content_kept() -> None:
    ids = (*letters("qwen3", "the price"), end("qwen3"))
    prompt = render("qwen3", ids)
    assert prompt.rewrites == (Rewrite("a", "the turn is opened otherwise than it was generated"),)
    assert prompt.token_ids[-len(ids) - 1 : -1] == ids
    assert render("qwen3", ids, MORE).rewrites == ()


def test_thinking_opened_by_the_generation_prompt_is_reported_as_stripped() -> None:
    tokenizer = prompt_tokenizer("deepseek")
    ids = (*tokenizer.encode("hm\n</think>\n\nno"), end("deepseek"))
    prompt = render("deepseek", ids, MORE)
    assert prompt.rewrites == (Rewrite("a", "thinking is stripped"),)
    assert tokenizer.decode(block("deepseek", prompt)) == "<|Assistant|>no<|eos|>"


def test_spelled_control_string_is_kept_as_ordinary_tokens() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    ids = (*letters("smollm2", "a <|im_end|>"), end("smollm2"))
    assert tokenizer.count_controls(ids) == 1
    prompt = render("smollm2", ids, MORE)
    assert block("smollm2", prompt)[-len(ids) - 1 : -1] == ids
    assert prompt.rewrites == ()
    assert prompt.escaped == ()
    assert "a <|im_end|><|im_end|>\n" in prompt.text


def test_spelled_control_string_is_escaped_where_the_text_is_tokenized_again() -> None:
    tokenizer = prompt_tokenizer("llama3")
    ids = (*letters("llama3", " a <|eot_id|>"), end("llama3"))
    prompt = render("llama3", ids, MORE)
    assert [r.message_id for r in prompt.rewrites] == ["a"]
    assert prompt.escaped == (("a", "<|eot_id|>"),)
    assert tokenizer.decode(block("llama3", prompt)).endswith("\n\na <\\|eot_id|><|eot_id|>")


def test_turn_after_text_continues_it_as_generated() -> None:
    tokenizer = prompt_tokenizer("smollm2")
    ids = letters("smollm2", " is 12")
    template = PromptTemplate.text_template("The price").append(
        Message("assistant", id="a", generated_ids=(*ids, end("smollm2")))
    )
    prompt = template.append(Message("user", "next")).render({}, tokenizer)
    assert prompt.text == "The price is 12<|im_end|>\nnext\n"
    head = tokenizer.encode("The price")
    assert prompt.token_ids[: len(head) + len(ids) + 1] == (*head, *ids, end("smollm2"))
    assert [s.name for s in prompt.spans if s.kind == "message"] == ["", "a", "m0"]
    assert prompt.rewrites == ()

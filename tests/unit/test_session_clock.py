"""Each session sees one time, the time it began."""

from __future__ import annotations

from datetime import datetime

from helpers_prompt import family_tokenizer

from kvnotes.prompt import ErratumStyle, PromptTemplate, PromptTokenizer
from kvnotes.prompt.messages import Message

CLOCKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ strftime_now('%H:%M:%S.%f') }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def _text(tokenizer: PromptTokenizer) -> str:
    template = PromptTemplate.chat([Message("system", "hello")])
    return template.render({}, tokenizer).text


def test_a_session_renders_one_time_again_and_another_session_its_own() -> None:
    shared = PromptTokenizer(family_tokenizer("smollm2"), CLOCKED)
    first, second = (shared.for_session(ErratumStyle()) for _ in range(2))
    assert _text(first) == _text(first)
    assert _text(first) != _text(second)


def test_a_clock_that_was_set_is_kept() -> None:
    shared = PromptTokenizer(
        family_tokenizer("smollm2"), CLOCKED, clock=datetime(2024, 1, 2, 3, 4, 5)
    )
    assert "03:04:05" in _text(shared.for_session(ErratumStyle()))

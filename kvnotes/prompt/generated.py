"""Generated messages: whether the rendering still shows what was generated.

Owns the decision to keep generated ids. Does not tokenize.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnotes.prompt.layout import Block, Layout
from kvnotes.prompt.resolve import Resolved
from kvnotes.prompt.spans import Rewrite

if TYPE_CHECKING:
    from kvnotes.prompt.tokenizer import DecodedIds, PromptTokenizer

_THINKING = re.compile(r"<think>.*?</think>|^.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Run:
    """Generated ids in place of the characters `[start, stop)` of the rendered text.

    Args:
        start: First character.
        stop: Character after the last, the end token included.
        ids: The ids as generated.
        text: What the ids decode to.
        stop_word: The end token, if the ids end with one.
    """

    start: int
    stop: int
    ids: tuple[int, ...]
    text: str
    stop_word: str


@dataclass(frozen=True, slots=True)
class Generated:
    """The kept runs, in order, and what the template altered."""

    runs: tuple[Run, ...]
    rewrites: tuple[Rewrite, ...]
    escaped: tuple[tuple[str, str], ...]


def place_generated(
    layout: Layout, messages: Sequence[Resolved], tokenizer: PromptTokenizer
) -> Generated:
    """Find each generated message in the rendered text.

    Its ids are kept where the text shows the generation prompt and then exactly the generated
    text. Where only the content is unchanged, its ids are kept and the change is reported;
    where the content is changed, the rendered text counts and the change is reported.
    """
    runs: list[Run] = []
    rewrites: list[Rewrite] = []
    escaped: list[tuple[str, str]] = []
    for block in layout.blocks:
        if block.index < 0 or messages[block.index].decoded is None:
            continue
        message = messages[block.index]
        decoded, ids = message.decoded, message.ids
        assert decoded is not None and ids is not None
        place = _place(layout, block, decoded, tokenizer)
        if place is None:
            rewrites.append(Rewrite(message.id, _reason(layout, block, decoded)))
            escaped.extend((message.id, found) for found in decoded.found)
            continue
        start, stop = place
        if layout.roles and layout.text[block.start : start] != _header(layout, block, tokenizer):
            rewrites.append(
                Rewrite(message.id, "the turn is opened otherwise than it was generated")
            )
        text = decoded.raw[len(decoded.following) - (stop - start) :]
        word = message.stop_word
        if word and layout.text.startswith(word, stop):
            stop, text = stop + len(word), text + word
        elif word:
            ids, word = ids[:-1], ""
            rewrites.append(
                Rewrite(message.id, f"the end token {message.stop_word} is not rendered")
            )
        runs.append(Run(start, stop, ids, text, word))
    return Generated(tuple(runs), tuple(rewrites), tuple(escaped))


def _header(layout: Layout, block: Block, tokenizer: PromptTokenizer) -> str | None:
    """The generation prompt this message was generated behind, as far as it is known."""
    if not layout.roles:
        return ""
    if block.index == 0:
        return None
    return tokenizer.shape.generation(layout.roles[block.index - 1])


def _place(
    layout: Layout, block: Block, decoded: DecodedIds, tokenizer: PromptTokenizer
) -> tuple[int, int] | None:
    """Where the generated text stands in the rendering, or None if it does not.

    Some decoders strip the blank that the first token writes, so both forms of it count.
    """
    first = block.start
    header = _header(layout, block, tokenizer)
    opened = header is not None and layout.text.startswith(header, block.start)
    if opened and header is not None:
        first += len(header)
    for text in dict.fromkeys((decoded.following, decoded.content)):
        stop = first + len(text)
        if opened and stop <= block.stop and layout.text.startswith(text, first):
            return first, stop
    if block.index in layout.contents:
        # Not before `first`: white space of the header is none of the content.
        stop = layout.contents[block.index][1]
        for text in dict.fromkeys((decoded.following, decoded.content)):
            start = stop - len(text)
            if start >= first and layout.text.startswith(text, start):
                return start, stop
    return None


def _reason(layout: Layout, block: Block, decoded: DecodedIds) -> str:
    shown = layout.text[block.start : block.stop]
    content = decoded.content
    if content.strip() and content.strip() in shown:
        return "white space is trimmed"
    answer = _THINKING.sub("", content).strip()
    if answer != content.strip() and answer in shown:
        return "thinking is stripped"
    return "the text is altered"

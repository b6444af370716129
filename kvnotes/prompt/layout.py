"""Where everything stands in the rendered text, in characters.

Owns rendering with sentinels and the borders of message blocks. Does not know tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnotes.errors import TemplateError
from kvnotes.prompt.arrange import Arranged, arrange
from kvnotes.prompt.resolve import Mark, Resolved
from kvnotes.prompt.sentinels import Found, Marked, Marker, find, unclamp
from kvnotes.prompt.shape import Gap

if TYPE_CHECKING:
    from kvnotes.prompt.tokenizer import PromptTokenizer

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Block:
    """The characters `[start, stop)` of one message: header, content and terminator."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlacedMark:
    """A mark in the rendered text; `index` is the message's, -1 the text template's."""

    mark: Mark
    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered prompt in characters.

    Args:
        text: The rendered text.
        blocks: Message blocks in the order of the text, without gaps.
        marks: Values and segments, in order.
        contents: Rendered range of each message's content, where it is known.
        generation_start: Where the generation prompt begins.
        roles: The role each message is shown in; () for a text template.
        inline: Messages that share a template message with another one.
        wrapped: Messages shown in another role.
    """

    text: str
    blocks: tuple[Block, ...]
    marks: tuple[PlacedMark, ...]
    contents: dict[int, tuple[int, int]]
    generation_start: int
    roles: tuple[str, ...] = ()
    inline: frozenset[int] = frozenset()
    wrapped: tuple[int, ...] = ()


def lay_out_text(text: Resolved, messages: Sequence[Resolved]) -> Layout:
    """Lay out a text template and the messages appended to it.

    Each message is a line of its own; a generated one continues the text as it is.
    """
    full = text.text
    blocks = [Block(-1, 0, len(full))]
    marks = [PlacedMark(m, -1, m.start, m.stop) for m in text.marks]
    contents = {}
    for index, message in enumerate(messages):
        start = len(full)
        generated = message.decoded is not None
        if not generated and not full.endswith("\n"):
            full += "\n"
        place = len(full)
        content = message.decoded.following if message.decoded else message.text
        full += content
        contents[index] = (place, len(full))
        full += message.stop_word
        marks += [PlacedMark(m, index, place + m.start, place + m.stop) for m in message.marks]
        if not generated:
            full += "\n"
        blocks.append(Block(index, start, len(full)))
    return Layout(full, tuple(blocks), tuple(marks), contents, len(full))


def lay_out_chat(
    messages: Sequence[Resolved], tokenizer: PromptTokenizer, *, add_generation_prompt: bool
) -> Layout:
    """Render a chat and find every message, value and segment in it.

    Raises:
        TemplateError: The template refuses the messages, drops one, or alters a value.
    """
    arranged = arrange(messages, tokenizer.capabilities)
    return _ChatLayout(messages, arranged, tokenizer, add_generation_prompt).layout()


class _ChatLayout:
    """One chat while it is laid out."""

    def __init__(
        self,
        messages: Sequence[Resolved],
        arranged: Sequence[Arranged],
        tokenizer: PromptTokenizer,
        add_generation_prompt: bool,
    ) -> None:
        self.messages = messages
        self.arranged = arranged
        self.chat, self.shape = tokenizer.chat, tokenizer.shape
        self.add_generation_prompt = add_generation_prompt
        self.owner = {part.index: k for k, a in enumerate(arranged) for part in a.parts}
        self.given = self._given({})
        self.text = self.chat.render(self.given, add_generation_prompt=add_generation_prompt)
        self.marked, self.found = self._render_marked()

    def layout(self) -> Layout:
        """Find blocks, contents and marks."""
        contents = self._contents()
        generation_start = self._generation_start(contents)
        blocks = self._blocks(contents, generation_start)
        marks: list[PlacedMark] = []
        for block in blocks:
            marks.extend(self._marks(block))
        marks.sort(key=lambda placed: (placed.start, placed.stop))
        return Layout(
            self.text,
            blocks,
            tuple(marks),
            contents,
            generation_start,
            tuple(self.arranged[self.owner[i]].role for i in range(len(self.messages))),
            frozenset(i for i, k in self.owner.items() if len(self.arranged[k].parts) > 1),
            tuple(i for a in self.arranged for i in a.wrapped),
        )

    def _given(self, marked: Mapping[int, str]) -> list[dict[str, str]]:
        """The messages for the template, some with another content than their own."""
        texts = [marked.get(index, m.text) for index, m in enumerate(self.messages)]
        return [
            {
                "role": a.role,
                "content": "".join(part.separator + texts[part.index] for part in a.parts),
            }
            for a in self.arranged
        ]

    def _render_marked(self) -> tuple[dict[int, Marked], Found]:
        """Render with sentinels, in as many messages as the template lets pass unchanged.

        Some templates look at the beginning of a content (`<tool_response>`), and a sentinel
        there changes what they do. Messages without slots do without sentinels then.
        """
        everything = range(len(self.messages))
        slotted = [i for i in everything if self.messages[i].marks]
        generated = [i for i in everything if self.messages[i].decoded]
        for chosen in (everything, [*slotted, *generated], slotted):
            marker = Marker()
            results = {index: marker.mark(self.messages[index]) for index in chosen}
            marked = {index: result for index, result in results.items() if result}
            rendered = self.chat.try_render(
                self._given({index: result.text for index, result in marked.items()}),
                add_generation_prompt=self.add_generation_prompt,
            )
            found = None if rendered is None else find(rendered)
            if found is not None and found.text == self.text:
                return marked, found
        names = [m.id for m in self.messages if m.marks]
        raise TemplateError(
            f"the chat template changes the text of the messages {names} depending on the text "
            "itself, so the places of their fields are not known",
            hint="move the fields to a message whose text the template shows as it is",
        )

    def _contents(self) -> dict[int, tuple[int, int]]:
        """Rendered range of each content; one end is computed where only the other is known."""
        contents = {}
        for index, marked in self.marked.items():
            message = self.messages[index]
            start, stop = (self.found.first(code) for code in marked.content)
            if start is None and stop is None:
                if message.decoded is None:
                    raise TemplateError(
                        f"message {message.id!r} has content, the chat template's rendering "
                        f"of it as {self.arranged[self.owner[index]].role} has none of it",
                        hint="give the text in a message of a role that the template shows",
                    )
                continue
            first, last = marked.inner
            if start is None and stop is not None:
                start = stop - (last - first)
                if self.text[max(start, 0) : stop] != message.text[first:last]:
                    start = stop
            elif stop is None and start is not None:
                stop = start + (last - first)
                if self.text[start:stop] != message.text[first:last]:
                    stop = start
            assert start is not None and stop is not None
            start = unclamp(message.text, marked.inner, 0, start, self.text)
            stop = unclamp(message.text, marked.inner, len(message.text), stop, self.text)
            contents[index] = (start, max(start, stop))
        return contents

    def _generation_start(self, contents: dict[int, tuple[int, int]]) -> int:
        if not self.add_generation_prompt:
            return len(self.text)
        suffix = self.shape.generation(self.arranged[-1].role)
        if suffix is not None and self.text.endswith(suffix):
            return len(self.text) - len(suffix)
        plain = self.chat.try_render(self.given)
        if plain is not None and self.text.startswith(plain):
            return len(plain)
        return max((stop for _, stop in contents.values()), default=len(self.text))

    def _blocks(
        self, contents: dict[int, tuple[int, int]], generation_start: int
    ) -> tuple[Block, ...]:
        """Partition the text. Messages stand in the order of their contents."""
        order = self._order(contents)
        borders = [0]
        header = ""
        for before, after in itertools.pairwise(order):
            known = contents.get(before)
            stop = None if known is None else known[1]
            if stop is None and header:
                # No sentinel fits into empty content; its header tells where it stands.
                text = header + self.messages[before].text
                if self.text.startswith(text, borders[-1]):
                    stop = borders[-1] + len(text)
            border, header = self._border(before, after, stop)
            borders.append(min(max(border, borders[-1]), generation_start))
        borders.append(generation_start)
        return tuple(Block(index, borders[k], borders[k + 1]) for k, index in enumerate(order))

    def _order(self, contents: dict[int, tuple[int, int]]) -> list[int]:
        places: list[tuple[int, int]] = []
        last = 0
        for index in range(len(self.messages)):
            last = contents[index][0] if index in contents else last
            places.append((last, index))
        return [index for _, index in sorted(places)]

    def _border(self, before: int, after: int, stop: int | None) -> tuple[int, str]:
        """Where the block of `before` ends, and the header that then follows if known.

        The terminator belongs to the message it ends:

            header | content | terminator | header | content | ...
                             ^stop        ^border
        """
        first, second = self.owner[before], self.owner[after]
        end = 0 if stop is None else stop
        if first == second:
            return end, ""
        role = self.arranged[second].role
        if second == first + 1:
            gap = self._gap(first, role, stop)
            if gap is not None:
                return end + len(gap.terminator), gap.header
            prefix = self.chat.try_render(self.given[:second])
            if prefix and self.text.startswith(prefix) and len(prefix) >= end:
                return len(prefix), ""
        # The template moved a message; what ends a turn is still known.
        for other in ("user", "assistant"):
            gap = self._gap(first, other, stop)
            if gap is not None:
                return end + len(gap.terminator), ""
        return end, ""

    def _gap(self, first: int, role: str, stop: int | None) -> Gap | None:
        """The gap to a message of this role, if the text shows it at `stop`."""
        if stop is None:
            return None
        gaps = self.shape.gaps(self.arranged[first].role, role)
        return next((gap for gap in gaps if self.text.startswith(gap.text, stop)), None)

    def _marks(self, block: Block) -> list[PlacedMark]:
        """Places of a message's values and segments; every rendered occurrence counts."""
        index, message = block.index, self.messages[block.index]
        if not message.marks:
            return []
        if index not in self.marked:
            return [self._empty_mark(mark, block) for mark in message.marks]
        marked = self.marked[index]
        placed = []
        for mark, opened, closed in marked.marks:
            starts = self.found.places.get(opened, [])
            stops = self.found.places.get(closed, [])
            if not starts or len(starts) != len(stops):
                raise self._altered(mark, message, "")
            for start, stop in zip(starts, stops, strict=True):
                a = unclamp(message.text, marked.inner, mark.start, start, self.text)
                b = unclamp(message.text, marked.inner, mark.stop, stop, self.text)
                if not _shows(mark, self.text[a : max(a, b)]):
                    raise self._altered(mark, message, self.text[start:stop])
                placed.append(PlacedMark(mark, index, a, max(a, b)))
        return placed

    def _empty_mark(self, mark: Mark, block: Block) -> PlacedMark:
        """Place a mark of a content that is only white space, where no sentinel fits."""
        before = [a.role for a in self.arranged[: self.owner[block.index]]][-1:]
        role = self.arranged[self.owner[block.index]].role
        message = self.messages[block.index]
        headers = [gap.header for b in before for gap in self.shape.gaps(b, role)]
        for header in headers:
            if self.text.startswith(header + message.text, block.start):
                start = block.start + len(header) + mark.start
                return PlacedMark(mark, block.index, start, start + len(mark.value))
        if not _shows(mark, ""):
            raise self._altered(mark, message, "")
        return PlacedMark(mark, block.index, block.stop, block.stop)

    def _altered(self, mark: Mark, message: Resolved, shown: str) -> TemplateError:
        return TemplateError(
            f"{mark.kind} {mark.name!r} in message {message.id!r} has the text "
            f"{_short(mark.value)}, the chat template renders it as {_short(shown)}",
            hint="move the slot to a place the template shows as it is, and trim the value",
        )


def _shows(mark: Mark, shown: str) -> bool:
    """Whether a mark is rendered as it should: values exactly, segments but for outer blanks."""
    value = mark.value
    if mark.kind == "segment":
        return shown in (value, value.lstrip(), value.rstrip(), value.strip())
    return shown == value


def _short(text: str) -> str:
    """Quote a text for an error message, its middle left out where it is long."""
    if len(text) <= 2 * _SHOWN:
        return repr(text)
    return f"{text[:_SHOWN]!r}...{text[-_SHOWN:]!r}"

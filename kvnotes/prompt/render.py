"""Rendering a prompt template: from values to token ids and spans.

Owns the order of the steps, and the spans. Each step is a module of its own:

    resolve -> layout (characters) -> generated -> tokens -> spans
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvnotes.errors import FieldValueError, TemplateError
from kvnotes.prompt.generated import Generated, place_generated
from kvnotes.prompt.layout import Layout, PlacedMark, lay_out_chat, lay_out_text
from kvnotes.prompt.resolve import Filler, Mark, Resolved, resolve
from kvnotes.prompt.slots import Slot
from kvnotes.prompt.spans import SegmentSpan, Span, SpanKind, TokenizedPrompt
from kvnotes.prompt.tokens import TokenMap, longest_match

if TYPE_CHECKING:
    from kvnotes.prompt.template import PromptTemplate
    from kvnotes.prompt.tokenizer import PromptTokenizer

_KIND_ORDER: tuple[SpanKind, ...] = ("message", "segment", "field", "generation")


def render(
    template: PromptTemplate,
    values: Mapping[str, str],
    tokenizer: PromptTokenizer,
    *,
    add_generation_prompt: bool,
) -> TokenizedPrompt:
    """Render and tokenize a template; see `PromptTemplate.render`."""
    filler = Filler({segment.name: segment for segment in template.segments}, values)
    resolved = resolve(template, filler, tokenizer)
    messages = resolved.messages
    if resolved.text is not None:
        layout = lay_out_text(resolved.text, messages)
    else:
        layout = lay_out_chat(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    generated = place_generated(layout, messages, tokenizer)
    borders = [*(block.start for block in layout.blocks), layout.generation_start]
    tokens = TokenMap(layout.text, borders, generated.runs, tokenizer)
    _refuse_controls(layout, messages, tokens)
    builder = _Spans(layout, messages, tokens, tokenizer, filler)
    return TokenizedPrompt(
        tokens.ids,
        builder.spans(),
        builder.segments(),
        generated.rewrites,
        resolved.escaped + generated.escaped,
        _shown_text(layout.text, generated),
        tokenizer.identity,
        tuple(messages[index].id for index in sorted(layout.wrapped)),
    )


def _shown_text(text: str, generated: Generated) -> str:
    """The rendered text, with generated parts as they decode."""
    pieces, done = [], 0
    for run in generated.runs:
        pieces += [text[done : run.start], run.text]
        done = run.stop
    return "".join((*pieces, text[done:]))


def _refuse_controls(layout: Layout, messages: Sequence[Resolved], tokens: TokenMap) -> None:
    """Check what escaping promised: no control token reaches into a value or untrusted text."""
    for placed in layout.marks:
        found = tokens.control_in(placed.start, placed.stop)
        if placed.mark.kind == "field" and found:
            raise FieldValueError(
                f"the value {placed.mark.value!r} of field {placed.mark.name!r} joins the text "
                f"around it to the control string {layout.text[found[0] : found[1]]!r}",
                hint="separate the slot from its neighbours, or change the value",
            )
    for index, (start, stop) in layout.contents.items():
        if messages[index].trusted or messages[index].decoded is not None:
            continue
        found = tokens.control_in(start, stop)
        if found:
            raise TemplateError(
                f"untrusted message {messages[index].id!r} joins the text around it to the "
                f"control string {layout.text[found[0] : found[1]]!r}",
                hint="remove the characters at the edge of the message",
            )


class _Spans:
    """Builds the spans of one rendered prompt."""

    def __init__(
        self,
        layout: Layout,
        messages: Sequence[Resolved],
        tokens: TokenMap,
        tokenizer: PromptTokenizer,
        filler: Filler,
    ) -> None:
        self.layout, self.messages, self.tokens = layout, messages, tokens
        self.tokenizer, self.filler = tokenizer, filler

    def spans(self) -> tuple[Span, ...]:
        """All spans, sorted by start."""
        seen: Counter[tuple[str, str]] = Counter()
        found = []
        for kind, name, start, stop, message_id, value in (*self._blocks(), *self._marks()):
            found.append(Span(kind, name, start, stop, message_id, seen[kind, name], value))
            seen[kind, name] += 1
        found.sort(key=lambda s: (s.start, _KIND_ORDER.index(s.kind), s.stop))
        return tuple(found)

    def segments(self) -> tuple[SegmentSpan, ...]:
        """All segment occurrences, sorted by start."""
        seen: Counter[str] = Counter()
        found = []
        for placed in self.layout.marks:
            if placed.mark.kind == "segment":
                found.append(self._segment(placed, seen[placed.mark.name]))
                seen[placed.mark.name] += 1
        return tuple(sorted(found, key=lambda segment: segment.start))

    def _id(self, index: int) -> str:
        return self.messages[index].id if index >= 0 else ""

    def _blocks(self) -> Iterator[tuple[SpanKind, str, int, int, str, str]]:
        """Message blocks and the generation prompt: a partition of all tokens."""
        places = [block.start for block in self.layout.blocks]
        edges = [*map(self.tokens.at, (*places, self.layout.generation_start))]
        edges.append(len(self.tokens.ids))
        for block, start, stop in zip(self.layout.blocks, edges, edges[1:], strict=False):
            name = self._id(block.index)
            yield "message", name, start, stop, name, ""
        yield "generation", "", edges[-2], edges[-1], "", ""

    def _marks(self) -> Iterator[tuple[SpanKind, str, int, int, str, str]]:
        for placed in self.layout.marks:
            mark = placed.mark
            start, stop = self.tokens.range(*self._characters(placed))
            value = mark.value if mark.kind == "field" else ""
            yield mark.kind, mark.name, start, stop, self._id(placed.index), value

    def _characters(self, placed: PlacedMark) -> tuple[int, int]:
        """The characters of a mark; a segment that is a whole message has its whole block."""
        if not self._is_whole(placed):
            return placed.start, placed.stop
        block = next(b for b in self.layout.blocks if b.index == placed.index)
        start = self.tokenizer.shape.start() if block.start == 0 else ""
        begins = self.layout.text.startswith(start, block.start)
        return block.start + (len(start) if begins else 0), block.stop

    def _is_whole(self, placed: PlacedMark) -> bool:
        """Whether a mark is a segment that stands as a message of its own."""
        return (
            placed.mark.kind == "segment"
            and bool(self.layout.roles)
            and self.messages[placed.index].segment is not None
            and placed.index not in self.layout.inline
        )

    def _segment(self, placed: PlacedMark, occurrence: int) -> SegmentSpan:
        first, last = self._characters(placed)
        start, stop = self.tokens.range(first, last)
        alone = self.tokenizer.piece(self.layout.text[first:last])
        size = len(alone.ids)
        if self.tokens.ids[start:stop] == alone.ids:
            left, right, inner_start, inner_stop = 0, 0, 0, size
        else:
            ranges = zip(alone.starts, alone.stops, alone.ids, strict=True)
            match = longest_match(
                self.tokens.tokens(start, stop), [(first + a, first + b, i) for a, b, i in ranges]
            )
            left, right = match.start, stop - start - match.stop
            inner_start, inner_stop = match.other_start, match.other_stop
        preamble, variant = self._preamble(placed)
        return SegmentSpan(
            placed.mark.name,
            start,
            stop,
            self._id(placed.index),
            occurrence,
            alone.ids,
            left,
            right,
            inner_start,
            inner_stop,
            preamble,
            variant,
            self.layout.text[first:last],
            self.messages[placed.index].role if self._is_whole(placed) else "",
            tuple(
                (other.mark.name, other.mark.value, other.start - first, other.stop - first)
                for other in self.layout.marks
                if other.mark.kind == "field" and first <= other.start and other.stop <= last
            ),
        )

    def _preamble(self, placed: PlacedMark) -> tuple[tuple[int, ...], tuple[tuple[str, str], ...]]:
        """The preamble as it stands before the segment, and the values it shows."""
        name = placed.mark.name
        segment = self.filler.segments[name]
        if not segment.preamble:
            return (), ()
        text = self.filler.preamble_text(name)
        fields = dict.fromkeys(p.name for p in segment.preamble_parts() if isinstance(p, Slot))
        values = tuple((field, self.filler.values[field]) for field in fields)
        if not self.layout.roles:
            return self.tokenizer.encode(text), values
        mark = Mark("segment", name, 0, len(placed.mark.value), placed.mark.value)
        role = self.messages[placed.index].role
        pair = (
            Resolved("preamble", "system", text, trusted=True),
            Resolved("segment", role, placed.mark.value, (mark,), trusted=True),
        )
        layout = lay_out_chat(pair, self.tokenizer, add_generation_prompt=False)
        whole = self._is_whole(placed) and 1 not in layout.inline
        start = layout.blocks[1].start if whole else layout.marks[0].start
        return self.tokenizer.encode(layout.text[:start]), values

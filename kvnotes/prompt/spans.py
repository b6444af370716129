"""What rendering returns: token ids and the token ranges of everything that has a name.

Owns the returned values. Does not render.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvnotes.errors import TemplateError, nearest

SpanKind = Literal["field", "segment", "message", "generation"]


@dataclass(frozen=True, slots=True)
class Span:
    """The smallest token range `[start, stop)` that covers some characters of the prompt.

    An empty value owns no token: `start == stop` is then the token that follows it, or the
    token in which it stands where the tokenizer merged its neighbours.

    Args:
        kind: field, segment, message or generation.
        name: Field name, segment name, message id, or "" for the generation prompt.
        start: First token.
        stop: Token after the last.
        message_id: Message it stands in; "" in the text of a text template.
        occurrence: 0, 1, ... in order among the spans of this kind and name.
        value: The shown value of a field.
    """

    kind: SpanKind
    name: str
    start: int
    stop: int
    message_id: str
    occurrence: int
    value: str = ""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A named segment in the prompt, beside its tokenization alone.

        prompt ids:      start |<- num_edge_left ->|  same  |<- num_edge_right ->| stop
        token_ids:             0      standalone_start |  same  | standalone_stop     len

    The two "same" ranges hold equal ids; both are empty where nothing matches.

    Args:
        name: Segment name.
        start: First token that covers the segment's text.
        stop: Token after the last.
        message_id: Message it stands in; "" in the text of a text template.
        occurrence: 0, 1, ... among the occurrences of this segment.
        token_ids: The segment alone; a whole message includes role header and terminator.
        num_edge_left: Tokens at the left edge that are tokenized otherwise in the prompt.
        num_edge_right: The same at the right edge.
        standalone_start: Start of the same tokens in `token_ids`.
        standalone_stop: Stop of the same tokens in `token_ids`.
        preamble_ids: The declared preamble as it stands before `token_ids` at the start of a
            prompt; () without a preamble.
        variant_values: Current (field, value) pairs of the preamble.
        text: The characters that `token_ids` stand for.
        role: Role of the message it is; "" for a segment inside a message.
        fields: (field, value, first character, character after the last) in `text`.
    """

    name: str
    start: int
    stop: int
    message_id: str
    occurrence: int
    token_ids: tuple[int, ...]
    num_edge_left: int
    num_edge_right: int
    standalone_start: int
    standalone_stop: int
    preamble_ids: tuple[int, ...] = ()
    variant_values: tuple[tuple[str, str], ...] = ()
    text: str = ""
    role: str = ""
    fields: tuple[tuple[str, str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A generated message that the chat template now renders otherwise than it was generated."""

    message_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A rendered prompt.

    Args:
        token_ids: All tokens.
        spans: Sorted by start; the message spans and the generation span partition all tokens.
        segments: Named segments, sorted by start.
        rewrites: Generated messages that the template altered.
        escaped: (message id, string) of control text escaped in untrusted messages.
        text: The rendered text, generated parts as decoded.
        identity: SHA-256 over the tokenizer and the chat template.
        wrapped: Ids of messages shown in another role, because the template does not take
            theirs at that place.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    segments: tuple[SegmentSpan, ...]
    rewrites: tuple[Rewrite, ...]
    escaped: tuple[tuple[str, str], ...]
    text: str
    identity: str
    wrapped: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def field_spans(self, name: str) -> tuple[Span, ...]:
        """Return every occurrence of a field, in order; () if it has none."""
        return tuple(span for span in self.spans if span.kind == "field" and span.name == name)

    def message_span(self, message_id: str) -> Span:
        """Return the block of a message: role header, content and terminator.

        Raises:
            TemplateError: The prompt has no such message.
        """
        known = [span for span in self.spans if span.kind == "message"]
        for span in known:
            if span.name == message_id:
                return span
        raise TemplateError(
            f"the prompt has no message {message_id!r}",
            hint=nearest(message_id, (span.name for span in known)),
        )

"""The tokenizer and the chat template: the only place that sees them.

Owns encoding with character ranges, decoding, what counts as a control token, and the
identity of both. Does not know messages.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from kvnotes.errors import TemplateError
from kvnotes.prompt import capabilities
from kvnotes.prompt.chat import ChatTemplate
from kvnotes.prompt.escape import ControlText, Escaped
from kvnotes.prompt.messages import ErratumStyle
from kvnotes.prompt.shape import ChatShape
from kvnotes.prompt.stream import StreamDecoder

_CACHE = 4096
_PROBES = (
    "",
    "\n",
    "system\nBe brief.",
    " 10:45, 12 o'clock  \n\n",
    "user\nGr\u00fc\u00dfe \U0001f469\u200d\U0001f680 e\u0301 12",
    "\tend ",
)


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A text and its tokens.

    Args:
        ids: The tokens.
        starts: First character of each token, never decreasing.
        stops: Character after the last of each token, never decreasing.
        controls: Character ranges that became control tokens.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    controls: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DecodedIds:
    """Generated ids as text.

    Args:
        content: What a chat template is given as the content: control strings that were
            spelled out in ordinary tokens are escaped.
        following: The same as it stands behind a control token (a leading space is kept).
        raw: `following` without the escaping.
        found: Control strings that were escaped.
    """

    content: str
    following: str
    raw: str
    found: tuple[str, ...]


class PromptTokenizer:
    """A fast tokenizer of transformers with a chat template.

    Args:
        tokenizer: The tokenizer; later changes to it are not seen.
        chat_template: Jinja source to use instead of the tokenizer's own.
        erratum_style: Its marker is neutralised in untrusted text.
        clock: Time that the template's `strftime_now` shows; None freezes it at first use.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        erratum_style: ErratumStyle | None = None,
        clock: datetime | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TemplateError(
                f"a fast tokenizer is needed for character offsets, got {type(tokenizer).__name__}",
                hint="load it with AutoTokenizer and a tokenizer.json in the folder",
            )
        self._backend = _private_copy(backend)
        self._special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._unk_id = tokenizer.unk_token_id
        self._eos_id = tokenizer.eos_token_id
        self._bos = str(tokenizer.bos_token or "")
        variables = dict(tokenizer.special_tokens_map)
        source = chat_template if chat_template is not None else _template_of(tokenizer)
        self._chat = ChatTemplate(source, variables, clock) if source is not None else None
        controls = _controls_of(tokenizer)
        self.control_strings: frozenset[str] = frozenset(controls)
        self.control_ids: frozenset[int] = frozenset(
            i for word in controls if (i := self._backend.token_to_id(word)) is not None
        )
        self._splitters = tuple(word for word, splits in controls.items() if splits)
        self._normalizes = self._backend.normalizer is not None and _any_normalized(tokenizer)
        self.piece = lru_cache(_CACHE)(self._encode_piece)
        # Text behind a control token that stands already: (word, text) -> the text's tokens.
        self.piece_behind = lru_cache(_CACHE)(self._encode_behind)
        self._use_style(erratum_style or ErratumStyle())
        identity = [self._backend.to_str(), source, sorted(map(str, variables.items()))]
        self.identity: str = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def with_erratum_style(self, style: ErratumStyle) -> PromptTokenizer:
        """Return a tokenizer that neutralises another marker; it shares everything else."""
        other = copy(self)
        other._use_style(style)
        return other

    def for_session(self, style: ErratumStyle, clock: datetime | None = None) -> PromptTokenizer:
        """Return the tokenizer of one session: its erratum style, its clock frozen.

        A clock that was set is kept. Templates that show no time are shared.

        Args:
            style: Wording of errata.
            clock: The time of a session that goes on; None is now.
        """
        other = self.with_erratum_style(style)
        shows_time = self._chat is not None and self._chat.shows_time
        if self._chat is not None and shows_time and (clock or self._chat.clock is None):
            other._chat = self._chat.at(clock or datetime.now())
            other.__dict__.pop("shape", None)  # made of rendered text, which has a date in it
        return other

    @property
    def has_chat_template(self) -> bool:
        """Whether chat prompts can be rendered."""
        return self._chat is not None

    @property
    def chat(self) -> ChatTemplate:
        """The chat template.

        Raises:
            TemplateError: There is none.
        """
        if self._chat is None:
            raise TemplateError(
                "a chat prompt needs a chat template, and the tokenizer has none",
                hint="pass chat_template=..., or use PromptTemplate.text_template",
            )
        return self._chat

    @property
    def clock(self) -> datetime | None:
        """The frozen time of the chat template; None until it is first used."""
        return self.chat.clock

    @clock.setter
    def clock(self, value: datetime | None) -> None:
        self.chat.clock = value

    @cached_property
    def capabilities(self) -> capabilities.TemplateCapabilities:
        """What orders of messages the chat template keeps in place."""
        return capabilities.probe(self.chat)

    @cached_property
    def shape(self) -> ChatShape:
        """What the chat template writes between messages."""
        return ChatShape(self.chat, self._bos)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """End tokens: the tokenizer's own, and what ends an assistant turn of the template."""
        found = set() if self._eos_id is None else {int(self._eos_id)}
        if self._chat is not None:
            for gap in self.shape.gaps("assistant", "user"):
                piece = self.piece(gap.terminator)
                if piece.controls and piece.controls[0][0] == 0:
                    found.add(piece.ids[0])
        return frozenset(found)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize trusted text; control strings in it become control tokens."""
        return self.piece(text).ids

    def encode_untrusted(self, text: str) -> tuple[int, ...]:
        """Tokenize text after escaping its control text."""
        return self.piece(self.escape(text).text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """Return one token as a string; control tokens as they are written."""
        return str(self._backend.id_to_token(token_id))

    def stream(self) -> StreamDecoder:
        """Return an incremental detokenizer that leaves special tokens out."""
        return StreamDecoder(self.decode, self._special_ids)

    def is_stop(self, token_id: int) -> bool:
        """Whether a generated id ends a turn."""
        return token_id in self._special_ids or token_id in self.eos_ids

    def can_split_before(self, text: str, start: int) -> bool:
        """Whether tokens before character `start` cannot depend on the text from there."""
        return text.startswith(self._splitters, start) and self._pieces_join

    def count_controls(self, ids: Sequence[int]) -> int:
        """Return the number of control tokens among ids."""
        return sum(i in self.control_ids for i in ids)

    @cached_property
    def _pieces_join(self) -> bool:
        """Whether pieces that begin with a control token concatenate to the whole's tokens."""
        for word in self._splitters:
            pieces = [word + text for text in _PROBES]
            joined = tuple(i for piece in pieces for i in self._encode_piece(piece).ids)
            if joined != self._encode_piece("".join(pieces)).ids:
                return False
        return True

    def _encode_piece(self, text: str) -> EncodedPiece:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: tuple[int, ...] = tuple(encoding.ids)
        starts, stops = [], []
        # Offsets are made monotone, so that bisection finds every token that covers a
        # character; byte-level tokens of one character all have the character's offsets.
        last = 0
        for _, stop in encoding.offsets:
            last = max(last, stop)
            stops.append(last)
        first = len(text)
        for start, _ in reversed(encoding.offsets):
            first = min(first, start)
            starts.append(first)
        starts.reverse()
        controls = []
        for k, i in enumerate(ids):
            if i in self.control_ids:
                # Some control tokens take in the white space beside them; it is not theirs.
                place = text.find(self.token(i), starts[k], stops[k])
                if place >= 0:
                    controls.append((place, place + len(self.token(i))))
                elif i != self._unk_id:  # the unknown token also stands for ordinary text
                    controls.append((starts[k], stops[k]))
        return EncodedPiece(ids, tuple(starts), tuple(stops), tuple(controls))

    def _encode_behind(self, word: str, text: str) -> EncodedPiece:
        whole, size = self._encode_piece(word + text), len(word)
        return EncodedPiece(
            whole.ids[1:],
            tuple(max(start - size, 0) for start in whole.starts[1:]),
            tuple(max(stop - size, 0) for stop in whole.stops[1:]),
            tuple((a - size, b - size) for a, b in whole.controls if a >= size),
        )

    def _use_style(self, style: ErratumStyle) -> None:
        self.erratum_style = style
        finder = self._find_control_tokens if self._normalizes else None
        self.control_text = ControlText(self.control_strings, style.marker, finder)
        self.escape = lru_cache(_CACHE)(self._escape)
        self.decode_generated = lru_cache(_CACHE)(self._decode_generated)

    def _find_control_tokens(self, text: str) -> list[tuple[int, int]]:
        return list(self.piece(text).controls)

    def _escape(self, text: str) -> Escaped:
        return self.control_text.escape(text)

    def _decode_generated(self, ids: tuple[int, ...]) -> DecodedIds:
        content, following, raw = "", "", ""
        found: list[str] = []
        run: list[int] = []
        for token_id in (*ids, None):
            if token_id is not None and token_id not in self.control_ids:
                run.append(token_id)
                continue
            behind = self._decode_behind(run)
            escaped = self.control_text.escape(behind)
            found.extend(escaped.found)
            first = self.control_text.escape(self.decode(run)).text if run else ""
            content += first if not content else escaped.text
            word = "" if token_id is None else self.token(token_id)
            content, following = content + word, following + escaped.text + word
            raw, run = raw + behind + word, []
        return DecodedIds(content, following, raw, tuple(found))

    def _decode_behind(self, ids: list[int]) -> str:
        """Decode ids as they stand behind other text: some decoders strip a leading space."""
        anchor = self.piece("a").ids
        return self.decode([*anchor, *ids])[len(self.decode(anchor)) :]


def _private_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Copy a tokenizer without truncation, padding and post-processor.

    Post-processors add begin tokens and trim white space off the offsets.
    """
    private = tokenizers.Tokenizer.from_str(backend.to_str())
    private.no_truncation()
    private.no_padding()
    private.post_processor = None
    return private


def _template_of(tokenizer: Any) -> str | None:
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        source = source.get("default")
    return source if isinstance(source, str) else None


def _controls_of(tokenizer: Any) -> dict[str, bool]:
    """Control strings, each with whether text may be cut before it.

    White space that a tokenizer holds as added tokens (runs of newlines or blanks) is
    ordinary text. A token that takes in white space to its left is no place to cut.
    """
    controls = {str(word): False for word in tokenizer.all_special_tokens}
    for token in tokenizer.added_tokens_decoder.values():
        word = str(token.content)
        if token.special or word.replace("\u2581", " ").strip():
            controls[word] = not (token.lstrip or token.single_word or token.normalized)
    controls.pop("", None)
    for word in _reached_into(controls):
        controls[word] = False
    return controls


def _reached_into(words: Collection[str]) -> Iterator[str]:
    """Yield the words that another one can begin before and reach into, or beyond.

    Some tokenizers have thousands of control tokens: pairs are never compared.
    """
    ends = sorted({word[k:] for word in words for k in range(1, len(word))})
    known = frozenset(ends)
    for word in words:
        place = bisect_left(ends, word)
        inside = place < len(ends) and ends[place].startswith(word)
        if inside or any(word[:k] in known for k in range(1, len(word) + 1)):
            yield word


def _any_normalized(tokenizer: Any) -> bool:
    return any(token.normalized for token in tokenizer.added_tokens_decoder.values())

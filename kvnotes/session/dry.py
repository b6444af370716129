"""Dry runs: a model whose sessions plan, and compute nothing.

Owns the way from a model to its `DryEngine`: which segments count as compiled, and which
token stands for a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvnotes.engine.dry import DryEngine
from kvnotes.errors import TemplateError
from kvnotes.plan import Plan, Run
from kvnotes.prompt import PromptTokenizer, SegmentSpan
from kvnotes.segment import KVSegment
from kvnotes.session.book import SegmentBook
from kvnotes.session.loaded import Model

_WORDS = ("a", "the", "x", "I", "0", "-")
"""Texts of one token in most vocabularies, one of which stands for every generated token."""


@dataclass(frozen=True, slots=True)
class DryCompile:
    """A segment that a session wants compiled.

    Args:
        name: Name of the segment.
        variant: Current (field, value) pairs of its preamble.
        num_tokens: Its tokens.
        num_preamble_tokens: Tokens of the preamble that it is compiled behind.
        compiled: It is there already.
        predicted_ms: What compiling it takes; 0 if it is there.
    """

    name: str
    variant: tuple[tuple[str, str], ...]
    num_tokens: int
    num_preamble_tokens: int
    compiled: bool
    predicted_ms: float


class DryBook(SegmentBook):
    """Segments without K/V, and a list of those that were wanted.

    Args:
        engine: Stands for the model's engine.
        source: The model. Segments of its book and of its store are taken as compiled.
    """

    def __init__(self, engine: DryEngine, source: Model) -> None:
        super().__init__(engine, tokenizer=source.tokenizer)
        self._source = source
        self._cost = engine.cost
        self._wanted: dict[Run, DryCompile] = {}
        for name, run, preamble_ids in source.book.known():
            self.add(name, engine.stand_in(run, preamble_ids))

    @property
    def wanted(self) -> tuple[DryCompile, ...]:
        """Every segment that a session asked for, in order."""
        return tuple(self._wanted.values())

    def compile(self, span: SegmentSpan, *, strict: bool = False) -> KVSegment:
        """Return a stand-in, and note what compiling the segment would take."""
        segment = super().compile(span, strict=strict)
        if segment.run not in self._wanted:
            there = self._source.store.has(segment.identity, segment.run) is not None
            plan = Plan.prefill((*span.preamble_ids, *span.token_ids))
            self._wanted[segment.run] = DryCompile(
                span.name,
                span.variant_values,
                len(span.token_ids),
                len(span.preamble_ids),
                there,
                0.0 if there else self._cost.predict_ms(plan),
            )
        return segment


@dataclass(frozen=True)
class DryModel(Model):
    """A model whose sessions plan, and compute nothing; see `dry_run`."""

    book: DryBook = field(init=False)
    source: Model = field(kw_only=True)

    def __post_init__(self) -> None:
        assert isinstance(self.engine, DryEngine)
        object.__setattr__(self, "book", DryBook(self.engine, self.source))


def dry_run(model: Model, stops: Sequence[str] = ()) -> DryModel:
    """Return a model that plans as another one does, without computing.

    Args:
        model: The model it stands for; nothing of it is run.
        stops: Stop strings, none of which is generated.

    Example:
        >>> session = Session(dry_run(model), messages=[{"role": "user", "content": "Hi"}])
        >>> session.generate().plan.shape
        'C'
    """
    engine = DryEngine(model.engine, reply_token(model.tokenizer, stops))
    return DryModel(engine, model.tokenizer, model.name, source=model)


def reply_token(tokenizer: PromptTokenizer, stops: Sequence[str] = ()) -> int:
    """Return a token of plain text that is part of no stop string.

    Raises:
        TemplateError: The tokenizer has none.
    """
    for word in _WORDS:
        ids = tokenizer.encode(word)
        text = tokenizer.decode(ids * max(map(len, stops), default=1))
        if len(ids) == 1 and not tokenizer.is_stop(ids[0]) and not any(s in text for s in stops):
            return ids[0]
    raise TemplateError(
        f"no token of {', '.join(map(repr, _WORDS))} can stand for a reply beside the stop "
        f"strings {', '.join(map(repr, stops)) or '(none)'}",
        hint="leave out the stop strings that are single letters",
    )

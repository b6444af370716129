"""The compiled segments of one model, by the text they stand for.

Owns `SegmentBook`: from a segment's span in a prompt to its K/V, wherever a store has them.
Compiled segments are the only K/V that sessions of one model share; each was compiled in
isolation, by an explicit declaration.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvnotes.engine.base import Engine
from kvnotes.plan import Run, num_equal
from kvnotes.prompt import PromptTokenizer, SegmentSpan
from kvnotes.segment import KVSegment
from kvnotes.store import KVStore, Provenance, digest_text
from kvnotes.store.header import FieldSpan, canonical_json

MAX_VERSION_DIGITS = 9
"""What follows the @ of a name is a version if it has no more digits."""


class SegmentBook:
    """Compiled segments of one model.

    Args:
        engine: Compiles what is not there.
        store: Where they are kept; memory by default.
        tokenizer: For the provenance of stored files.
    """

    def __init__(
        self,
        engine: Engine,
        store: KVStore | None = None,
        tokenizer: PromptTokenizer | None = None,
    ) -> None:
        self.store = store or KVStore()
        self._engine = engine
        self._tokenizer = tokenizer
        self._by_name: dict[str, dict[Run, tuple[int, ...]]] = {}

    def compile(self, span: SegmentSpan, *, strict: bool = False) -> KVSegment:
        """Return the compiled segment for a span, compiling it if nobody has it.

        Args:
            span: The segment in a prompt.
            strict: Raise where it cannot be stored; else it is in memory alone then.
        """
        run = run_of(span)
        found = self.store.get_or_compile(
            self._engine.identity,
            run,
            lambda: self._engine.compile(span.token_ids, span.preamble_ids),
            lambda: self.provenance(span),
            strict=strict,
        )
        self._note(span.name, found)
        return found

    def add(self, name: str, segment: KVSegment) -> None:
        """Add a segment compiled elsewhere, for example loaded from a file.

        Raises:
            SpecMismatchError: Another model computed it.
            LineageError: It saw more than its declared preamble.
            StorageError: It cannot be written to the disk; it is in memory then.
        """
        self._engine.identity.check_same(segment.identity, f"segment {name!r}")
        self.store.put(segment, Provenance(name=name))
        self._note(name, segment)

    def find(self, span: SegmentSpan) -> KVSegment | None:
        """Return the compiled segment of exactly this text and preamble, if there is one."""
        return self.store.find(self._engine.identity, run_of(span))

    def nearest(self, span: SegmentSpan) -> tuple[KVSegment, int] | None:
        """Return the segment of this name and preamble that shares most leading tokens."""
        best: tuple[Run, int] | None = None
        for run, preamble_ids in self._by_name.get(span.name, {}).items():
            if preamble_ids == span.preamble_ids:
                shared = num_equal(run.token_ids, span.token_ids)
                if shared and (best is None or shared > best[1]):
                    best = (run, shared)
        if best is None:
            return None
        segment = self.store.find(self._engine.identity, best[0])
        return None if segment is None else (segment, best[1])

    def provenance(self, span: SegmentSpan) -> Provenance:
        """Return what a stored file says about the text of a span.

        Variants of one text are a family.
        """
        name, _, version = span.name.partition("@")
        numbered = version.isascii() and version.isdigit() and len(version) <= MAX_VERSION_DIGITS
        fields: tuple[FieldSpan, ...] = ()
        if self._tokenizer is not None and span.fields:
            piece = self._tokenizer.piece(span.text)
            fields = tuple(
                FieldSpan(
                    name=field,
                    value=value,
                    start=bisect_right(piece.stops, start),
                    stop=max(bisect_right(piece.stops, start), bisect_left(piece.starts, stop)),
                )
                for field, value, start, stop in span.fields
            )
        digest, family = digest_text(span.text), ""
        if span.variant_values:
            names = [field for field, _ in span.variant_values]
            family = digest_text(canonical_json([span.name, names, digest]))
        return Provenance(
            name=name if numbered else span.name,
            version=int(version) if numbered else 0,
            text=span.text,
            text_sha256=digest,
            role=span.role,
            tokenizer=self._tokenizer.identity if self._tokenizer else "",
            spans=fields,
            variant=span.variant_values,
            family=family,
        )

    def known(self) -> Iterator[tuple[str, Run, tuple[int, ...]]]:
        """Yield name, run and preamble of every segment that was compiled or added here."""
        for name, runs in list(self._by_name.items()):
            for run, preamble_ids in list(runs.items()):
                yield name, run, preamble_ids

    @property
    def nbytes(self) -> int:
        """Bytes of all compiled K/V in memory that this tenant may see."""
        return self.store.memory.nbytes_of(self.store.readers)

    def __len__(self) -> int:
        return len(self.store.memory.keys(self.store.readers))

    def _note(self, name: str, segment: KVSegment) -> None:
        self._by_name.setdefault(name, {})[segment.run] = segment.preamble_ids


def run_of(span: SegmentSpan) -> Run:
    """Return the run that a segment's K/V have when it is compiled."""
    whole = Run((*span.preamble_ids, *span.token_ids))
    return whole.cut(len(span.preamble_ids), len(whole))

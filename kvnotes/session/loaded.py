"""A model ready for use: engine, tokenizer, compiled segments.

Owns `Model`, `load` and `SegmentBook`. Compiled segments are the only K/V that sessions of
one model share; each was compiled in isolation, by an explicit declaration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvnotes.engine.base import Engine
from kvnotes.plan import check_compiled, digest_tokens, num_equal
from kvnotes.prompt import PromptTokenizer, SegmentSpan
from kvnotes.segment import KVSegment


class SegmentBook:
    """Compiled segments of one model, by name, text and preamble."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_key: dict[str, KVSegment] = {}
        self._by_name: dict[str, list[KVSegment]] = {}

    def key(self, token_ids: Sequence[int], preamble_ids: Sequence[int]) -> str:
        """Return the full SHA-256 key: tokens, preamble and fingerprint."""
        parts = (self._engine.fingerprint, digest_tokens(preamble_ids), digest_tokens(token_ids))
        return hashlib.sha256("/".join(parts).encode()).hexdigest()

    def compile(self, span: SegmentSpan) -> KVSegment:
        """Return the compiled segment for a span, compiling it if it is not there."""
        key = self.key(span.token_ids, span.preamble_ids)
        found = self._by_key.get(key)
        if found is None:
            found = self._engine.compile(span.token_ids, span.preamble_ids)
            self.add(span.name, found)
        return found

    def add(self, name: str, segment: KVSegment) -> None:
        """Add a segment compiled elsewhere, for example loaded from a file.

        Raises:
            SpecMismatchError: Another model computed it.
            LineageError: It saw more than its declared preamble.
        """
        self._engine.identity.check_same(segment.identity, f"segment {name!r}")
        check_compiled(name, segment.run, segment.preamble_ids)
        self._by_key[self.key(segment.run.token_ids, segment.preamble_ids)] = segment
        self._by_name.setdefault(name, []).append(segment)

    def find(self, span: SegmentSpan) -> KVSegment | None:
        """Return the compiled segment of exactly this text and preamble, if there is one."""
        return self._by_key.get(self.key(span.token_ids, span.preamble_ids))

    def nearest(self, span: SegmentSpan) -> tuple[KVSegment, int] | None:
        """Return the segment of this name and preamble that shares most leading tokens."""
        best: tuple[KVSegment, int] | None = None
        for segment in self._by_name.get(span.name, []):
            if segment.preamble_ids == span.preamble_ids:
                shared = num_equal(segment.run.token_ids, span.token_ids)
                if shared and (best is None or shared > best[1]):
                    best = (segment, shared)
        return best

    @property
    def nbytes(self) -> int:
        """Bytes of all compiled K/V."""
        return sum(segment.nbytes for segment in self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)


@dataclass(frozen=True)
class Model:
    """An engine with its tokenizer and the segments compiled for it."""

    engine: Engine
    tokenizer: PromptTokenizer
    name: str
    book: SegmentBook = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "book", SegmentBook(self.engine))


def load(
    name: str = "smollm2-135m",
    *,
    dtype: str | None = None,
    chat_template: str | None = None,
    verify_model: bool = True,
) -> Model:
    """Load a model and prove that its K/V can be moved and recomputed.

    Args:
        name: `smollm2-135m` (embedded), a hub id, a folder, or a `.gguf` file.
        dtype: `float32` (default), `bfloat16` or `float16`.
        chat_template: Jinja text used in place of the tokenizer's own.
        verify_model: Compare splices and edits of a few tokens with a masked forward.

    Raises:
        ModelNotFoundError: No such model; the hint lists the ways to get one.
        UnsupportedModelError: Its K/V cannot be edited exactly; the reason is named.
    """
    from kvnotes.engine.hf import HFEngine
    from kvnotes.engine.models import load_model_and_tokenizer, resolve_model
    from kvnotes.engine.weights import weights_digest
    from kvnotes.fidelity import check_engine

    resolved = resolve_model(name)
    model, tokenizer = load_model_and_tokenizer(resolved, dtype=dtype)
    engine = HFEngine(model, weights_digest(resolved.path))
    if verify_model:
        check_engine(engine)
    return Model(engine, PromptTokenizer(tokenizer, chat_template), resolved.name)

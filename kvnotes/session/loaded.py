"""A model ready for use: engine, tokenizer, compiled segments.

Owns `Model` and `load`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvnotes.engine.base import Engine, engine_versions
from kvnotes.prompt import PromptTokenizer
from kvnotes.session.book import SegmentBook
from kvnotes.store import KVStore


@dataclass(frozen=True)
class Model:
    """An engine with its tokenizer and the segments compiled for it."""

    engine: Engine
    tokenizer: PromptTokenizer
    name: str
    store: KVStore = field(default_factory=KVStore)
    book: SegmentBook = field(init=False)

    def __post_init__(self) -> None:
        book = SegmentBook(self.engine, self.store, self.tokenizer)
        object.__setattr__(self, "book", book)


def load(
    name: str = "smollm2-135m",
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    chat_template: str | None = None,
    verify_model: bool = True,
    store: KVStore | Path | str | None = None,
) -> Model:
    """Load a model and prove that its K/V can be moved and recomputed.

    Args:
        name: `smollm2-135m` (embedded), a hub id, a folder, or a `.gguf` file. The folder of an
            adapter loads the model it stands on, and merges it.
        dtype: `float32` (default), `bfloat16` or `float16`.
        quantize: Weights in fewer bits: `int8`, `int4` or `float8`; needs torchao. K/V stay in
            `dtype`.
        chat_template: Jinja text used in place of the tokenizer's own.
        verify_model: Compare splices and edits with a masked forward, see `kvnotes.gate`. A
            model that has passed with these versions is not measured again.
        store: Where compiled segments are kept, or its folder; in memory by default.

    Raises:
        ModelNotFoundError: No such model; the hint lists the ways to get one.
        UnsupportedModelError: Its K/V cannot be edited exactly; the reason is named.
        EngineError: The memory does not hold it; no such dtype or quantization; the package
            that quantizes or applies an adapter is not there.
    """
    from kvnotes.engine.loading import load_engine
    from kvnotes.engine.models import resolve_model
    from kvnotes.gate import check_gate

    resolved = resolve_model(name)
    engine, tokenizer = load_engine(resolved, dtype=dtype, quantization=quantize)
    if verify_model:
        check_gate(engine)
    if not isinstance(store, KVStore):
        store = KVStore(None if store is None else Path(store), versions=engine_versions())
    return Model(engine, PromptTokenizer(tokenizer, chat_template), resolved.name, store)

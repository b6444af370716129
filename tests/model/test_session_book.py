"""Compiled segments of one model over a store: compiled once, described, found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers_models import engine, same_kv, tokens
from helpers_session import tiny_model

from kvnotes.errors import LineageError, SpecMismatchError, StorageError
from kvnotes.prompt import SegmentSpan
from kvnotes.segment import KVSegment
from kvnotes.session import SegmentBook
from kvnotes.session.book import run_of
from kvnotes.store import KVStore, Limits, content_key

SPAN = SegmentSpan(
    name="policy",
    start=0,
    stop=20,
    message_id="",
    occurrence=0,
    token_ids=tokens(20, 1),
    num_edge_left=0,
    num_edge_right=0,
    standalone_start=0,
    standalone_stop=20,
    preamble_ids=(),
    variant_values=(),
    text="Never sell below the price.",
    role="system",
    fields=(),
)


def span(**changes: Any) -> SegmentSpan:
    return replace(SPAN, **changes)


def bits(segment: KVSegment) -> list[Any]:
    return [*segment.keys, *segment.values]


def book(store: KVStore | None = None) -> SegmentBook:
    return SegmentBook(engine(), store)


def test_segment_is_compiled_once_for_all_books_on_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = book(KVStore(tmp_path)), book(KVStore(tmp_path))
    first = one.compile(SPAN)
    monkeypatch.setattr(type(engine()), "compile", lambda *a: pytest.fail("compiled again"))
    for found in (one.compile(SPAN), two.find(SPAN), two.compile(SPAN)):
        assert found is not None and same_kv(bits(found), bits(first))
    assert one.find(span(token_ids=tokens(20, 2))) is None
    assert one.find(span(preamble_ids=(1,))) is None


def test_compiled_segment_is_what_the_engine_computes(tmp_path: Path) -> None:
    preamble = tokens(6, 3)
    book(KVStore(tmp_path)).compile(span(preamble_ids=preamble))
    found = book(KVStore(tmp_path)).find(span(preamble_ids=preamble))
    cold = engine().prefill((*preamble, *SPAN.token_ids)).cache
    assert found is not None
    for mine, whole in zip(bits(found), [*cold.buffer.keys, *cold.buffer.values], strict=True):
        assert (mine - whole[:, 6:26]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "stored", "version"),
    [
        ("policy", "policy", 0),
        ("refunds@3", "refunds", 3),
        ("refunds@", "refunds@", 0),
        ("refunds@latest", "refunds@latest", 0),
        ("refunds@\u00b2", "refunds@\u00b2", 0),
        ("refunds@" + "9" * 30, "refunds@" + "9" * 30, 0),
        ("a@b@4", "a@b@4", 0),
    ],
)
def test_name_and_version_are_in_the_listing(
    tmp_path: Path, name: str, stored: str, version: int
) -> None:
    store = KVStore(tmp_path)
    book(store).compile(span(name=name))
    assert [(e.name, e.version) for e in store.entries()] == [(stored, version)]


def test_header_says_what_was_compiled(tmp_path: Path) -> None:
    model, store = tiny_model(), KVStore(tmp_path)
    text = "Orders of Ann are sent to Paris."
    ids = model.tokenizer.encode(text)
    own = SegmentBook(model.engine, store, model.tokenizer)
    start = text.index("Ann")
    own.compile(
        span(
            token_ids=tuple(ids),
            text=text,
            fields=(("customer", "Ann", start, start + 3),),
        )
    )
    (entry,) = store.entries()
    header = store.header(entry.key)
    assert header is not None
    source = header.provenance
    assert (source.text, source.role) == (text, "system")
    assert source.tokenizer == model.tokenizer.identity
    (field,) = source.spans
    covered = model.tokenizer.decode(header.token_ids[field.start : field.stop])
    assert field.name == "customer" and "Ann" in covered and len(covered) < 12


def test_variants_of_a_text_are_a_family_with_one_text(tmp_path: Path) -> None:
    store = KVStore(tmp_path)
    own = book(store)
    for index, value in enumerate(("gold", "silver", "none")):
        values = (("tier", value),)
        own.compile(span(preamble_ids=tokens(4, 10 + index), variant_values=values))
    own.compile(span(name="other", preamble_ids=(5,)))
    entries = store.entries()
    families = {entry.family for entry in entries if entry.name == "policy"}
    assert len(families) == 1
    assert {e.variant for e in entries} == {"", "tier=gold", "tier=silver", "tier=none"}
    assert len(list((tmp_path / "texts").iterdir())) == 1
    for entry in entries:
        header = store.header(entry.key)
        assert header is not None and store.text(header) == SPAN.text


def test_full_disk_does_not_stop_a_session(tmp_path: Path) -> None:
    store = KVStore(tmp_path, limits=Limits(max_nbytes=100))
    own = book(store)
    values = (("tier", "gold"),)
    first = own.compile(span(preamble_ids=(3,), variant_values=values))
    assert own.compile(span(preamble_ids=(3,), variant_values=values)) is first
    assert store.counters.compiled == 1
    assert store.counters.refused == {"StorageError": 1}
    with pytest.raises(StorageError):
        own.compile(SPAN, strict=True)


def test_added_segment_is_found_by_its_tokens() -> None:
    own = book()
    segment = engine().compile(SPAN.token_ids, ())
    own.add("policy", segment)
    assert own.find(SPAN) is segment
    assert [(name, run.digest) for name, run, _ in own.known()] == [("policy", run_of(SPAN).digest)]
    assert len(own) == 1 and own.nbytes == segment.nbytes


def test_segment_of_another_model_or_of_a_conversation_is_not_added() -> None:
    own = book()
    with pytest.raises(SpecMismatchError):
        own.add("policy", engine("qwen2-bias").compile(SPAN.token_ids, ()))
    cache = engine().prefill(SPAN.token_ids).cache
    part = cache.buffer.segment(cache.layout[0].run.cut(5, 15), 5, engine().identity)
    with pytest.raises(LineageError):
        own.add("policy", part)
    assert len(own) == 0


def test_nearest_shares_the_most_leading_tokens_behind_the_same_preamble() -> None:
    own = book()
    base = tokens(20, 1)
    for length in (4, 12):
        own.compile(span(token_ids=(*base[:length], *tokens(20 - length, 50 + length))))
    own.compile(span(token_ids=base[:19], preamble_ids=(7,)))
    own.compile(span(name="other", token_ids=base[:18]))
    found = own.nearest(SPAN)
    assert found is not None
    segment, shared = found
    assert shared >= 12 and segment.run.token_ids[:shared] == base[:shared]
    assert own.nearest(span(token_ids=tokens(20, 99), preamble_ids=(8,))) is None


def test_nearest_that_was_evicted_is_none() -> None:
    own = book(KVStore(memory_nbytes=1))
    own.compile(SPAN)
    own.compile(span(name="other", token_ids=tokens(20, 2)))  # pushes it out
    assert own.nearest(span(token_ids=SPAN.token_ids[:10])) is None


def test_books_of_two_tenants_share_nothing_but_shared_segments(tmp_path: Path) -> None:
    store = KVStore(tmp_path)
    book(store).compile(span(name="shared"))
    one, two = book(store.for_tenant("one")), book(store.for_tenant("two"))
    private = span(token_ids=tokens(20, 5))
    one.compile(private)
    assert one.find(private) is not None and two.find(private) is None
    assert one.find(SPAN) is not None and two.find(SPAN) is not None
    assert two.nbytes < one.nbytes
    key = content_key("segment", "one", engine().identity.fingerprint, run_of(private).digest)
    assert two.store.get(key) is None


def test_threads_may_compile_while_others_look() -> None:
    own = book()
    spans = [span(name=f"s{i}", token_ids=tokens(12, 100 + i)) for i in range(12)]
    seen: list[int] = []

    def look() -> None:
        for _ in range(200):
            seen.append(len(list(own.known())))

    threads = [Thread(target=lambda: [own.compile(one) for one in spans]), Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(own.known())) == 12
    assert len(seen) == 200

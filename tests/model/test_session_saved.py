"""Sessions on disk: what is loaded goes on as if it had never been saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers_models import relative_gap
from helpers_session import FEW, run, shop, tiny_model

from kvnotes import Session
from kvnotes.errors import (
    EngineError,
    SegmentFormatError,
    SpecMismatchError,
    StorageError,
)
from kvnotes.prompt import PromptTokenizer
from kvnotes.session import Model, saved
from kvnotes.store import SUFFIX, KVStore

GAP = 1e-5
"""Rounding in float32: what is loaded stands elsewhere in memory, and is read in other parts."""

CHOICES = ["yes", "no"]
STRATEGIES = ["suffix", "reprefill", "refresh", "selective", "erratum", "refresh+erratum"]


def model_on(folder: Path, family: str = "smollm2") -> Model:
    """The tiny model over a store in a folder, as a new process would load it."""
    tiny = tiny_model(family)
    return Model(tiny.engine, tiny.tokenizer, tiny.name, KVStore(folder))


def talked(folder: Path, **options: Any) -> Session:
    session = shop(model_on(folder), **options)
    session.id = "talk"
    session.user("what is the status?", generate=FEW)
    return session


def files(folder: Path) -> set[Path]:
    return set(folder.rglob(f"*{SUFFIX}"))


def restarted(session: Session, folder: Path) -> Session:
    session.save()
    return Session.load(model_on(folder), session.id)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"


def test_loaded_session_has_the_same_cache_messages_and_lineage(folder: Path) -> None:
    session = talked(folder)
    session.edit(status="high", strategy="refresh+erratum")
    session.user("and now?", generate=FEW)
    loaded = restarted(session, folder)
    mine, theirs = session._talk.live, loaded._talk.live
    assert mine is not None and theirs is not None
    assert theirs.cache.canonical_layout == mine.cache.canonical_layout
    assert theirs.cache.checksum() == mine.cache.checksum()
    assert theirs.blocks == mine.blocks
    assert loaded.messages == session.messages and loaded.values == session.values


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_edit_after_a_restart_equals_the_edit_without_one(folder: Path, strategy: str) -> None:
    session = talked(folder)
    loaded = restarted(session, folder)
    for each in (session, loaded):
        each.edit(status="high", strategy=strategy)
    mine, theirs = run(session), run(loaded)
    assert relative_gap(mine.last_logits(), theirs.last_logits()) < GAP
    assert mine.cache.canonical_layout == theirs.cache.canonical_layout


def test_the_next_turn_computes_only_its_own_tokens(folder: Path) -> None:
    session = talked(folder)
    loaded = restarted(session, folder)
    turn = loaded.user("and?", decide=CHOICES)
    assert turn.plan.tokens == session.user("and?", decide=CHOICES).plan.tokens
    assert turn.plan.shape == "R C" and turn.plan.tokens.computed < 40
    assert turn.fallback_reason is None


def test_waiting_changes_are_saved_and_done_by_the_next_turn(folder: Path) -> None:
    session = talked(folder)
    session.edit(status="high", strategy="erratum")
    session.delete("m0", strategy="refresh")
    session.add("user", "is it high?")
    loaded = restarted(session, folder)
    assert loaded.values["status"] == "high"
    assert relative_gap(run(session).last_logits(), run(loaded).last_logits()) < GAP


def test_session_without_a_cache_is_saved_too(folder: Path) -> None:
    session = shop(model_on(folder))
    loaded = restarted(session, folder)
    assert loaded.num_cached_tokens == 0
    assert loaded.user("hello?", decide=CHOICES).plan.tokens.total > 0


def test_second_save_and_a_fork_write_only_what_is_new(folder: Path) -> None:
    session = talked(folder)
    session.save()
    before = files(folder)
    session.save()
    assert files(folder) == before
    fork = session.fork(id="fork")
    fork.user("another way?", generate=FEW)
    fork.save()
    new = files(folder) - before
    assert before <= files(folder) and 0 < len(new) <= 2
    sizes = {path: path.stat().st_size for path in files(folder)}
    assert max(sizes[path] for path in new) < max(sizes[path] for path in before)


def test_many_saves_do_not_make_more_and_more_files(folder: Path) -> None:
    session = talked(folder)
    for number in range(12):
        session.add("user", f"turn {number}")
        run(session)
        record = session.save()
    pieces = [source for source in record.sources if source.kind == "run"]
    assert len(pieces) <= 2 * saved.MAX_PIECES
    loaded = Session.load(model_on(folder), "talk")
    again = loaded.save()
    assert len(again.sources) <= len(record.sources)


def test_fork_tree_is_told_by_parents_and_each_goes_its_own_way(folder: Path) -> None:
    root = talked(folder)
    root.save()
    for name in ("left", "right"):
        child = root.fork(id=name)
        child.user(f"go {name}", generate=FEW)
        child.save()
    store = KVStore(folder)
    tree = {record.id: record.parent_id for record in saved.listed(store)}
    assert tree == {"talk": None, "left": "talk", "right": "talk"}
    texts = {n: Session.load(model_on(folder), n).messages[-2].content for n in ("left", "right")}
    assert texts == {"left": "go left", "right": "go right"}


def test_removing_a_session_keeps_the_runs_of_its_forks(folder: Path) -> None:
    root = talked(folder)
    root.save()
    fork = root.fork(id="fork")
    fork.user("on", generate=FEW)
    fork.save()
    store = KVStore(folder)
    saved.remove(store, "talk")
    loaded = Session.load(model_on(folder), "fork")
    assert loaded._talk.lost == ""
    assert saved.referenced_runs(store) == {
        source.key for source in saved.find(store, "fork").sources if source.kind == "run"
    }


def test_session_of_another_model_is_refused_and_what_differs_is_named(folder: Path) -> None:
    talked(folder).save()
    other = model_on(folder, "llama3")
    with pytest.raises(SpecMismatchError, match=r"vocab_size: \d+, here \d+"):
        Session.load(other, "talk")


def test_session_of_another_chat_template_is_refused(folder: Path) -> None:
    talked(folder).save()
    tiny = model_on(folder)
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    from helpers_prompt import family_tokenizer

    tokenizer = PromptTokenizer(family_tokenizer("smollm2"), template)
    other = Model(tiny.engine, tokenizer, tiny.name, tiny.store)
    with pytest.raises(SpecMismatchError, match="another tokenizer or chat template"):
        Session.load(other, "talk")


def test_lost_file_costs_a_prefill_and_is_named(folder: Path) -> None:
    session = talked(folder)
    record = session.save()
    key = next(source.key for source in record.sources if source.kind == "run")
    next(folder.rglob(f"{key}{SUFFIX}")).unlink()
    loaded = Session.load(model_on(folder), "talk")
    turn = loaded.user("and?", decide=CHOICES)
    expected = session.user("and?", decide=CHOICES)
    assert turn.plan.tokens.reused == 0
    assert "the saved cache is lost" in str(turn.fallback_reason)
    assert turn.decision is not None and expected.decision is not None
    assert turn.decision.chosen == expected.decision.chosen
    assert loaded.user("again?", decide=CHOICES).fallback_reason is None


def test_evicted_segment_is_compiled_again(folder: Path) -> None:
    session = talked(folder)
    record = session.save()
    key = next(source.key for source in record.sources if source.kind == "segment")
    KVStore(folder).remove([key])
    loaded = Session.load(model_on(folder), "talk")
    assert loaded._talk.lost == ""
    assert loaded.num_cached_tokens == session.num_cached_tokens


def test_damaged_record_is_refused(folder: Path) -> None:
    talked(folder).save()
    path = folder / "sessions" / "talk.json"
    path = path if path.exists() else next(folder.rglob("talk.json"))
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"{}", whole.replace(b'"talk"', b'"walk"', 1)):
        path.write_bytes(broken)
        with pytest.raises(SegmentFormatError, match="session"):
            Session.load(model_on(folder), "talk")
    path.write_bytes(whole)
    assert Session.load(model_on(folder), "talk").id == "talk"


def test_record_with_another_layout_is_refused(folder: Path) -> None:
    talked(folder).save()
    path = next(folder.rglob("talk.json"))
    record = json.loads(path.read_text())
    record["runs"][0]["token_ids"][0] += 1
    path.write_text(json.dumps(record))
    loaded = Session.load(model_on(folder), "talk")
    assert "the saved cache is lost" in loaded._talk.lost


def test_unknown_session_names_the_nearest(folder: Path) -> None:
    talked(folder).save()
    with pytest.raises(StorageError, match="no saved session 'tolk'") as caught:
        Session.load(model_on(folder), "tolk")
    assert "did you mean 'talk'?" in caught.value.hint


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 101, "nul\0"])
def test_id_that_is_no_name_is_refused(folder: Path, name: str) -> None:
    session = talked(folder)
    session.id = name
    with pytest.raises(StorageError, match="no id of a session"):
        session.save()


def test_session_with_an_open_stream_is_not_saved(folder: Path) -> None:
    session = talked(folder)
    session.add("user", "tell me")
    stream = session.stream(FEW)
    next(stream)
    with pytest.raises(EngineError, match="stream of this session is still open"):
        session.save()
    stream.close()
    assert session.save().num_tokens == session.num_cached_tokens


def test_store_without_a_folder_keeps_no_sessions() -> None:
    with pytest.raises(StorageError, match="no folder"):
        shop(tiny_model()).save()


def test_clock_of_the_template_is_that_of_the_first_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers_prompt import family_tokenizer

    template = (
        "{% for m in messages %}{{ m['role'] + strftime_now(' %Y: ') + m['content'] + '\n' }}"
        "{% endfor %}"
    )
    tiny = tiny_model()

    def model() -> Model:
        tokenizer = PromptTokenizer(family_tokenizer("smollm2"), template)
        return Model(tiny.engine, tokenizer, tiny.name, KVStore(folder))

    session = Session(model(), messages=[{"role": "system", "content": "hello"}], id="talk")
    run(session)
    session.save()
    year = datetime.now().year

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(year + 1, 1, 1)

    monkeypatch.setattr("kvnotes.prompt.tokenizer.datetime", Later)
    loaded = Session.load(model(), "talk")
    assert loaded.render().text == session.render().text
    assert str(year) in loaded.render().text

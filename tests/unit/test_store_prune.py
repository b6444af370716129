"""Pruning: leftovers go, what is needed or pinned stays, and a dry run only says so."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_tiers import IDENTITY, OTHER, find, named, run_named, variant

from kvnotes.errors import StorageError
from kvnotes.store import Entry, KVStore, Provenance, Pruned, Rule
from kvnotes.store.index import INDEX_NAME

OLD = 1e6
"""Seconds: older than everything that is taken for a leftover."""


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore(tmp_path / "s")


def put(store: KVStore, name: str, **options: bool) -> Entry:
    entry = store.put(named(name), Provenance(name=name), **options)
    assert entry is not None
    return entry


def make_old(path: Path, seconds: float = OLD) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at), follow_symlinks=False)


def used_before(store: KVStore, key: str, days: float) -> None:
    """Say that a segment was last used some days ago, without changing the order."""
    assert store.disk is not None
    entry = store.disk.entry(key)
    assert entry is not None
    old = replace(entry, used_at=time.time() - days * 86400)
    store.disk.index.write(lambda table: table.put(old))


def pruned(store: KVStore, rule: Rule | None = None) -> list[Pruned]:
    """What goes; first a dry run, which must say the same and change nothing."""
    assert store.disk is not None
    before = sorted(store.disk.root.rglob("*"))
    planned = store.prune(rule, dry_run=True)
    assert sorted(store.disk.root.rglob("*")) == before
    gone = store.prune(rule)
    assert [(p.kind, p.name, p.nbytes) for p in planned] == [
        (p.kind, p.name, p.nbytes) for p in gone
    ]
    return list(gone)


def names(store: KVStore) -> list[str]:
    return [entry.name for entry in store.entries()]


def test_store_without_leftovers_stays_as_it_is(store: KVStore) -> None:
    put(store, "a")
    store.put(*variant("policy", "x"))
    store.put_run(named("part of a session"))
    assert pruned(store) == []
    assert names(store) == ["", "a", "policy"]


def test_store_without_a_folder_has_nothing_to_prune() -> None:
    with pytest.raises(StorageError, match="cannot prune"):
        KVStore().prune()


@pytest.mark.parametrize("place", [".", "segments/ab", "texts", "pins", "library/shared/refunds"])
def test_part_of_a_dead_writer_goes_and_that_of_a_living_one_stays(
    store: KVStore, place: str
) -> None:
    put(store, "a")
    assert store.disk is not None
    folder = store.disk.root / place
    folder.mkdir(parents=True, exist_ok=True)
    dead, alive = folder / ".dead.part", folder / ".alive.part"
    dead.write_bytes(b"12345")
    alive.write_bytes(b"123")
    make_old(dead)
    (gone,) = pruned(store)
    assert (gone.kind, gone.nbytes) == ("part", 5)
    assert not dead.exists() and alive.exists()


def test_damaged_files_and_indexes_go(store: KVStore) -> None:
    entry = put(store, "a")
    assert store.disk is not None
    store.disk.path(entry.key).write_bytes(b"damaged")
    (store.disk.root / INDEX_NAME).write_bytes(b"damaged too" * 100)
    assert find(KVStore(store.disk.root), "a") is None
    kinds = [item.kind for item in pruned(KVStore(store.disk.root))]
    assert sorted(kinds) == ["damaged", "index"]
    assert pruned(store) == []


def test_given_up_downloads_and_idle_locks_go(store: KVStore) -> None:
    put(store, "a")
    assert store.disk is not None
    partial = store.disk.root / "partial"
    partial.mkdir()
    for name in ("old", "young"):
        (partial / name).write_bytes(b"x")
    make_old(partial / "old")
    (lock,) = (store.disk.root / "locks").iterdir()
    make_old(lock)
    assert sorted(item.name for item in pruned(store)) == [f"locks/{lock.name}", "partial/old"]
    put(store, "a")


def test_lock_that_somebody_holds_stays(store: KVStore) -> None:
    entry = put(store, "a")
    assert store.disk is not None
    other = KVStore(store.disk.root)
    assert other.disk is not None
    (lock,) = (store.disk.root / "locks").iterdir()
    with other.disk.locks.hold(entry.key):
        make_old(lock)
        store.prune()
        assert lock.exists()


def test_text_goes_when_no_variant_needs_it(store: KVStore) -> None:
    first, second = (store.put(*variant("policy", value)) for value in "xy")
    assert first is not None and second is not None and store.disk is not None
    (text,) = (store.disk.root / "texts").iterdir()
    make_old(text)
    store.remove([first.key])
    assert pruned(store) == []
    store.remove([second.key])
    (gone,) = pruned(store)
    assert (gone.kind, gone.nbytes) == ("text", len("policy"))
    assert not text.exists()


def test_text_of_a_variant_that_is_being_written_stays(store: KVStore) -> None:
    store.keep_text("policy")
    assert pruned(store) == []


def test_old_text_that_is_needed_again_stays(store: KVStore) -> None:
    store.keep_text("policy")
    assert store.disk is not None
    (text,) = (store.disk.root / "texts").iterdir()
    make_old(text)
    store.keep_text("policy")  # a variant of it is compiled now
    assert pruned(store) == []


def test_text_of_files_that_the_index_lost_stays(store: KVStore) -> None:
    store.put(*variant("policy", "x"))
    assert store.disk is not None
    (text,) = (store.disk.root / "texts").iterdir()
    make_old(text)
    (store.disk.root / INDEX_NAME).unlink()
    assert store.prune() == ()
    assert text.exists()


def test_segments_of_other_models_go_on_request(store: KVStore) -> None:
    put(store, "a")
    other = store.put(named("b", who=OTHER), Provenance(name="b"))
    assert other is not None
    assert pruned(store) == []
    (gone,) = pruned(store, Rule(keep_fingerprints={IDENTITY.fingerprint}))
    assert gone.entry == replace(other, used_at=gone.entry.used_at) if gone.entry else False
    assert "another model" in gone.reason
    assert names(store) == ["a"]
    assert find(store, "b", who=OTHER) is None, "not in memory either"


def test_segments_that_nobody_used_go_and_families_as_one(store: KVStore) -> None:
    put(store, "young")
    old = put(store, "old")
    variants = [store.put(*variant("policy", value)) for value in "xyz"]
    used_before(store, old.key, 10)
    for entry in variants[:2]:
        assert entry is not None
        used_before(store, entry.key, 10)
    assert [item.entry.name for item in pruned(store, Rule(unused_days=7.0)) if item.entry] == [
        "old"
    ]
    assert variants[2] is not None
    used_before(store, variants[2].key, 8)
    gone = pruned(store, Rule(unused_days=7.0))
    assert [item.kind for item in gone].count("segment") == 3
    assert names(store) == ["young"]


def test_least_recently_used_families_go_down_to_a_size(store: KVStore) -> None:
    sizes = {name: put(store, name).nbytes for name in "abc"}
    find(store, "a")
    rule = Rule(max_nbytes=sizes["a"] + sizes["c"])
    assert [item.entry.name for item in pruned(store, rule) if item.entry] == ["b"]
    assert names(store) == ["a", "c"]
    assert pruned(store, Rule(max_nbytes=1 << 40)) == []
    pruned(store, Rule(max_nbytes=0))
    assert names(store) == []


def test_rules_count_together(store: KVStore) -> None:
    sizes = [put(store, name).nbytes for name in "ab"]
    other = store.put(named("c", who=OTHER), Provenance(name="c"))
    assert other is not None
    rule = Rule(keep_fingerprints={IDENTITY.fingerprint}, max_nbytes=sum(sizes))
    assert [item.entry.name for item in pruned(store, rule) if item.entry] == ["c"]


def test_pinned_segments_stay_whatever_the_rule(store: KVStore) -> None:
    entry = put(store, "a", pinned=True)
    used_before(store, entry.key, 1000)
    rule = Rule(keep_fingerprints=set(), unused_days=0.0, max_nbytes=0)
    assert pruned(store, rule) == []
    assert names(store) == ["a"]


def test_parts_of_sessions_stay_unless_none_needs_them(store: KVStore) -> None:
    needed, orphan, young = (store.put_run(named(name)) for name in ("needed", "orphan", "young"))
    for key in (needed, orphan):
        used_before(store, key, 10)
    hard = Rule(keep_fingerprints=set(), unused_days=0.0, max_nbytes=0)
    assert pruned(store, hard) == []
    (gone,) = pruned(store, Rule(keep_runs={needed}))
    assert (gone.kind, gone.name) == ("run", orphan)
    assert {entry.key for entry in store.entries()} == {needed, young}


def test_part_that_a_session_saves_again_is_young(store: KVStore) -> None:
    key = store.put_run(named("a"))
    used_before(store, key, 10)
    other = KVStore(store.disk.root if store.disk else None)
    other.put_run(named("a"))  # of a session that is being saved now
    assert pruned(store, Rule(keep_runs=set())) == []


def test_eviction_leaves_parts_of_sessions_alone(store: KVStore) -> None:
    store.put_run(named("part"))
    put(store, "a")
    assert store.disk is not None
    store.disk.evict_to(0)
    assert [entry.kind for entry in store.entries()] == ["run"]
    assert store.get_run(store.entries()[0].key, run_named("part")).num_tokens == 8


def test_tenants_prune_their_own(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    one, two = store.for_tenant("one"), store.for_tenant("two")
    put(one, "a")
    put(two, "a")
    put(store, "a")
    pruned(one, Rule(max_nbytes=0))
    assert len(two.entries()) == 2
    assert len(one.entries()) == 1


def test_index_of_another_version_goes_when_nobody_uses_it(store: KVStore) -> None:
    put(store, "a")
    assert store.disk is not None
    other = store.disk.root / "index-1.sqlite"
    other.write_bytes(b"older")
    assert pruned(store) == []
    make_old(other, 40 * 86400)
    assert [item.name for item in pruned(store)] == ["index-1.sqlite"]


def test_links_are_not_followed(store: KVStore, tmp_path: Path) -> None:
    put(store, "a")
    assert store.disk is not None
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (".x.part", "x"):
        (outside / name).write_bytes(b"x")
        make_old(outside / name)
    for name in ("partial", "damaged", "texts"):
        (store.disk.root / name).symlink_to(outside)
    (store.disk.root / "segments" / "zz").symlink_to(outside)
    pruned(store)
    assert sorted(path.name for path in outside.iterdir()) == [".x.part", "x"]

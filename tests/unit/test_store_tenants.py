"""Tenants: none sees, evicts, counts or times what another one has."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from helpers_tiers import IDENTITY, find, named, run_named, same, variant

from kvnotes.errors import SegmentFormatError, StorageError
from kvnotes.store import KVStore, Limits, Provenance, content_key, remote_path

LONG = 40


def key_of(name: str, tenant: str) -> str:
    return content_key("segment", tenant, IDENTITY.fingerprint, run_named(name).digest)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return KVStore(tmp_path / "s" if request.param == "disk" else None)


@pytest.mark.parametrize("writer", ["one", "two", ""])
@pytest.mark.parametrize("reader", ["one", "two", ""])
@pytest.mark.parametrize("content", ["same", "other"])
def test_segments_are_found_by_their_tenant_and_shared_ones_by_all(
    store: KVStore, writer: str, reader: str, content: str
) -> None:
    store.for_tenant(writer).put(named("same"))
    found = find(store.for_tenant(reader), content)
    assert (found is not None) == (content == "same" and writer in (reader, ""))


@pytest.mark.parametrize("restarted", [False, True])
def test_same_text_of_two_tenants_is_compiled_for_each(tmp_path: Path, restarted: bool) -> None:
    store = KVStore(tmp_path / "s")
    compiled = []
    for tenant in ("one", "two", "one"):
        if restarted:
            store = KVStore(tmp_path / "s")
        view = store.for_tenant(tenant)
        run = run_named("a")
        view.get_or_compile(IDENTITY, run, lambda t=tenant: compiled.append(t) or named("a"))
    assert compiled == ["one", "two"]


def answers(view: KVStore, key: str) -> list[object]:
    """All that a tenant can ask about a key, and what it is told."""

    def told(action: Any) -> object:
        try:
            return action()
        except StorageError as error:
            return error.message.replace(key[:12], "KEY"), error.hint

    return [
        told(lambda: view.get(key)),
        told(lambda: view.header(key)),
        told(lambda: view.path(key)),
        told(lambda: view.pin(key)),
        told(lambda: view.pin(key, False)),
        told(lambda: view.remove([key])),
        told(lambda: view.push([key])),
        told(lambda: view.pull(key)),
        told(lambda: view.get_run(key, run_named("a"))) if view.disk else None,
        told(lambda: [entry.key for entry in view.entries()]),
    ]


@pytest.mark.parametrize("root", ["disk", None])
def test_absent_and_not_yours_are_the_same_answer(tmp_path: Path, root: str | None) -> None:
    place = None if root is None else tmp_path / "s"
    store = KVStore(place, remote=f"memory://{tmp_path.name}")
    owner = store.for_tenant("one")
    entry = owner.put(named("a"))
    if entry is not None:
        owner.push([entry.key])
    stranger = store.for_tenant("two")
    before = stranger.counters
    theirs = [answer for answer in answers(stranger, key_of("a", "one"))]
    absent = [answer for answer in answers(stranger, key_of("b", "one"))]
    assert [str(a).replace("push", "") for a in theirs] == [
        str(a).replace("push", "") for a in absent
    ]
    assert stranger.counters == before
    assert same(owner.get(key_of("a", "one")), named("a"))


@pytest.mark.parametrize("state", ["good", "damaged", "unsigned"])
def test_asking_for_what_another_tenant_has_opens_no_other_file(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time to measure: the system is asked exactly the same things, up to the name."""
    store = KVStore(tmp_path / "s")
    owner = store.for_tenant("one")
    entry = owner.put(named("a", LONG))
    assert entry is not None and owner.disk is not None
    if state == "damaged":
        owner.disk.path(entry.key).write_bytes(b"x" * 100)
    calls: list[str] = []

    def noting(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(f"{name} {arguments[0] if arguments else ''}")
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, call)

    for name in ("open", "stat", "lstat", "scandir", "listdir", "replace", "mkdir", "unlink"):
        noting(os, name)
    noting(os.path, "lexists")
    noting(os.path, "exists")
    noting(sqlite3, "connect")
    fresh = KVStore(tmp_path / "s").for_tenant("two")
    traces = []
    for name in ("a", "b"):
        key = content_key("segment", "one", IDENTITY.fingerprint, run_named(name, LONG).digest)
        calls.clear()
        assert fresh.get(key) is None
        assert fresh.find(IDENTITY, run_named(name, LONG)) is None
        traces.append([call.replace(key, "KEY").replace(key[:2], "KE") for call in calls])
    asked = [[call for call in trace if "KEY" in call] for trace in traces]
    others = [[call for call in trace if "safetensors" not in call] for trace in traces]
    assert asked[0] == asked[1] != []
    assert others[0] == others[1]
    assert len(traces[0]) == len(traces[1])
    assert fresh.faults == ()
    assert fresh.counters.refused == {}


def test_no_tenant_evicts_another_ones_files_or_memory(tmp_path: Path) -> None:
    size = named("a", LONG).nbytes
    probe = KVStore(tmp_path / "probe").put(named("a", LONG))
    assert probe is not None
    limits = Limits(max_nbytes=3 * probe.nbytes)
    store = KVStore(tmp_path / "s", memory_nbytes=3 * size, limits=limits)
    one, two = store.for_tenant("one"), store.for_tenant("two")
    for name in "abc":
        one.put(named(name, LONG))
    for index in range(12):
        two.put(named(str(index), LONG))
        store.put(named(str(index), LONG))
    assert len(one.entries()) - len(store.entries()) == 3
    assert len(one.memory.keys(["one"])) == 3
    assert one.counters.evicted == 0
    assert two.counters.evicted > 0


def test_quotas_by_tenant_are_kept(tmp_path: Path) -> None:
    probe = KVStore(tmp_path / "probe").put(named("a"))
    assert probe is not None
    limits = Limits(max_nbytes=2 * probe.nbytes, quotas={"big": 5 * probe.nbytes, "none": 0})
    store = KVStore(tmp_path / "s", limits=limits)
    for tenant, count in (("big", 5), ("small", 2), ("", 2), ("none", 0)):
        view = store.for_tenant(tenant)
        for name in "abcdefg":
            if tenant == "none":
                with pytest.raises(StorageError, match="allowed here"):
                    view.put(named(name))
            else:
                view.put(named(name))
        assert view.disk is not None
        assert len(view.disk.entries()) == count


def test_what_a_full_tenant_is_told_does_not_depend_on_others(tmp_path: Path) -> None:
    messages = []
    for others in (0, 5):
        store = KVStore(tmp_path / f"s{others}", limits=Limits(max_nbytes=20_000))
        for index in range(others):
            store.for_tenant(str(index)).put(named(str(index)))
        mine = store.for_tenant("mine")
        mine.put(named("a"), pinned=True)
        with pytest.raises(StorageError) as caught:
            mine.put(named("large", 2000))
        messages.append(caught.value.message)
    assert messages[0] == messages[1]


def test_family_of_another_tenant_cannot_be_pinned_or_evicted_by_its_name(tmp_path: Path) -> None:
    probe = KVStore(tmp_path / "probe").put(*variant("policy", "x"))
    assert probe is not None
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=2 * probe.nbytes))
    one, two = store.for_tenant("one"), store.for_tenant("two")
    one.put(*variant("policy", "x"))
    mine = two.put(*variant("policy", "y"))  # two says that it is of the same family
    assert mine is not None
    two.pin(mine.key)
    assert one.pinned() == set()
    two.pin(mine.key, False)
    for name in "abcd":
        two.put(named(name), Provenance(name=name))
    assert [entry.name for entry in one.entries()] == ["policy"]
    two.remove([entry.key for entry in two.entries()])
    assert [entry.name for entry in one.entries()] == ["policy"]


def test_text_of_another_tenant_is_not_found_by_its_digest(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    segment, source = variant("Their policy.", "x")
    store.for_tenant("one").put(segment, source)
    two = store.for_tenant("two")
    entry = two.put(segment, source.model_copy(update={"text": ""}))  # knows the digest alone
    assert entry is not None
    header = two.header(entry.key)
    assert header is not None and two.text(header) is None


def test_counters_and_faults_are_of_each_tenant(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    one, two = store.for_tenant("one"), store.for_tenant("two")
    entry = one.put(named("a"))
    assert entry is not None and one.disk is not None
    one.disk.path(entry.key).write_bytes(b"damaged")
    assert find(KVStore(tmp_path / "s").for_tenant("one"), "b") is None
    store.memory.remove(entry.key, "one")
    assert find(one, "a") is None
    assert one.counters.refused == {"SegmentFormatError": 1}
    assert one.counters.stored == 1
    assert two.faults == store.faults == ()
    assert two.counters.stored == store.counters.stored == 0
    assert store.for_tenant("one").counters == one.counters


def test_shared_segments_can_be_changed_by_the_shared_tenant_alone(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    entry = store.put(named("a"))
    assert entry is not None
    guest = store.for_tenant("one")
    assert same(guest.get(entry.key), named("a"))
    for change in (
        lambda: guest.pin(entry.key),
        lambda: guest.remove([entry.key]),
    ):
        with pytest.raises(StorageError, match="no segment"):
            change()
    assert guest.prune() == ()
    assert store.pinned() == set()
    assert guest.entries() == store.entries()


def test_file_moved_into_another_tenants_folder_is_refused(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    one, two = store.for_tenant("one"), store.for_tenant("two")
    entry = one.put(named("a"))
    assert entry is not None and one.disk is not None and two.disk is not None
    place = two.disk.path(entry.key)
    place.parent.mkdir(parents=True)
    os.replace(one.disk.path(entry.key), place)
    store.memory.remove(entry.key, "one")
    assert two.get(entry.key) is None
    assert "another tenant" in two.faults[0].reason


def test_tenants_have_places_of_their_own_on_the_remote_tier() -> None:
    key = "a" * 64
    places = {remote_path(key, tenant) for tenant in ("", "one", "two", "One", "../one")}
    assert len(places) == 5
    assert all(".." not in place for place in places)


@pytest.mark.parametrize(
    "name", ["one", "../../etc", "a/b", "tenants", "\u00fcn\u00ef", "x" * 1000]
)
def test_names_of_tenants_may_be_anything(tmp_path: Path, name: str) -> None:
    KVStore(tmp_path / "s").for_tenant(name).put(named("a"))
    assert find(KVStore(tmp_path / "s", tenant=name), "a") is not None
    assert find(KVStore(tmp_path / "s"), "a") is None
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("name", ["\0", "\x1b[31m", "x" * 1001, "\udcff"])
def test_names_of_tenants_that_the_format_has_no_place_for_write_nothing(
    tmp_path: Path, name: str
) -> None:
    view = KVStore(tmp_path / "s").for_tenant(name)
    with pytest.raises(SegmentFormatError, match="cannot be stored"):
        view.put(named("a"))
    assert view.entries() == []
    assert find(view, "a") is not None, "in memory"

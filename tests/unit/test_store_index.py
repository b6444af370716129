"""The index: order of use without a clock, families, and every way to lose the file."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from kvnotes.errors import StorageError
from kvnotes.store.index import INDEX_NAME, Entry, Index, Table

BASE = Entry(
    key="",
    kind="segment",
    tenant="",
    fingerprint="f" * 64,
    name="",
    version=0,
    family="",
    variant="",
    text="",
    num_tokens=8,
    nbytes=100,
    altered="",
    created_at=1000.0,
    used_at=1000.0,
)


def entry(key: str, family: str = "", **changes: object) -> Entry:
    return replace(BASE, key=key, family=family or key, **changes)


def add(index: Index, *entries: Entry) -> None:
    for one in entries:
        index.write(lambda table, one=one: table.put(one))  # type: ignore[misc]


def families(index: Index) -> list[str]:
    return [family.name for family in index.read(lambda table: table.families())]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "store" / INDEX_NAME)


def test_reading_makes_no_file(index: Index, tmp_path: Path) -> None:
    assert index.read(lambda table: table.entries()) == []
    assert not index.read(lambda table: table.complete)
    assert list(tmp_path.iterdir()) == []


def test_entries_come_back_as_they_were_in_their_order(index: Index) -> None:
    entries = [
        entry("k3", name="b", version=2),
        entry("k2", name="b", version=10, variant="x=1"),
        entry("k1", name="a", nbytes=1 << 40, altered="int8:float32", text="t" * 64),
    ]
    add(index, *entries)
    assert index.read(lambda table: table.entries()) == [entries[2], entries[0], entries[1]]
    assert index.read(lambda table: table.get("k2")) == entries[1]
    assert index.read(lambda table: table.get("k9")) is None
    assert index.read(lambda table: table.keys()) == {"k1", "k2", "k3"}
    assert index.read(lambda table: table.nbytes()) == 200 + (1 << 40)


def test_entry_of_the_same_key_is_replaced(index: Index) -> None:
    add(index, entry("k"), entry("k", nbytes=7))
    assert index.read(lambda table: table.nbytes()) == 7


def test_file_is_readable_by_its_owner_alone(index: Index, tmp_path: Path) -> None:
    add(index, entry("k"))
    assert stat.S_IMODE((tmp_path / "store" / INDEX_NAME).stat().st_mode) == 0o600


def test_order_of_use_does_not_depend_on_the_clock(index: Index) -> None:
    add(index, entry("a", used_at=5e9), entry("b", used_at=1.0), entry("c", used_at=2.0))
    assert families(index) == ["a", "b", "c"]
    index.write(lambda table: table.touch([("b", 0.5), ("a", 0.1)]))  # the clock went back
    assert families(index) == ["c", "b", "a"]
    assert index.read(lambda table: table.get("a")) == entry("a", used_at=0.1)


def test_family_stands_where_its_last_used_member_does(index: Index) -> None:
    add(index, entry("a1", "a"), entry("b1", "b"), entry("a2", "a"), entry("c1", "c"))
    found = index.read(lambda table: table.families())
    assert [(f.name, set(f.keys), f.nbytes) for f in found] == [
        ("b", {"b1"}, 100),
        ("a", {"a1", "a2"}, 200),
        ("c", {"c1"}, 100),
    ]
    assert set(index.read(lambda table: table.members("a"))) == {"a1", "a2"}


def test_parts_of_sessions_are_no_families_of_segments(index: Index) -> None:
    add(index, entry("a"), entry("r", kind="run"))
    assert families(index) == ["a"]
    assert [f.name for f in index.read(lambda table: table.families("run"))] == ["r"]
    assert index.read(lambda table: table.nbytes()) == 200


def test_write_that_fails_halfway_changes_nothing(index: Index) -> None:
    add(index, entry("a"))

    def fail(table: Table) -> None:
        table.put(entry("b"))
        table.delete(["a"])
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        index.write(fail)
    assert index.read(lambda table: table.keys()) == {"a"}


# -- a file that is lost, damaged or not ours ----------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database " * 1000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):  # all but the first page, which has the schema
        content[page : page + 2000] = b"\xff" * 2000
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def deleted(path: Path) -> None:
    path.unlink()


def other_schema(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as table:
        table.execute("CREATE TABLE entries (key TEXT, size INTEGER)")
        table.execute("INSERT INTO entries VALUES ('a', 1)")
    table.close()


LOSSES = [garbage, cut, overwritten, empty, deleted, other_schema]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("first", ["read", "write"])
def test_lost_index_begins_again_and_says_so(
    index: Index, tmp_path: Path, lose: Callable[[Path], None], first: str
) -> None:
    add(index, *(entry(f"{i:064x}", name="x" * 500) for i in range(40)))
    index.write(lambda table: table.mark_complete())
    path = tmp_path / "store" / INDEX_NAME
    lose(path)
    if first == "read":
        assert index.read(lambda table: table.entries()) == []
        assert not index.read(lambda table: table.complete)
    add(index, entry("new"))
    assert index.read(lambda table: table.keys()) == {"new"}
    assert not index.read(lambda table: table.complete)
    aside = [p for p in path.parent.iterdir() if ".damaged-" in p.name]
    assert len(aside) == (lose not in (empty, deleted))


def test_index_of_another_version_is_left_alone(index: Index, tmp_path: Path) -> None:
    other = tmp_path / "store" / "index-1.sqlite"
    other.parent.mkdir()
    other.write_bytes(b"of an older kvnotes")
    add(index, entry("a"))
    assert other.read_bytes() == b"of an older kvnotes"


def test_index_made_anew_by_another_process_is_not_put_aside(index: Index, tmp_path: Path) -> None:
    path = tmp_path / "store" / INDEX_NAME
    add(index, entry("a"))
    garbage(path)
    calls = []

    def action(table: Table) -> set[str]:
        calls.append(1)
        return table.keys()

    version = index._version()
    other = Index(path)
    add(other, entry("b"))  # another process repairs it first
    index._put_aside(version)  # this one comes late
    assert index.read(action) == {"b"}


def test_folder_in_place_of_the_file_is_a_storage_error(index: Index, tmp_path: Path) -> None:
    (tmp_path / "store" / INDEX_NAME).mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot use the index"):
        add(index, entry("a"))


def test_who_waits_too_long_for_another_writer_is_told(index: Index) -> None:
    add(index, entry("a"))

    def inside(table: Table) -> None:
        with pytest.raises(StorageError, match="locked"):
            index.write(lambda t: t.delete(["a"]), wait=0.0)

    index.write(inside)
    assert index.read(lambda table: table.keys()) == {"a"}


def test_threads_that_write_at_once_lose_nothing(index: Index) -> None:
    def work(start: int) -> None:
        for i in range(20):
            add(index, entry(f"{start}-{i}"))

    threads = [Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.read(lambda table: table.keys())) == 80

"""The disk tier: limits, families, pins, texts, and files that are not what they should be."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers_tiers import find, named, same, start, variant
from helpers_workers import read_only

from kvnotes.errors import SegmentFormatError, StorageError, TrustError
from kvnotes.store import Entry, KVStore, Limits, Provenance, Trust
from kvnotes.store.atomic import make_folder
from kvnotes.store.index import INDEX_NAME


def put(store: KVStore, *names: str, **options: bool) -> list[Entry]:
    entries = [store.put(named(name), Provenance(name=name), **options) for name in names]
    assert all(entry is not None for entry in entries)
    return [entry for entry in entries if entry is not None]


def names(store: KVStore) -> list[str]:
    return [entry.name for entry in store.entries()]


def fresh(store: KVStore, root: Path, **options: object) -> KVStore:
    """Another process's view of the same folder: nothing in memory."""
    return KVStore(root, **options)  # type: ignore[arg-type]


@pytest.fixture
def size(tmp_path: Path) -> int:
    """Bytes of the file of a short name."""
    (entry,) = put(KVStore(tmp_path / "measure"), "a")
    return entry.nbytes


# -- limits --------------------------------------------------------------------------------


def test_least_recently_used_files_make_room(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=3 * size))
    put(store, "a", "b", "c")
    find(store, "a")
    put(store, "d")
    assert names(store) == ["a", "c", "d"]
    assert store.counters.evicted == 1
    assert sum(entry.nbytes for entry in store.entries()) <= 3 * size


def test_use_in_another_process_counts_for_the_order(tmp_path: Path, size: int) -> None:
    limits = Limits(max_nbytes=3 * size)
    put(KVStore(tmp_path / "s", limits=limits), "a", "b", "c")
    other = KVStore(tmp_path / "s", limits=limits)
    find(other, "a")
    put(other, "d")
    assert names(other) == ["a", "c", "d"]


def test_clock_that_goes_back_does_not_change_what_is_evicted(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=3 * size))
    put(store, "a", "b")
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real - 1e6)
    put(store, "c", "d")
    assert names(store) == ["b", "c", "d"]


def test_file_larger_than_the_limit_evicts_nothing(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=3 * size))
    put(store, "a", "b")
    with pytest.raises(StorageError, match="do not fit into"):
        store.put(named("large", 2000))
    assert names(store) == ["a", "b"]
    assert find(store, "large", 2000) is not None  # in memory all the same


def test_pinned_files_are_never_evicted(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=2 * size))
    put(store, "a", pinned=True)
    put(store, "b", "c", "d")
    assert names(store) == ["a", "d"]
    put(store, "e", pinned=True)
    assert names(store) == ["a", "e"]
    with pytest.raises(StorageError, match="are pinned, in the same family"):
        put(store, "f")
    store.pin(store.entries()[0].key, False)
    put(store, "g")
    assert names(store) == ["e", "g"]


def test_nothing_is_evicted_for_what_does_not_fit_all_the_same(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=4 * size))
    put(store, "a", "b", pinned=True)
    put(store, "c")
    with pytest.raises(StorageError):
        store.put(named("large", 1500))  # would need more than c's place
    assert names(store) == ["a", "b", "c"]
    assert store.counters.evicted == 0


def test_what_could_not_be_written_leaves_no_pin(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=2 * size))
    put(store, "a", "b", pinned=True)
    with pytest.raises(StorageError):
        put(store, "c", pinned=True)
    assert len(store.pinned()) == 2


def test_family_is_counted_pinned_and_evicted_as_one(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=6 * size))
    first = [store.put(*variant("policy", value)) for value in "xyz"]
    put(store, "a")
    assert first[0] is not None
    store.pin(first[0].key)
    put(store, *"bcdef")
    assert [n for n in names(store) if n == "policy"] == ["policy"] * 3
    assert store.pinned() == {first[0].family}
    store.pin(store.entries()[-1].key, False)  # by any member
    put(store, *"ghi")
    assert "policy" not in names(store)


def test_family_does_not_evict_its_own_members(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=3 * size))
    for value in "xyz"[:2]:
        store.put(*variant("policy", value))
    with pytest.raises(StorageError, match="in the same family"):
        for value in "uvw":
            store.put(*variant("policy", value))
    assert len(names(store)) >= 2


def test_variant_of_a_pinned_family_is_pinned_in_memory_too(tmp_path: Path) -> None:
    segment, source = variant("policy", "x")
    store = KVStore(tmp_path / "s", memory_nbytes=segment.nbytes)
    entry = store.put(segment, source)
    assert entry is not None
    store.pin(entry.key)
    again = KVStore(tmp_path / "s", memory_nbytes=segment.nbytes)
    find(again, "policy", preamble=segment.preamble_ids)
    again.put(named("b"))
    assert again.memory.has(entry.key, "")


def test_two_writers_that_made_room_at_once_stay_within_the_limit(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_nbytes=2 * size)
    one, two = (KVStore(tmp_path / "s", limits=limits) for _ in range(2))
    put(one, "a")
    assert two.disk is not None and one.disk is not None
    write = one.disk._write

    def slowly(*arguments: object, **options: object) -> Entry:
        put(two, "b", "c")  # while this one writes, the other one fills the folder
        return write(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(one.disk, "_write", slowly)
    put(one, "d")
    assert names(one) == ["c", "d"]


def test_orphan_of_a_dead_writer_counts_for_the_limit(tmp_path: Path, size: int) -> None:
    donor = KVStore(tmp_path / "donor")
    (entry,) = put(donor, "orphan")
    limited = KVStore(tmp_path / "s", limits=Limits(max_nbytes=2 * size))
    put(limited, "a")
    assert limited.disk is not None and donor.disk is not None
    place = limited.disk.path(entry.key)
    make_folder(place.parent)
    shutil.copy(donor.disk.path(entry.key), place)  # renamed, and killed before the index knew
    other = KVStore(tmp_path / "s", limits=Limits(max_nbytes=2 * size))
    put(other, "b")
    assert len(names(other)) == 2


# -- what is there -------------------------------------------------------------------------


def test_lost_index_is_made_again_from_the_files(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    put(store, "a", "b")
    store.put(*variant("policy", "x"))
    before = store.entries()
    (tmp_path / "s" / INDEX_NAME).unlink()
    after = store.entries()
    assert [(e.key, e.family, e.nbytes, e.text) for e in after] == [
        (e.key, e.family, e.nbytes, e.text) for e in before
    ]


def test_lost_index_does_not_hide_files_from_limits(tmp_path: Path, size: int) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=3 * size))
    put(store, "a", "b", "c")
    (tmp_path / "s" / INDEX_NAME).unlink()
    put(store, "d")
    assert len(names(store)) == 3


def test_entry_whose_file_somebody_deleted_is_gone(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    assert store.disk is not None
    store.disk.path(entry.key).unlink()
    assert store.entries() == []
    with pytest.raises(StorageError, match="no segment"):
        store.pin(entry.key)


def test_put_of_what_is_there_writes_nothing(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (first,) = put(store, "a")
    assert store.disk is not None
    before = store.disk.path(first.key).stat()
    (again,) = put(store, "a")
    assert again == first or again.used_at >= first.used_at
    assert store.disk.path(first.key).stat().st_mtime_ns == before.st_mtime_ns
    assert store.counters.stored == 1


def test_put_of_a_file_that_the_index_lost_keeps_it(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (first,) = put(store, "a")
    assert store.disk is not None
    before = store.disk.path(first.key).stat().st_ino
    (tmp_path / "s" / INDEX_NAME).unlink()
    put(store, "a")
    assert store.disk.path(first.key).stat().st_ino == before


def test_removed_segments_and_their_pins_are_gone(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    first, second = put(store, "a", "b", pinned=True)
    assert store.remove([first.key]) == first.nbytes
    assert names(store) == ["b"]
    assert store.pinned() == {second.family}
    assert find(store, "a") is None
    with pytest.raises(StorageError, match="no segment"):
        store.remove([second.key, first.key])
    assert names(store) == ["b"]


def test_files_are_private(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    store.put(*variant("policy", "x"), pinned=True)
    for path in (tmp_path / "s").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.suffix != ".lock":  # empty
            assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "a" * 63, "A" * 64, "a" * 63 + "\n", "\0" * 64, ""]
)
def test_what_is_no_key_names_no_file(tmp_path: Path, key: str) -> None:
    store = KVStore(tmp_path / "s")
    assert store.disk is not None
    with pytest.raises(SegmentFormatError, match="is no key"):
        store.disk.path(key)
    with pytest.raises(SegmentFormatError, match="is no key"):
        store.pin(key)
    with pytest.raises(SegmentFormatError, match="is no family"):
        store.disk.pin(key, True)
    assert store.get(key) is None
    assert not (tmp_path / "s").exists()


# -- texts ---------------------------------------------------------------------------------


def test_text_of_a_family_is_stored_once_and_found(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    for value in "xyz":
        store.put(*variant("The policy.", value))
    texts = list((tmp_path / "s" / "texts").iterdir())
    assert [path.read_text() for path in texts] == ["The policy."]
    headers = [store.header(entry.key) for entry in store.entries()]
    assert [h.provenance.text for h in headers if h] == ["", "", ""]
    assert [store.text(h) for h in headers if h] == ["The policy."] * 3


def test_text_of_a_segment_of_its_own_is_in_its_file(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    segment, source = variant("Alone.", "x")
    entry = store.put(segment, source.model_copy(update={"family": ""}))
    assert entry is not None and entry.text == ""
    assert not (tmp_path / "s" / "texts").exists()
    header = store.header(entry.key)
    assert header is not None and store.text(header) == "Alone."


def test_changed_text_is_not_returned(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    entry = store.put(*variant("The policy.", "x"))
    assert entry is not None
    (path,) = (tmp_path / "s" / "texts").iterdir()
    path.write_text("Another one.")
    header = store.header(entry.key)
    assert header is not None and store.text(header) is None


def test_text_of_a_family_is_encrypted_where_the_store_is(tmp_path: Path) -> None:
    trust = Trust(encryption_key=b"k" * 32)
    store = KVStore(tmp_path / "s", trust=trust)
    entry = store.put(*variant("The secret policy.", "x"))
    assert entry is not None
    for path in (tmp_path / "s").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes() or path.name == INDEX_NAME
    header = store.header(entry.key)
    assert header is not None and store.text(header) == "The secret policy."


# -- files that are not what they should be ------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_damaged_file_is_put_aside_counted_and_compiled_once(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    assert store.disk is not None
    flip(store.disk.path(entry.key))
    again = KVStore(tmp_path / "s")
    assert find(again, "a") is None
    assert again.counters.refused == {"SegmentFormatError": 1}
    assert again.faults[0].key == entry.key and "is damaged" in again.faults[0].reason
    assert len(list((tmp_path / "s" / "damaged").iterdir())) == 1
    assert find(again, "a") is None
    assert again.counters.refused == {"SegmentFormatError": 1}
    put(again, "a")
    assert find(KVStore(tmp_path / "s"), "a") is not None
    assert names(again) == ["a"]


def test_swapped_files_are_both_refused(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    one, two = put(store, "a", "b")
    assert store.disk is not None
    first, second = store.disk.path(one.key), store.disk.path(two.key)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    again = KVStore(tmp_path / "s")
    assert find(again, "a") is None
    assert find(again, "b") is None
    assert again.counters.refused == {"SegmentFormatError": 2}


def test_renamed_file_is_no_other_segment(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    one, two = put(store, "a", "b")
    assert store.disk is not None
    os.replace(store.disk.path(one.key), store.disk.path(two.key))
    again = KVStore(tmp_path / "s")
    assert find(again, "b") is None
    assert again.entries() == []


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_file_is_put_aside(tmp_path: Path, kind: str) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    assert store.disk is not None
    path = store.disk.path(entry.key)
    elsewhere = tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    make = {"link": lambda: path.symlink_to(elsewhere), "folder": path.mkdir}
    make.get(kind, lambda: os.mkfifo(path))()
    again = KVStore(tmp_path / "s")
    assert find(again, "a") is None
    assert again.entries() == []
    put(again, "a")
    assert find(KVStore(tmp_path / "s"), "a") is not None
    assert elsewhere.stat().st_size == entry.nbytes


def test_new_file_in_place_of_a_damaged_one_is_not_put_aside(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    disk = store.disk
    assert disk is not None
    path = disk.path(entry.key)
    flip(path)
    version = path.lstat().st_ino
    with pytest.raises(SegmentFormatError):
        disk.open(entry.key)  # this process puts it aside
    put(store, "a")  # and makes a good one
    disk.put_aside(entry.key, version)  # another process, which opened the damaged one, is late
    assert disk.has(entry.key)
    assert find(KVStore(tmp_path / "s"), "a") is not None


def test_file_that_cannot_be_opened_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    again = KVStore(tmp_path / "s")
    real = os.open

    def too_many(path: object, *arguments: int, **options: object) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(24, "Too many open files")
        return real(path, *arguments, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        assert find(again, "a") is None
        assert again.counters.refused == {"StorageError": 1}
    assert again.disk is not None and again.disk.has(entry.key)
    assert find(again, "a") is not None


def test_file_nobody_trusted_signed_raises_and_stays(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    assert store.disk is not None
    before = store.disk.path(entry.key).read_bytes()
    strict = KVStore(tmp_path / "s", trust=Trust(trusted=(b"t" * 32,)))
    with pytest.raises(TrustError, match="not signed"):
        find(strict, "a")
    with pytest.raises(TrustError):
        strict.get_or_compile(named("a").identity, named("a").run, lambda: pytest.fail("compiled"))
    with pytest.raises(TrustError):
        strict.put(named("a"))
    assert store.disk.path(entry.key).read_bytes() == before
    assert strict.disk is not None and not (strict.disk.root / "damaged").exists()


def test_file_encrypted_with_another_key_raises_and_stays(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s", trust=Trust(encryption_key=b"1" * 32))
    (entry,) = put(store, "a")
    assert store.disk is not None
    before = store.disk.path(entry.key).read_bytes()
    for trust in (Trust(), Trust(encryption_key=b"2" * 32)):
        other = KVStore(tmp_path / "s", trust=trust)
        with pytest.raises(TrustError):
            find(other, "a")
    assert store.disk.path(entry.key).read_bytes() == before
    assert find(KVStore(tmp_path / "s", trust=Trust(encryption_key=b"1" * 32)), "a") is not None


def test_evicted_file_stays_readable_for_who_has_it_mapped(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    (entry,) = put(store, "a")
    mapped = find(KVStore(tmp_path / "s"), "a")
    store.remove([entry.key])
    assert same(mapped, named("a"))


# -- a folder that cannot be written -------------------------------------------------------


@pytest.mark.parametrize("index", ["there", "lost"])
def test_folder_that_cannot_be_written_is_read(index: str) -> None:
    with TemporaryDirectory() as folder:  # pytest's own are closed to other users
        base = Path(folder)
        root = base / "s"
        (entry,) = put(KVStore(root), "a")
        if index == "lost":
            (root / INDEX_NAME).unlink()
        base.chmod(0o755)
        for path in [root, *root.rglob("*")]:
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
            path.chmod(0o500 if path.is_dir() else 0o400)
        process = start(read_only, root, entry.key)
        process.join(60)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o700)
        assert process.exitcode == 0

"""The remote tier: whole or not at all, goes on where it broke, and never for long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
from helpers_http import Break, State, serving, silent, unreachable
from helpers_store import identity
from helpers_tiers import IDENTITY, find, named, run_named

from kvnotes.errors import SegmentFormatError, StorageError, TrustError
from kvnotes.store import KVStore, Limits, Remote, Trust, content_key, ranges, relay, remote_path
from kvnotes.store import remote as remote_module

MODEL = identity(num_layers=4, num_kv_heads=2, head_dim=32)
TOKENS = 400
"""A file of some hundred kilobytes."""


class Clock:
    """Waits for nothing, and adds up what it would have waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def key_of(name: str, num_tokens: int = 8, who: Any = IDENTITY, tenant: str = "") -> str:
    return content_key("segment", tenant, who.fingerprint, run_named(name, num_tokens).digest)


BIG = key_of("big", TOKENS, MODEL)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[State]:
    """A server with one file of some size and a small one."""
    donor = KVStore(tmp_path / "donor", remote=str(tmp_path / "www"))
    for segment in (named("big", TOKENS, who=MODEL), named("a")):
        entry = donor.put(segment)
        assert entry is not None
        donor.push([entry.key])
    with serving(tmp_path / "www") as state:
        yield state


def client(tmp_path: Path, url: str, name: str = "client", **options: Any) -> KVStore:
    return KVStore(tmp_path / name, remote=Remote(url, sleep=Clock()), **options)


def size_of(state: State) -> int:
    return (state.root / remote_path(BIG)).stat().st_size


def found(store: KVStore) -> bool:
    return find(store, "big", TOKENS, who=MODEL) is not None


# -- every kind of place -------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "file", "path"])
def test_what_is_pushed_is_found_from_elsewhere(tmp_path: Path, scheme: str) -> None:
    place = tmp_path / "remote"
    url = {"memory": f"memory://{tmp_path.name}", "file": f"file://{place}", "path": str(place)}
    one, two = client(tmp_path, url[scheme], "one"), client(tmp_path, url[scheme], "two")
    entry = one.put(named("a"))
    assert entry is not None
    assert find(two, "a") is None
    assert not two.pull(entry.key)
    told: list[str] = []
    assert one.push([entry.key], told.append) == 1
    assert told == [entry.key]
    assert two.pull(entry.key)
    assert find(two, "a") is not None
    assert two.counters.pulled == 1 and one.counters.pushed == 1


def test_what_is_there_is_not_pushed_again(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    entry = store.put(named("a"))
    assert entry is not None
    store.push([entry.key])
    place = tmp_path / "remote" / remote_path(entry.key)
    before = place.stat().st_mtime_ns, place.stat().st_ino
    assert store.push([entry.key]) == 0
    assert (place.stat().st_mtime_ns, place.stat().st_ino) == before


def test_file_of_another_size_is_pushed_again(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    entry = store.put(named("a"))
    assert entry is not None
    store.push([entry.key])
    place = tmp_path / "remote" / remote_path(entry.key)
    place.write_bytes(b"cut off by somebody")
    assert store.push([entry.key]) == 1
    assert client(tmp_path, str(tmp_path / "remote"), "other").pull(entry.key)


def test_tenants_push_and_pull_their_own(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    mine = store.for_tenant("one").put(named("a"))
    assert mine is not None
    store.for_tenant("one").push([mine.key])
    for tenant in ("two", ""):
        assert (
            not client(tmp_path, str(tmp_path / "remote"), tenant or "shared")
            .for_tenant(tenant)
            .pull(mine.key)
        )
    assert client(tmp_path, str(tmp_path / "remote"), "again").for_tenant("one").pull(mine.key)


def test_shared_file_is_pulled_into_the_shared_folder(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    entry = store.put(named("a"))
    assert entry is not None
    store.push([entry.key])
    guest = client(tmp_path, str(tmp_path / "remote"), "other").for_tenant("one")
    assert find(guest, "a") is not None
    assert guest.disk is not None and guest.disk.entries() == []
    assert [e.tenant for e in guest.entries()] == [""]


def test_two_that_push_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    stores = [client(tmp_path, str(tmp_path / "remote"), f"s{i}") for i in range(4)]
    entries = [store.put(named("big", TOKENS, who=MODEL)) for store in stores]
    threads = [
        Thread(target=store.push, args=([entry.key],))
        for store, entry in zip(stores, entries, strict=True)
        if entry is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    assert [path.name.split(".")[0] for path in files] == [BIG]
    assert found(client(tmp_path, str(tmp_path / "remote"), "reader"))


def test_upload_that_breaks_off_is_seen_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    entry = store.put(named("big", TOKENS, who=MODEL))
    assert entry is not None and store.remote is not None
    files = store.remote._files
    real, broken = files.put_file, []

    def put_half(source: str, target: str) -> None:
        if len(broken) < 3:
            broken.append(target)
            Path(target).write_bytes(Path(source).read_bytes()[:1000])
            assert store.remote is not None
            assert store.remote.find(remote_path(BIG)) is None
            assert store.remote.files("segments") == []
            raise ConnectionError("broken pipe")
        real(source, target)

    monkeypatch.setattr(files, "put_file", put_half)
    assert store.push([entry.key]) == 1
    assert store.counters.retries == 3
    assert found(client(tmp_path, str(tmp_path / "remote"), "reader"))
    broken[:] = []
    os.unlink(tmp_path / "remote" / remote_path(BIG))
    monkeypatch.setattr(files, "put_file", lambda *a: put_half(*a) if not broken.clear() else None)
    with pytest.raises(StorageError, match=r"broken pipe \(6 attempts\)"):
        store.push([entry.key])
    assert [p for p in (tmp_path / "remote").rglob("*") if p.is_file()] == []


def test_part_of_an_upload_that_died_is_swept_away(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    entry = store.put(named("a"))
    assert entry is not None
    folder = (tmp_path / "remote" / remote_path(entry.key)).parent
    folder.mkdir(parents=True)
    old, young = folder / ".old.part", folder / ".young.part"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (1.0, 1.0))
    store.push([entry.key])
    assert not old.exists() and young.exists()


def test_place_that_is_read_only_says_so_at_once(tmp_path: Path, served: State) -> None:
    store = client(tmp_path, served.url)
    entry = store.put(named("b"))
    assert entry is not None
    for push in (
        lambda: store.push([entry.key]),
        lambda: store.remote_tier().write("x", b"x"),
        lambda: store.remote_tier().remove("x"),
    ):
        with pytest.raises(StorageError, match="is read-only"):
            push()
    assert served.requests == []


@pytest.mark.parametrize("url", ["nonsense://x", "s3nonsense://bucket"])
def test_place_that_no_file_system_knows_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="no store can be reached"):
        Remote(url)


def test_small_files_are_written_read_listed_and_removed(tmp_path: Path) -> None:
    for url in (f"memory://{tmp_path.name}", str(tmp_path / "remote")):
        remote = Remote(url)
        assert remote.read("a/b.json") is None and remote.files("a") == []
        remote.write("a/b.json", b"one")
        remote.write("a/b.json", b"two!")
        remote.write("a/c/d", b"")
        assert remote.read("a/b.json") == b"two!"
        assert sorted((f.path, f.nbytes) for f in remote.files("a")) == [
            ("a/b.json", 4),
            ("a/c/d", 0),
        ]
        remote.remove("a/b.json")
        remote.remove("a/b.json")
        assert remote.read("a/b.json") is None


# -- over HTTP, and broken -----------------------------------------------------------------


def test_file_comes_in_one_request(tmp_path: Path, served: State) -> None:
    assert found(client(tmp_path, served.url))
    assert served.gets() == [""]
    assert sum(served.num_bytes.values()) == size_of(served)


def test_download_goes_on_at_the_byte_where_it_broke(tmp_path: Path, served: State) -> None:
    served.breaks.extend([Break("close", 70_001), Break("close", 150_003)])
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert served.gets() == ["", "bytes=70001-", "bytes=220004-"]
    assert sum(served.num_bytes.values()) == size_of(served)
    assert store.counters.retries == 2
    assert found(store)


def test_download_goes_on_after_a_restart(tmp_path: Path, served: State) -> None:
    served.breaks.append(Break("close", 100_000))
    served.always = Break("status")
    with pytest.raises(StorageError, match="attempts"):
        client(tmp_path, served.url).pull(BIG)
    served.always = None
    served.requests.clear()
    again = client(tmp_path, served.url)  # another process on the same folder
    assert found(again)
    assert served.gets() == ["bytes=100000-"]
    assert sum(served.num_bytes.values()) == size_of(served)
    assert list((tmp_path / "client" / "partial").iterdir()) == []


def test_attempts_are_bounded_counted_and_further_apart_each_time(
    tmp_path: Path, served: State
) -> None:
    served.always = Break("close", 0)
    clock = Clock()
    store = KVStore(tmp_path / "client", remote=Remote(served.url, sleep=clock))
    with pytest.raises(StorageError, match=r"\(6 attempts\)"):
        store.pull(BIG)
    assert len(served.gets()) == 6
    assert store.counters.retries == 5 == len(clock.waits)
    for number, wait in enumerate(clock.waits):
        assert 0.05 * 2**number <= wait <= 0.1 * 2**number


def test_trickle_does_not_go_on_for_ever(tmp_path: Path, served: State) -> None:
    served.always = Break("close", 10)
    store = client(tmp_path, served.url)
    with pytest.raises(StorageError, match=r"\(6 attempts\)"):
        store.pull(BIG)
    assert len(served.gets()) == 6


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_errors_of_the_server_are_repeated(tmp_path: Path, served: State, status: int) -> None:
    served.breaks.extend([Break("status", status=status)] * 2)
    served.head_breaks.append(Break("status", status=status))
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert store.counters.retries == 2


@pytest.mark.parametrize("status", [401, 403])
def test_refusals_of_the_server_are_not_repeated(
    tmp_path: Path, served: State, status: int
) -> None:
    served.always = Break("status", status=status)
    served.head_breaks.extend([Break("status", status=status)] * 9)
    store = client(tmp_path, served.url)
    with pytest.raises(StorageError) as caught:
        store.pull(BIG)
    assert "credentials" in caught.value.hint
    assert store.counters.retries == 0


def test_server_that_is_down_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    store = client(tmp_path, unreachable())
    with pytest.raises(StorageError, match=r"\(6 attempts\)"):
        store.pull(BIG)


def test_answer_that_ends_early_goes_on(tmp_path: Path, served: State) -> None:
    served.breaks.append(Break("shorter", 90_000))
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert served.gets() == ["", "bytes=90000-"]
    assert found(store)


def test_server_that_stalls_is_left_after_a_while(
    tmp_path: Path, served: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "READ_SECONDS", 0.3)
    served.breaks.append(Break("stall", 80_000))
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert served.gets() == ["", "bytes=80000-"]


def test_server_without_ranges_serves_again_from_the_beginning(
    tmp_path: Path, served: State
) -> None:
    served.ranges = False
    served.breaks.append(Break("close", 90_000))
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert found(store)
    assert sum(served.num_bytes.values()) == 90_000 + size_of(served)


def test_server_that_says_no_length_is_refused(tmp_path: Path, served: State) -> None:
    served.lengths = False
    with pytest.raises(StorageError, match="does not say how large"):
        client(tmp_path, served.url).pull(BIG)


def test_file_replaced_while_it_is_read_is_read_again(tmp_path: Path, served: State) -> None:
    donor = KVStore(tmp_path / "other", versions=(("engine", "another"),))
    entry = donor.put(named("big", TOKENS, who=MODEL))
    assert entry is not None and donor.disk is not None
    content = donor.disk.path(entry.key).read_bytes()
    assert content != (served.root / remote_path(BIG)).read_bytes()
    served.breaks.extend([Break("close", 100_000), Break("replace", content=content)])
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert served.gets() == ["", "bytes=100000-", ""]
    assert store.disk is not None and store.disk.path(BIG).read_bytes() == content


def test_file_replaced_between_two_ranges_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "LARGEST_RANGE", 100_000)
    store = client(tmp_path, f"memory://{tmp_path.name}", "one")
    other = KVStore(tmp_path / "two", versions=(("engine", "another"),))
    for one in (store, other):
        assert one.put(named("big", TOKENS, who=MODEL))
    assert store.disk is not None and other.disk is not None
    store.push([BIG])
    content = other.disk.path(BIG).read_bytes()
    files = fsspec.filesystem("memory")
    real, asked = files.cat_file, []

    def cat(path: str, start: int, end: int) -> bytes:
        asked.append(start)
        if len(asked) == 3:
            files.pipe_file(path, content)
        piece: bytes = real(path, start=start, end=end)
        return piece

    monkeypatch.setattr(files, "cat_file", cat)
    reader = client(tmp_path, f"memory://{tmp_path.name}", "reader")
    assert reader.pull(BIG)
    assert asked.count(0) == 2
    assert reader.disk is not None and reader.disk.path(BIG).read_bytes() == content


def test_mixture_of_two_versions_is_refused_where_no_server_tells_them_apart(
    tmp_path: Path, served: State
) -> None:
    served.etags = False
    content = bytearray((served.root / remote_path(BIG)).read_bytes())
    for at in range(120_000, len(content)):
        content[at] = 0
    served.breaks.extend([Break("close", 100_000), Break("replace", content=bytes(content))])
    store = client(tmp_path, served.url)
    with pytest.raises(SegmentFormatError, match="is damaged"):
        store.pull(BIG)
    assert store.disk is not None and not store.disk.has(BIG)


def test_file_that_changes_all_the_time_is_given_up(tmp_path: Path, served: State) -> None:
    place = served.root / remote_path(BIG)
    content = place.read_bytes()
    served.always = None
    served.breaks.extend(Break("replace", content=content[:-1] + bytes([n])) for n in range(1, 20))
    with pytest.raises(StorageError, match="again and again"):
        client(tmp_path, served.url).pull(BIG)


def test_begun_download_of_another_version_is_not_gone_on_with(
    tmp_path: Path, served: State
) -> None:
    served.breaks.append(Break("close", 100_000))
    served.always = Break("status")
    with pytest.raises(StorageError):
        client(tmp_path, served.url).pull(BIG)
    served.always = None
    place = served.root / remote_path(BIG)
    donor = KVStore(tmp_path / "d2", versions=(("engine", "another"),))
    assert donor.put(named("big", TOKENS, who=MODEL)) and donor.disk is not None
    place.write_bytes(donor.disk.path(BIG).read_bytes())
    assert found(client(tmp_path, served.url))


# -- what comes is not what it should be ---------------------------------------------------


def hostile(served: State, how: str) -> None:
    place = served.root / remote_path(BIG)
    content = bytearray(place.read_bytes())
    if how == "damaged":
        content[-3] ^= 4
    elif how == "cut":
        del content[-1000:]
    elif how == "another":
        content = bytearray((served.root / remote_path(key_of("a"))).read_bytes())
    elif how == "empty":
        content.clear()
    elif how == "garbage":
        content = bytearray(b"\x80\x04 pickle" * 100)
    place.write_bytes(content)


@pytest.mark.parametrize("how", ["damaged", "cut", "another", "empty", "garbage"])
def test_hostile_file_is_refused_and_leaves_nothing(
    tmp_path: Path, served: State, how: str
) -> None:
    hostile(served, how)
    store = client(tmp_path, served.url)
    assert not found(store)
    assert store.counters.refused == {"SegmentFormatError": 1}
    with pytest.raises(SegmentFormatError):
        store.pull(BIG)
    assert store.entries() == []
    left = [path.name for path in (tmp_path / "client").rglob("*") if path.is_file()]
    assert [n for n in left if not n.endswith(".lock") and "index" not in n] == []
    assert store.get_or_compile(
        MODEL, run_named("big", TOKENS), lambda: named("big", TOKENS, who=MODEL)
    )
    assert found(client(tmp_path, unreachable()))


def test_file_of_another_tenant_is_refused(tmp_path: Path) -> None:
    store = client(tmp_path, str(tmp_path / "remote"))
    theirs = store.for_tenant("one").put(named("a"))
    assert theirs is not None
    store.for_tenant("one").push([theirs.key])
    source = tmp_path / "remote" / remote_path(theirs.key, "one")
    for key, tenant in ((theirs.key, "two"), (key_of("a", tenant="two"), "two")):
        target = tmp_path / "remote" / remote_path(key, tenant)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        with pytest.raises(SegmentFormatError):
            client(tmp_path, str(tmp_path / "remote"), "other").for_tenant("two").pull(key)
    other = client(tmp_path, str(tmp_path / "remote"), "other").for_tenant("two")
    assert find(other, "a") is None
    assert other.entries() == []


def test_unsigned_file_is_refused_and_does_not_stop_a_session(
    tmp_path: Path, served: State
) -> None:
    strict = client(tmp_path, served.url, trust=Trust(trusted=(b"t" * 32,)))
    with pytest.raises(TrustError):
        strict.pull(BIG)
    assert not found(strict)
    assert strict.counters.refused == {"TrustError": 1}
    assert strict.disk is not None and not strict.disk.has(BIG)


def test_download_that_does_not_fit_is_refused(tmp_path: Path, served: State) -> None:
    store = client(tmp_path, served.url, limits=Limits(max_nbytes=1000))
    assert not found(store)
    assert store.counters.refused == {"StorageError": 1}
    assert "do not fit" in store.faults[0].reason


# -- patience of a session -----------------------------------------------------------------


def test_absent_file_is_asked_for_once_a_minute(
    tmp_path: Path, served: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client(tmp_path, served.url)
    for _ in range(5):
        assert find(store, "nowhere") is None
    asked = len(served.requests)
    assert 0 < asked <= 2
    real = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: real + relay.ABSENT_SECONDS + 1)
    assert find(store, "nowhere") is None
    assert len(served.requests) == 2 * asked


def test_failure_holds_for_a_minute_for_all_keys(
    tmp_path: Path, served: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.always = Break("close", 0)
    store = client(tmp_path, served.url)
    assert not found(store)
    asked = len(served.requests)
    assert len(served.gets()) <= 2
    for name in "abcdef":
        assert find(store, name) is None
    assert len(served.requests) == asked
    assert store.counters.refused == {"StorageError": 1}
    served.always = None
    real = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: real + relay.ABSENT_SECONDS + 1)
    assert found(store)


def test_refused_file_is_not_downloaded_again_at_once(tmp_path: Path, served: State) -> None:
    hostile(served, "damaged")
    store = client(tmp_path, served.url)
    for _ in range(4):
        assert not found(store)
    assert len(served.gets()) == 1


def test_server_that_never_answers_costs_a_session_one_bounded_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "READ_SECONDS", 0.3)
    with silent() as url:
        store = client(tmp_path, url)
        began = time.monotonic()
        for name in "abcdefgh":
            assert find(store, name) is None
        assert store.counters.refused == {"StorageError": 1}
        assert time.monotonic() - began < 30  # two attempts of two requests of 0.3 s


def test_server_that_is_down_costs_a_session_two_attempts(tmp_path: Path) -> None:
    store = client(tmp_path, unreachable())
    for name in "abc":
        assert find(store, name) is None
    assert store.counters.retries == 1
    assert store.counters.refused == {"StorageError": 1}


def test_explicit_pull_is_not_stopped_by_the_patience_of_a_session(
    tmp_path: Path, served: State
) -> None:
    served.breaks.extend([Break("close", 0)] * 2)
    store = client(tmp_path, served.url)
    assert not found(store)
    assert store.pull(BIG)


def test_download_that_takes_long_is_left_and_gone_on_with_later(
    tmp_path: Path, served: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SERVING", relay.Patience(2, seconds=0.0))
    store = client(tmp_path, served.url)
    assert not found(store)
    assert "within 0 s" in store.faults[0].reason
    partial = tmp_path / "client" / "partial" / BIG
    assert partial.stat().st_size > 0
    assert partial.stat().st_mode & 0o077 == 0


def test_find_does_not_wait_for_another_download(tmp_path: Path, served: State) -> None:
    one, two = client(tmp_path, served.url), client(tmp_path, served.url)
    assert one.disk is not None
    with one.disk.locks.hold(BIG):
        assert not found(two)
    assert two.counters.refused == {}


def test_ranges_get_smaller_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client(tmp_path, f"memory://{tmp_path.name}")
    entry = store.put(named("big", TOKENS, who=MODEL))
    assert entry is not None
    store.push([entry.key])
    files = fsspec.filesystem("memory")
    real, asked = files.cat_file, []

    def cat(path: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        if end - start > 200_000:
            raise ConnectionError("too much at once")
        content: bytes = real(path, start=start, end=end)
        return content

    monkeypatch.setattr(files, "cat_file", cat)
    other = client(tmp_path, f"memory://{tmp_path.name}", "other")
    assert other.pull(entry.key)
    assert max(asked[3:]) <= 200_000
    assert found(other)


def test_connections_that_break_early_are_asked_for_less(tmp_path: Path, served: State) -> None:
    served.breaks.extend([Break("close", 0)] * 3)
    store = client(tmp_path, served.url)
    assert store.pull(BIG)
    assert served.gets()[:5] == ["", "", "bytes=0-524287", "bytes=0-131071", "bytes=131072-262143"]
    assert found(store)

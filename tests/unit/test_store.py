"""The store: the order of its tiers, what is found, what is compiled, what is counted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from helpers_store import identity
from helpers_tiers import IDENTITY, Compiler, find, ids_of, named, run_named, same

from kvnotes.errors import LineageError, SegmentFormatError, StorageError
from kvnotes.plan import Run
from kvnotes.segment import KVSegment
from kvnotes.store import Counters, KVStore, Limits, Provenance, converted


def counted(store: KVStore) -> dict[str, int]:
    """The counters that are not 0."""
    counters = store.counters
    facts = {name: getattr(counters, name) for name in Counters.__slots__}
    return {name: value for name, value in facts.items() if value}


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return KVStore(tmp_path / "s" if request.param == "disk" else None)


def test_listing_and_pruning_need_no_torch(tmp_path: Path) -> None:
    KVStore(tmp_path / "s").put(named("a"))
    code = (
        "import sys; from pathlib import Path; from kvnotes.store import KVStore\n"
        f"store = KVStore(Path({str(tmp_path / 's')!r}))\n"
        "print(len(store.entries()), len(store.prune()), 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.split() == ["1", "0", "False"], answer.stderr


# -- finding -------------------------------------------------------------------------------


def test_empty_store_finds_nothing_and_makes_nothing(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    assert find(store, "a") is None
    assert store.entries() == []
    assert store.get("0" * 64) is None
    assert store.header("0" * 64) is None
    assert store.path("0" * 64) is None
    assert counted(store) == {"misses": 1}
    assert not (tmp_path / "s").exists()


def test_segment_comes_from_the_nearest_tier(tmp_path: Path) -> None:
    first = KVStore(tmp_path / "one", remote=f"memory://{tmp_path.name}")
    entry = first.put(named("a"))
    assert entry is not None
    assert find(first, "a") is not None
    assert counted(first) == {"memory_hits": 1, "stored": 1}
    first.push([entry.key])
    again = KVStore(tmp_path / "one", remote=f"memory://{tmp_path.name}")
    assert find(again, "a") is not None and find(again, "a") is not None
    assert counted(again) == {"disk_hits": 1, "memory_hits": 1}
    other = KVStore(tmp_path / "two", remote=f"memory://{tmp_path.name}")
    assert find(other, "a") is not None and find(other, "a") is not None
    assert counted(other) == {"remote_hits": 1, "pulled": 1, "memory_hits": 1}
    assert [e.key for e in other.entries()] == [entry.key]


def test_nothing_is_found_under_other_tokens_preamble_position_or_model(store: KVStore) -> None:
    store.put(named("a", preamble=(1, 2)))
    tokens = ids_of("a")
    whole = Run((1, 2, *tokens))
    for run, who in (
        (Run(tokens), IDENTITY),
        (Run((1, 3, *tokens)).cut(2, 10), IDENTITY),
        (Run((1, 2, 3, *tokens)).cut(3, 11), IDENTITY),
        (Run((1, 2, *tokens[:-1], (tokens[-1] + 1) % 50)).cut(2, 10), IDENTITY),
        (whole.cut(2, 9), IDENTITY),
        (whole.cut(2, 10), replace(IDENTITY, weights_digest="2" * 64)),
        (whole.cut(2, 10), replace(IDENTITY, adapter="another")),
        (whole.cut(2, 10), replace(IDENTITY, quantization="int4")),
        (whole.cut(2, 10), IDENTITY.with_dtype("bfloat16")),
    ):
        assert store.find(who, run) is None
        assert store.has(who, run) is None
    assert store.find(IDENTITY, whole.cut(2, 10)) is not None


def test_has_tells_the_key_and_reads_nothing(store: KVStore) -> None:
    assert store.has(IDENTITY, run_named("a")) is None
    store.put(named("a"))
    key = store.has(IDENTITY, run_named("a"))
    assert key is not None and same(store.get(key), named("a"))
    before = store.counters
    store.has(IDENTITY, run_named("a"))
    assert store.counters == before


def test_slice_of_a_conversation_is_no_segment(store: KVStore) -> None:
    whole = named("a", 20)
    run = whole.run.cut(5, 20)
    tensors = {name: tuple(t[:, 5:] for t in layers) for name, layers in whole.tensors.items()}
    part = KVSegment(run, IDENTITY, tensors)
    with pytest.raises(LineageError):
        store.put(part)
    assert store.memory.keys() == []
    assert store.entries() == []


def test_part_of_a_session_is_never_spliced_elsewhere(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    key = store.put_run(named("a"))
    assert find(store, "a") is None
    assert store.get(key) is None
    assert same(store.get_run(key, run_named("a")), named("a"))
    with pytest.raises(SegmentFormatError, match="is wanted"):
        store.get_run(key, run_named("b"))
    with pytest.raises(StorageError, match="is not in the store"):
        store.get_run("0" * 64, run_named("a"))
    with pytest.raises(StorageError, match="has no folder"):
        KVStore().put_run(named("a"))


# -- inexact copies ------------------------------------------------------------------------


def test_int8_copy_is_found_where_inexact_ones_are_accepted(tmp_path: Path) -> None:
    exact = named("a")
    KVStore(tmp_path / "s").put(exact, int8=True)
    assert find(KVStore(tmp_path / "s"), "a") is None
    lenient = KVStore(tmp_path / "s", accept_inexact=True)
    found = lenient.find(IDENTITY, exact.run)
    assert found is not None and found.run.altered == "int8:float32"
    gap = max(float((a - b).abs().max()) for a, b in zip(found.keys, exact.keys, strict=True))
    assert 0 < gap < 0.05
    key = lenient.has(IDENTITY, exact.run)
    strict = KVStore(tmp_path / "s")
    assert key is not None and strict.get(key) is None, "by its key neither"


def test_exact_copy_wins_over_an_inexact_one(tmp_path: Path) -> None:
    KVStore(tmp_path / "s").put(named("a"), int8=True)
    lenient = KVStore(tmp_path / "s", accept_inexact=True)
    assert lenient.find(IDENTITY, run_named("a")) is not None
    KVStore(tmp_path / "s").put(named("a"))
    assert find(lenient, "a") is not None
    assert len(lenient.entries()) == 2


def test_segment_of_another_dtype_is_another_one(tmp_path: Path) -> None:
    segment = named("a")
    store = KVStore(tmp_path / "s", accept_inexact=True)
    half = converted(segment, "bfloat16")
    store.put(segment)
    assert store.find(half.identity, run_named("a")) is None
    store.put(half)
    found = store.find(half.identity, run_named("a"))
    assert found is not None and found.run.altered == "from:float32"
    assert KVStore(tmp_path / "s").find(half.identity, run_named("a")) is None


# -- compiling -----------------------------------------------------------------------------


def test_what_is_missing_is_compiled_once(store: KVStore, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "log")
    for _ in range(3):
        compiler.get(store, "a")
    assert compiler.names == ["a"]
    facts = counted(store)
    assert facts.pop("stored", 1) == 1
    assert facts == {"misses": 1, "compiled": 1, "memory_hits": 2}


def test_compile_that_fails_leaves_the_way_free(store: KVStore, tmp_path: Path) -> None:
    def fail() -> KVSegment:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            store.get_or_compile(IDENTITY, run_named("a"), fail)
    assert Compiler(tmp_path / "log").get(store, "a") is not None
    assert store.counters.compiled == 1


def test_compile_may_ask_for_other_segments(store: KVStore, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "log")
    outer = Compiler(tmp_path / "log", before=lambda: compiler.get(store, "inner") and None)
    outer.get(store, "outer")
    assert compiler.names == ["inner", "outer"]


def test_provenance_is_made_only_for_what_is_compiled(tmp_path: Path) -> None:
    store, made = KVStore(tmp_path / "s"), []

    def source() -> Provenance:
        made.append(1)
        return Provenance(name="policy", version=3)

    for _ in range(2):
        store.get_or_compile(IDENTITY, run_named("a"), lambda: named("a"), source)
    assert made == [1]
    assert [(e.name, e.version) for e in store.entries()] == [("policy", 3)]


def test_segment_that_cannot_be_stored_is_in_memory_and_noted(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=10))
    compiler = Compiler(tmp_path / "log")
    compiler.get(store, "a")
    compiler.get(store, "a")
    assert compiler.names == ["a"]
    assert store.counters.refused == {"StorageError": 1}
    assert "do not fit" in store.faults[0].reason
    assert store.entries() == []


def test_strict_compile_raises_what_cannot_be_stored(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=10))
    with pytest.raises(StorageError, match="do not fit"):
        store.get_or_compile(IDENTITY, run_named("a"), lambda: named("a"), strict=True)


def test_segment_that_the_format_has_no_place_for_is_in_memory_and_noted(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s")
    broken = named("a")
    broken.keys[0][0, 0, 0] = torch.nan
    found = store.get_or_compile(IDENTITY, broken.run, lambda: broken)
    assert found is broken
    assert store.counters.refused == {"SegmentFormatError": 1}
    assert store.entries() == []
    with pytest.raises(SegmentFormatError, match="NaN"):
        store.put(broken)


def test_threads_that_ask_at_once_wait_for_one_compile(store: KVStore, tmp_path: Path) -> None:
    started, go = Event(), Event()

    def slowly() -> None:
        started.set()
        assert go.wait(30)

    compiler = Compiler(tmp_path / "log", before=slowly)
    threads = [Thread(target=compiler.get, args=(store, "a")) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    # another one is not held up
    Compiler(tmp_path / "log").get(store, "b")
    go.set()
    for thread in threads:
        thread.join(30)
    assert sorted(compiler.names) == ["a", "b"]


def test_thread_takes_over_from_one_whose_compile_failed(store: KVStore, tmp_path: Path) -> None:
    started, go = Event(), Event()

    def fail() -> KVSegment:
        started.set()
        assert go.wait(30)
        raise RuntimeError("out of memory")

    def first() -> None:
        with pytest.raises(RuntimeError):
            store.get_or_compile(IDENTITY, run_named("a"), fail)

    compiler = Compiler(tmp_path / "log")
    threads = [Thread(target=first), Thread(target=compiler.get, args=(store, "a"))]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(30)
    assert compiler.names == ["a"]


# -- without a folder ----------------------------------------------------------------------


def test_store_in_memory_pins_and_removes() -> None:
    size = named("a").nbytes
    store = KVStore(memory_nbytes=2 * size)
    assert store.put(named("a")) is None
    key = store.has(IDENTITY, run_named("a"))
    assert key is not None
    store.pin(key)
    for name in "bcd":
        store.put(named(name))
    assert find(store, "a") is not None
    assert store.counters.evicted == 2
    store.pin(key, False)
    assert store.remove([key]) == 0
    assert find(store, "a") is None
    for action in (lambda: store.pin(key), lambda: store.remove([key])):
        with pytest.raises(StorageError, match="no segment"):
            action()


def test_store_in_memory_says_what_it_cannot_do() -> None:
    store = KVStore()
    assert store.entries() == [] and store.pinned() == set() and store.header("0" * 64) is None
    with pytest.raises(StorageError, match="no remote tier"):
        store.push([])
    with pytest.raises(StorageError, match="has no folder"):
        KVStore(remote="memory://x").pull("0" * 64)
    with pytest.raises(StorageError, match="has no folder"):
        _ = store.sessions


# -- values --------------------------------------------------------------------------------


def test_counters_are_a_copy(store: KVStore) -> None:
    before = store.counters
    before.refused["x"] += 1
    before.misses += 5
    assert counted(store) == {}


def test_faults_are_bounded_and_all_are_counted(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "s", limits=Limits(max_nbytes=10))
    for index in range(130):
        store.get_or_compile(IDENTITY, run_named(str(index)), lambda i=index: named(str(i)))
    assert store.counters.refused == {"StorageError": 130}
    assert len(store.faults) == 100
    assert store.faults[-1].key == store.has(IDENTITY, run_named("129"))


def test_dtypes_of_the_format_are_stored_bit_by_bit(tmp_path: Path) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        who = identity(dtype, num_layers=2, num_kv_heads=2, head_dim=4)
        KVStore(tmp_path / "s").put(named("a", who=who))
        assert find(KVStore(tmp_path / "s"), "a", who=who) is not None

"""The memory tier: bytes, order of use, pins, and tenants that do not meet."""

from __future__ import annotations

from threading import Thread

from helpers_tiers import named, same

from kvnotes.store import MemoryTier

SIZE = named("a").nbytes


def filled(max_nbytes: int | None, *names: str, tenant: str = "") -> MemoryTier:
    tier = MemoryTier(max_nbytes)
    for name in names:
        tier.put(name, tenant, named(name))
    return tier


def test_least_recently_used_segment_goes_first() -> None:
    tier = filled(3 * SIZE, "a", "b", "c")
    assert tier.get("a", [""]) is not None
    tier.put("d", "", named("d"))
    assert tier.keys() == ["c", "a", "d"]
    assert tier.nbytes == 3 * SIZE
    assert tier.num_evicted("") == 1


def test_bytes_decide_and_not_the_number_of_segments() -> None:
    tier = filled(4 * SIZE, "a", "b", "c")
    tier.put("large", "", named("large", 24))  # takes three times as much
    assert tier.keys() == ["c", "large"]
    assert tier.nbytes == 4 * SIZE


def test_newest_segment_is_kept_whatever_its_size() -> None:
    tier = filled(SIZE, "a")
    tier.put("large", "", named("large", 80))
    assert tier.keys() == ["large"]
    tier.put("b", "", named("b"))
    assert tier.keys() == ["b"]


def test_pinned_segments_stay_and_can_be_let_go() -> None:
    tier = MemoryTier(2 * SIZE)
    tier.put("a", "", named("a"), pinned=True)
    for name in "bcd":
        tier.put(name, "", named(name))
    assert tier.keys() == ["a", "d"]
    tier.pin("a", False)
    tier.put("e", "", named("e"))
    assert tier.keys() == ["d", "e"]


def test_replaced_segment_is_counted_once() -> None:
    tier = filled(None, "a", "a", "b")
    assert tier.nbytes == 2 * SIZE
    assert tier.remove("a", "")
    assert not tier.remove("a", "")
    assert tier.nbytes == SIZE


def test_pin_of_a_removed_segment_is_gone() -> None:
    tier = MemoryTier(SIZE)
    tier.put("a", "", named("a"), pinned=True)
    tier.remove("a", "")
    tier.put("a", "", named("a"))
    tier.put("b", "", named("b"))
    assert tier.keys() == ["b"]


def test_tenants_neither_see_nor_push_out_each_other() -> None:
    tier = filled(2 * SIZE, "a", "b", tenant="one")
    for name in "cdefg":
        tier.put(name, "two", named(name))
    assert tier.keys(["one"]) == ["a", "b"]
    assert tier.num_evicted("one") == 0
    assert tier.get("a", ["two", ""]) is None
    assert tier.get("a", ["one"]) is not None
    assert not tier.remove("a", "two")
    assert tier.nbytes_of(["one"]) == 2 * SIZE == tier.nbytes_of(["two"])


def test_lookup_of_what_somebody_else_has_does_not_change_the_order() -> None:
    tier = filled(2 * SIZE, "a", "b", tenant="one")
    tier.get("a", ["two"])
    assert not tier.has("a", "two")
    assert tier.keys(["one"]) == ["a", "b"]


def test_threads_leave_the_count_of_bytes_right() -> None:
    tier = MemoryTier(5 * SIZE)
    segments = {str(i): named(str(i)) for i in range(20)}

    def work(start: int) -> None:
        for i in range(300):
            name = str((start + 7 * i) % 20)
            found = tier.get(name, [""])
            assert found is None or same(found, segments[name])
            tier.put(name, "", segments[name])
            if i % 5 == 0:
                tier.remove(name, "")

    threads = [Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.nbytes == SIZE * len(tier.keys()) <= 5 * SIZE

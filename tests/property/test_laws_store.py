"""The store against a model of it: two stores on one folder, any operations, in any order.

The model is a dictionary of what the files must be, in the order of their use. Whatever is
found must be what its name stands for, bit by bit; what the model holds must be found; what
was evicted must be what the rule says.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers_tiers import IDENTITY, Compiler, find, named, run_named, variant

from kvnotes.errors import StorageError
from kvnotes.segment import KVSegment
from kvnotes.store import KVStore, Limits, Provenance, Rule, content_key, disk

NAMES = ["a", "b", "c", "d", "e", "f", "p:x", "p:y", "q:x", "q:y"]
LONG = {"d": 900, "e": 600}
"""Tokens of names that are not short: their files are larger."""

TENANTS = ["", "acme"]

WEIGHTS = {
    "put": 8,
    "find": 8,
    "get_or_compile": 5,
    "pin": 2,
    "unpin": 2,
    "remove": 2,
    "prune": 1,
    "reopen": 2,
    "clock_jumps": 3,
    "index_is_lost": 1,
    "file_is_damaged": 1,
    "file_is_deleted": 1,
}


def material(name: str) -> tuple[KVSegment, Provenance]:
    """The segment of a name; `p:x` and `p:y` are variants of one text."""
    if ":" in name:
        return variant(*name.split(":"))
    segment = named(name, LONG.get(name, 8))
    return segment, Provenance(name=name)


@dataclass
class Shelf:
    """What the files of one tenant must be: name to size, the least recently used first."""

    limit: int | None
    sizes: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    @staticmethod
    def family(name: str) -> str:
        return name.split(":")[0]

    def used(self, name: str) -> None:
        self.sizes[name] = self.sizes.pop(name)

    def fit(self, most: int, keep: str) -> bool:
        """Evict families, the one whose last use is oldest first; or nothing."""
        sizes = dict(self.sizes)
        while sum(sizes.values()) > most:
            last = {self.family(name): index for index, name in enumerate(sizes)}
            free = [f for f in last if f not in self.pinned and f != keep]
            if not free:
                return False
            goes = min(free, key=last.__getitem__)
            sizes = {n: s for n, s in sizes.items() if self.family(n) != goes}
        self.sizes = sizes
        return True

    def put(self, name: str, about: int, exactly: int) -> bool:
        """Add a file; says whether it fits."""
        if name in self.sizes:
            self.used(name)
            return True
        if self.limit is None:
            self.sizes[name] = exactly
            return True
        if not self.fit(self.limit - about, self.family(name)):
            return False
        self.sizes[name] = exactly
        if not self.fit(self.limit, self.family(name)):
            del self.sizes[name]
            return False
        return True

    def remove(self, name: str) -> None:
        del self.sizes[name]
        if self.family(name) not in map(self.family, self.sizes):
            self.pinned.discard(self.family(name))


class World:
    """Two stores on one folder, each with a memory of its own, and two tenants.

    Args:
        folder: Empty.
        limit: Bytes that each tenant may have.
        seed: Which operations.
    """

    def __init__(self, folder: Path, limit: int | None, seed: int) -> None:
        self.root = folder / "s"
        self.random = random.Random(seed)
        self.limits = Limits(max_nbytes=limit)
        self.model = {tenant: Shelf(limit) for tenant in TENANTS}
        self.sizes: dict[tuple[str, str], int] = {}
        self.stores = [self.opened(), self.opened()]
        self.clock = 0.0
        self.done: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        """Do random operations; after each, what is there must be the model."""
        trace: list[str] = []
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        for _ in range(num_operations):
            operation = self.random.choices(names, weights)[0]
            store, tenant = self.random.randrange(2), self.random.choice(TENANTS)
            name = self.random.choice(NAMES)
            trace.append(f"{operation}({store}, {tenant!r}, {name!r})")
            try:
                getattr(self, operation)(store, tenant, name)
                self.look(self.random.choice(self.stores))
            except Exception as error:
                raise AssertionError("\n".join(trace[-40:])) from error
            self.done[operation] += 1

    def opened(self) -> KVStore:
        return KVStore(self.root, limits=self.limits, memory_nbytes=1)

    def size(self, tenant: str, name: str) -> int:
        """Bytes of a file, measured in another folder."""
        if (tenant, name) not in self.sizes:
            with TemporaryDirectory() as folder:
                entry = KVStore(Path(folder), tenant=tenant).put(*material(name))
                assert entry is not None
                self.sizes[tenant, name] = entry.nbytes
        return self.sizes[tenant, name]

    def view(self, store: int, tenant: str) -> KVStore:
        return self.stores[store].for_tenant(tenant)

    def key(self, tenant: str, name: str) -> str:
        return content_key("segment", tenant, IDENTITY.fingerprint, material(name)[0].run.digest)

    # -- operations --------------------------------------------------------------------

    def put(self, store: int, tenant: str, name: str) -> None:
        pinned = self.random.random() < 0.15
        segment, source = material(name)
        shelf = self.model[tenant]
        fits = shelf.put(name, segment.nbytes, self.size(tenant, name))
        if pinned and fits:
            shelf.pinned.add(shelf.family(name))
        try:
            entry = self.view(store, tenant).put(segment, source, pinned=pinned)
            assert fits and entry is not None and entry.nbytes == self.size(tenant, name)
        except StorageError:
            assert not fits

    def find(self, store: int, tenant: str, name: str) -> None:
        segment, _ = material(name)
        view = self.view(store, tenant)
        remembered = [t for t in (tenant, "") if view.memory.has(self.key(t, name), t)]
        found = find(view, name.split(":")[0], segment.num_tokens, preamble=segment.preamble_ids)
        holders = [t for t in dict.fromkeys((tenant, "")) if name in self.model[t].sizes]
        if holders and not remembered:
            assert found is not None, f"{name} is lost"
        if not holders and not remembered:
            assert found is None, f"{name} came from nowhere"
        used = remembered or holders
        if used and name in self.model[used[0]].sizes:
            self.model[used[0]].used(name)

    def get_or_compile(self, store: int, tenant: str, name: str) -> None:
        name = name.replace(":", "")
        view, length = self.view(store, tenant), LONG.get(name, 8)
        compiler = Compiler(self.root.parent / "log")
        before = len(compiler.names)
        remembered = [t for t in (tenant, "") if view.memory.has(self.key(t, name), t)]
        holders = [t for t in dict.fromkeys((tenant, "")) if name in self.model[t].sizes]
        compiler.get(view, name, length)
        compiled = len(compiler.names) - before
        assert compiled == (not remembered and not holders)
        if compiled:
            about = named(name, length).nbytes
            self.model[tenant].put(name, about, self.size(tenant, name))
        else:
            used = (remembered or holders)[0]
            if name in self.model[used].sizes:
                self.model[used].used(name)

    def pin(self, store: int, tenant: str, name: str, pinned: bool = True) -> None:
        shelf = self.model[tenant]
        try:
            self.view(store, tenant).pin(self.key(tenant, name), pinned)
            assert name in shelf.sizes
            (shelf.pinned.add if pinned else shelf.pinned.discard)(shelf.family(name))
        except StorageError:
            assert name not in shelf.sizes

    def unpin(self, store: int, tenant: str, name: str) -> None:
        self.pin(store, tenant, name, False)

    def remove(self, store: int, tenant: str, name: str) -> None:
        shelf = self.model[tenant]
        try:
            freed = self.view(store, tenant).remove([self.key(tenant, name)])
            assert freed == shelf.sizes[name]
            shelf.remove(name)
        except StorageError:
            assert name not in shelf.sizes

    def prune(self, store: int, tenant: str, name: str) -> None:
        most = self.random.choice([0, 20_000, 40_000])
        shelf = self.model[tenant]
        gone = self.view(store, tenant).prune(Rule(max_nbytes=most))
        while sum(shelf.sizes.values()) > most:
            before = sum(shelf.sizes.values())
            shelf.fit(before - 1, keep="")
            if sum(shelf.sizes.values()) == before:
                break
        left = {self.key(tenant, name) for name in shelf.sizes}
        assert not left & {item.name for item in gone}

    # -- what happens to a folder ------------------------------------------------------

    def reopen(self, store: int, tenant: str, name: str) -> None:
        self.stores[store] = self.opened()

    def clock_jumps(self, store: int, tenant: str, name: str) -> None:
        self.clock += self.random.choice([-1e7, 1e7])

    def index_is_lost(self, store: int, tenant: str, name: str) -> None:
        if self.limits.max_nbytes is not None:
            return  # the order of use is lost with it
        how = self.random.choice(["deleted", "garbage", "cut", "empty"])
        tier = self.view(0, tenant).disk
        assert tier is not None
        path = next(tier.root.glob("index-*.sqlite"), None)
        if path is None:
            return
        content = path.read_bytes()
        path.unlink()
        if how != "deleted":
            kept = {"garbage": b"x" * 9000, "cut": content[: len(content) // 2], "empty": b""}
            path.write_bytes(kept[how])

    def file_is_damaged(self, store: int, tenant: str, name: str) -> None:
        shelf = self.model[tenant]
        if name not in shelf.sizes or name in self.model["" if tenant else "acme"].sizes:
            return
        tier = self.view(0, tenant).disk
        assert tier is not None
        with tier.path(self.key(tenant, name)).open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            last = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([last[0] ^ 8]))
        self.stores = [self.opened(), self.opened()]
        segment, _ = material(name)
        view = self.view(0, tenant)
        assert view.find(IDENTITY, segment.run) is None
        assert view.counters.refused == {"SegmentFormatError": 1}
        family, pinned = shelf.family(name), set(shelf.pinned)
        shelf.remove(name)
        shelf.pinned |= pinned & {family}  # a pin outlives a damaged file

    def file_is_deleted(self, store: int, tenant: str, name: str) -> None:
        shelf = self.model[tenant]
        if name not in shelf.sizes:
            return
        tier = self.view(0, tenant).disk
        assert tier is not None
        tier.path(self.key(tenant, name)).unlink()
        self.stores = [self.opened(), self.opened()]
        del shelf.sizes[name]
        assert len(tier.entries()) == len(shelf.sizes)

    # -- what must always hold ---------------------------------------------------------

    def look(self, store: KVStore) -> None:
        """Compare what a store lists with the model."""
        for tenant, shelf in self.model.items():
            tier = store.for_tenant(tenant).disk
            assert tier is not None
            entries = tier.entries()
            found = {entry.key: entry.nbytes for entry in entries}
            assert found == {self.key(tenant, n): s for n, s in shelf.sizes.items()}
            pinned = {e.family for e in entries} & tier.pinned()
            assert len(pinned) == len(shelf.pinned & set(map(shelf.family, shelf.sizes)))
            if shelf.limit is not None:
                assert sum(found.values()) <= shelf.limit


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FLUSH_SECONDS", -1.0)  # uses are told when they happen
    monkeypatch.setattr(os, "fsync", lambda file: None)  # there is no power cut here


@pytest.mark.parametrize(("limit", "seed"), [(None, 1), (30_000, 2), (45_000, 3), (70_000, 4)])
def test_two_stores_on_one_folder_are_the_model(
    tmp_path: Path, limit: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, limit, seed)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + world.clock)
    world.run(250)
    assert set(world.done) == set(WEIGHTS)


def test_model_evicts_by_the_last_use_of_a_family() -> None:
    shelf = Shelf(limit=30)
    for name in ("p:x", "a", "p:y"):
        assert shelf.put(name, 5, 10)
    assert shelf.put("b", 5, 10)
    assert list(shelf.sizes) == ["p:x", "p:y", "b"]
    shelf.pinned.add("b")
    assert not shelf.put("c", 25, 25)
    assert run_named("a").digest == named("a").run.digest

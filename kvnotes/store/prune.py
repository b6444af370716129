"""Taking away what nobody needs: leftovers, and on request old or foreign segments.

Owns what counts as a leftover. What is pinned never goes. Needs no torch.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvnotes.store.atomic import PART_SUFFIX, STALE_SECONDS, storage_errors
from kvnotes.store.folder import StoreFolder
from kvnotes.store.index import DAMAGED_SUFFIX, INDEX_NAME, Entry

DAY_SECONDS = 86400.0

DOWNLOAD_SECONDS = DAY_SECONDS
"""A download that nobody has gone on with for this long is given up."""

PrunedKind = Literal["part", "download", "damaged", "index", "lock", "text", "segment", "run"]


@dataclass(frozen=True, slots=True)
class Pruned:
    """Something that was taken away, or would be.

    Args:
        kind: `part`: a file that was being written by a process that died. `download`: one that
            was given up. `damaged`: refused and put aside. `index`: an index that was put aside
            or belongs to another version. `lock`: of nobody. `text`: no variant needs it.
            `segment`, `run`: see `reason`.
        name: Its path below the folder, or the key.
        nbytes: Bytes set free.
        reason: Why, in words.
        entry: The segment or run.
    """

    kind: PrunedKind
    name: str
    nbytes: int
    reason: str
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Which segments go; by default none, only leftovers.

    Args:
        keep_fingerprints: Segments of all other models go; None keeps those of every model.
        unused_days: Segments go that were not used for longer; a family as one.
        max_nbytes: The least recently used families go until no more bytes are left.
        keep_runs: Parts of sessions that no saved session refers to go, which are all but
            these; None keeps all. The other rules are for segments.
    """

    keep_fingerprints: Collection[str] | None = None
    unused_days: float | None = None
    max_nbytes: int | None = None
    keep_runs: Collection[str] | None = None


def prune(folder: StoreFolder, rule: Rule, *, dry_run: bool = False) -> tuple[Pruned, ...]:
    """Take away leftovers, and segments by a rule.

    Args:
        folder: Of one tenant.
        rule: Which segments.
        dry_run: Only say what would go.

    Raises:
        StorageError: The folder cannot be written.
    """
    entries = folder.entries()
    going = _by_rule(folder, entries, rule)
    names = {item.name for item in going}
    left = [entry for entry in entries if entry.key not in names]
    found = [*going, *_leftovers(folder), *_texts(folder, left)]
    if not dry_run:
        folder.remove(names)
        for item in found:
            if item.entry is None:
                _remove(folder, item)
    return tuple(found)


# -- segments ------------------------------------------------------------------------------


def _by_rule(folder: StoreFolder, entries: list[Entry], rule: Rule) -> list[Pruned]:
    pinned, now = folder.pinned(), time.time()
    last_use: dict[str, float] = {}
    for entry in entries:
        last_use[entry.family] = max(entry.used_at, last_use.get(entry.family, 0.0))
    going: dict[str, Pruned] = {}
    for entry in entries:
        days = (now - last_use[entry.family]) / DAY_SECONDS
        if entry.family in pinned:
            continue
        if entry.kind == "run":
            # a young one may belong to a session that is being saved
            young = now - entry.used_at <= STALE_SECONDS
            if rule.keep_runs is not None and entry.key not in rule.keep_runs and not young:
                going[entry.key] = _of(entry, "no saved session needs it")
        elif rule.keep_fingerprints is not None and entry.fingerprint not in rule.keep_fingerprints:
            going[entry.key] = _of(entry, f"of another model, {entry.fingerprint[:12]}")
        elif rule.unused_days is not None and days > rule.unused_days:
            going[entry.key] = _of(entry, f"not used for {days:.0f} days")
    if rule.max_nbytes is not None:
        _by_size(folder, entries, rule.max_nbytes, pinned, going)
    return list(going.values())


def _by_size(
    folder: StoreFolder,
    entries: list[Entry],
    max_nbytes: int,
    pinned: Collection[str],
    going: dict[str, Pruned],
) -> None:
    by_key = {entry.key: entry for entry in entries}
    excess = sum(e.nbytes for e in entries if e.key not in going) - max_nbytes
    for family in folder.index.read(lambda table: table.families()):
        members = [by_key[key] for key in family.keys if key in by_key and key not in going]
        if excess <= 0:
            return
        if family.name not in pinned:
            for entry in members:
                going[entry.key] = _of(entry, f"least recently used, beyond {max_nbytes} bytes")
                excess -= entry.nbytes


def _of(entry: Entry, reason: str) -> Pruned:
    return Pruned(entry.kind, entry.key, entry.nbytes, reason, entry)


# -- leftovers -----------------------------------------------------------------------------


def _leftovers(folder: StoreFolder) -> Iterator[Pruned]:
    root = folder.root
    for path, facts in _files(root, "pins", "texts", "segments", "library", "sessions"):
        hidden = path.name.startswith(".") and path.name.endswith(PART_SUFFIX)
        if hidden and _age(facts) > STALE_SECONDS:
            yield _file(folder, "part", path, facts, "its writer died")
        if path.parent == root and path.name.startswith("index") and path.name != INDEX_NAME:
            if DAMAGED_SUFFIX in path.name:
                yield _file(folder, "index", path, facts, "damaged, and made again")
            elif path.suffix == ".sqlite" and _age(facts) > 30 * DAY_SECONDS:
                yield _file(folder, "index", path, facts, "of another version of kvnotes")
    for path, facts in _files(root / "partial"):
        if _age(facts) > DOWNLOAD_SECONDS:
            yield _file(folder, "download", path, facts, "nobody went on with it")
    for path, facts in _files(root / "damaged"):
        yield _file(folder, "damaged", path, facts, "it was refused")
    for path, facts in _files(root / "locks"):
        if _age(facts) > DAY_SECONDS:
            yield _file(folder, "lock", path, facts, "nobody holds it")


def _texts(folder: StoreFolder, left: list[Entry]) -> Iterator[Pruned]:
    needed = {entry.text for entry in left}
    for path, facts in _files(folder.root / "texts"):
        # a young one may belong to a file that is being written
        young = _age(facts) <= STALE_SECONDS
        if path.name not in needed and not path.name.startswith(".") and not young:
            yield _file(folder, "text", path, facts, "no variant needs it")


def _files(root: Path, *below: str) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files of a folder, and of all folders in some of those in it; no links."""
    places = [] if root.is_symlink() and not below else [root]
    while places:
        place = places.pop()
        with storage_errors(place), suppress(FileNotFoundError), os.scandir(place) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    facts = item.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode) and (place != root or item.name in below):
                        places.append(Path(item.path))
                    elif stat.S_ISREG(facts.st_mode):
                        yield Path(item.path), facts


def _file(
    folder: StoreFolder, kind: PrunedKind, path: Path, facts: os.stat_result, reason: str
) -> Pruned:
    return Pruned(kind, str(path.relative_to(folder.root)), facts.st_size, reason)


def _age(facts: os.stat_result) -> float:
    return time.time() - facts.st_mtime


def _remove(folder: StoreFolder, item: Pruned) -> None:
    path = folder.root / item.name
    if item.kind == "lock":
        with folder.locks.try_hold(path.name.removesuffix(".lock")) as free:
            if free:
                _unlink(path)
    elif item.kind != "text" or _age_now(path) > STALE_SECONDS:
        _unlink(path)


def _age_now(path: Path) -> float:
    """Age of a file now: a text that is needed again since it was listed is young."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _unlink(path: Path) -> None:
    with storage_errors(path):
        path.unlink(missing_ok=True)

"""The library: skills by name, and their compiled segments wherever the store has them.

Owns `Library`: the catalogue beside a store's files, and carrying both to other machines.
Needs no model; `compiling` does.

    <store>/library/refunds/3.json      the catalogue; each tenant has its own
    <remote>/library/refunds/3.json     the same, pushed last: a skill is there or not
    <remote>/library/refunds/3/<key>    one small file for each compiled segment
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvnotes.errors import StorageError, UnknownSegmentError
from kvnotes.library.catalog import Catalog, parse_record
from kvnotes.library.skill import Skill, parse_ref
from kvnotes.prompt import SegmentText
from kvnotes.store import Entry, KVStore, digest_text
from kvnotes.store.records import sealed, unsealed
from kvnotes.store.relay import remote_folder

Told = Callable[[str], None]
"""Told what is going on, for a progress line."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """A skill and what is compiled of it here.

    Args:
        skill: The skill.
        entries: Its compiled segments, of all models.
        pinned: They are never evicted.
    """

    skill: Skill
    entries: tuple[Entry, ...]
    pinned: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(entry.nbytes for entry in self.entries)


class Library:
    """Skills of one tenant beside a store with a folder.

    Args:
        store: Holds the compiled segments.

    Raises:
        StorageError: The store has no folder.

    Example:
        >>> library = Library(model.store)
        >>> skill = library.add(Skill("refunds", "Refund within 30 days."))
        >>> texts = library.segments("refunds")
        >>> session = Session(model, messages=[skill.message()], segments=texts)
    """

    def __init__(self, store: KVStore) -> None:
        if store.disk is None:
            raise StorageError(
                "a library needs a store with a folder", hint="kvnotes.load(..., store=FOLDER)"
            )
        self.store = store
        self.catalog = Catalog(store.disk.root / "library", store.disk.trust)
        self._trust = store.disk.trust
        self._place = f"{remote_folder(store.tenant)}library"
        self._texts = f"{remote_folder(store.tenant)}texts"

    # -- skills ----------------------------------------------------------------------------

    def add(self, skill: Skill) -> Skill:
        """Add a skill to the catalogue; return it with its version. Compiles nothing."""
        return self.catalog.add(skill)

    def get(self, ref: str) -> Skill:
        """Return a skill by `name` or `name@version`.

        Raises:
            UnknownSegmentError: It is not there.
        """
        return self.catalog.get(ref)

    def segments(self, *refs: str) -> dict[str, SegmentText]:
        """Return skills as a session takes them: segments by `name@version`."""
        return {skill.ref: skill.segment for skill in map(self.get, refs)}

    def shelves(self, name: str | None = None) -> list[Shelf]:
        """Return all skills, or all versions of one, with what is compiled of them."""
        compiled: dict[tuple[str, int], list[Entry]] = {}
        for entry in self.store.entries():
            compiled.setdefault((entry.name, entry.version), []).append(entry)
        pinned = self.store.pinned()
        skills = self.catalog.skills()
        if name is not None:
            self.get(name)
            skills = [skill for skill in skills if skill.name == parse_ref(name)[0]]
        shelves = []
        for skill in skills:
            entries = compiled.get((skill.name, skill.version), [])
            fixed = bool(entries) and all(entry.family in pinned for entry in entries)
            shelves.append(Shelf(skill, tuple(entries), fixed))
        return shelves

    def shelf(self, ref: str) -> Shelf:
        """Return one skill with what is compiled of it.

        Raises:
            UnknownSegmentError: It is not there.
        """
        skill = self.get(ref)
        return next(shelf for shelf in self.shelves(skill.name) if shelf.skill == skill)

    def pin(self, ref: str, pinned: bool = True) -> Shelf:
        """Keep all compiled segments of a skill from being evicted, or no longer.

        Raises:
            StorageError: Nothing of it is compiled.
        """
        shelf = self.shelf(ref)
        if not shelf.entries:
            raise StorageError(
                f"nothing of {shelf.skill.ref!r} is compiled here, there is nothing to pin",
                hint="kvnotes compile its folder first",
            )
        for entry in shelf.entries:
            self.store.pin(entry.key, pinned)
        return self.shelf(ref)

    def remove(self, ref: str) -> int:
        """Remove a skill and its compiled segments; return the bytes set free."""
        shelf = self.shelf(ref)
        freed = self.store.remove(entry.key for entry in shelf.entries)
        self.catalog.remove(shelf.skill.ref)
        return freed

    # -- other machines --------------------------------------------------------------------

    def push(self, ref: str, told: Told = lambda text: None) -> int:
        """Upload a skill and its compiled segments; return how many files were missing there.

        Raises:
            StorageError: No remote tier, it takes no files, or the connection broke for good.
        """
        shelf, remote, store = self.shelf(ref), self.store.remote_tier(), self.store
        num_pushed = store.push((entry.key for entry in shelf.entries), told)
        for entry in shelf.entries:
            header = store.header(entry.key)
            text = None if header is None else store.text(header)
            if header is not None and text is not None and not header.provenance.text:
                digest = header.provenance.text_sha256
                remote.write(f"{self._texts}/{digest}", sealed(_encoded(text), self._trust))
            remote.write(self._marker(shelf.skill, entry.key), entry.fingerprint.encode())
        record = sealed(shelf.skill.to_json().encode(), self._trust)
        remote.write(self._record(shelf.skill), record)
        return num_pushed

    def pull(
        self, ref: str, *, fingerprint: str | None = None, told: Told = lambda text: None
    ) -> Shelf:
        """Download a skill and its compiled segments; what is here already is not fetched.

        Args:
            ref: `name` takes the latest version there is.
            fingerprint: Only segments of this model.
            told: Told the key of each segment.

        Raises:
            UnknownSegmentError: The remote tier does not have it.
            StorageError: No remote tier, or the connection broke for good.
            SegmentFormatError: A file is damaged, or another one than its name says.
        """
        remote = self.store.remote_tier()
        name, version = parse_ref(ref)
        version = version or self._latest(name)
        content = remote.read(f"{self._place}/{name}/{version}.json") if version else None
        if content is None:
            raise UnknownSegmentError(
                f"{remote.url} has no skill {ref!r}", hint="push it there first, or check the name"
            )
        where = f"{remote.url}: {name}/{version}.json"
        skill = parse_record(unsealed(content, self._trust, where), where)
        if (skill.name, skill.version) != (name, version):
            raise UnknownSegmentError(
                f"{remote.url} has the skill {skill.ref!r} under the name {name}@{version}",
                hint="somebody mixed up its files; push the skill again",
            )
        skill = self.catalog.add(skill)
        for file in remote.files(f"{self._place}/{name}/{version}"):
            if fingerprint is None or remote.read(file.path) == fingerprint.encode():
                key = file.path.rsplit("/", 1)[-1]
                told(key)
                self._fetch(key)
        return self.shelf(skill.ref)

    def _fetch(self, key: str) -> None:
        store = self.store
        if not store.pull(key):
            raise StorageError(
                f"the remote tier lists segment {key[:12]} and does not have it",
                hint="it was removed there; push the skill again",
            )
        header = store.header(key)
        if header is None:
            return
        digest = header.provenance.text_sha256
        if digest and store.text(header) is None:
            place = f"{self._texts}/{digest}"
            content = store.remote_tier().read(place)
            if content is not None:
                text = unsealed(content, self._trust, place).decode("utf-8", "surrogatepass")
                if digest_text(text) == digest:
                    store.keep_text(text)

    def _latest(self, name: str) -> int:
        files = self.store.remote_tier().files(f"{self._place}/{name}")
        names = [file.path.removeprefix(f"{self._place}/{name}/") for file in files]
        stems = [n.removesuffix(".json") for n in names if n.endswith(".json")]
        return max((int(stem) for stem in stems if stem.isdigit()), default=0)

    def _record(self, skill: Skill) -> str:
        return f"{self._place}/{skill.name}/{skill.version}.json"

    def _marker(self, skill: Skill, key: str) -> str:
        return f"{self._place}/{skill.name}/{skill.version}/{key}"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

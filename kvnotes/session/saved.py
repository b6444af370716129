"""Sessions on disk: the conversation as a record, its K/V as files of their own.

Owns the record and the way there and back. K/V of compiled segments stay where the store
has them; what the conversation computed itself is written as runs, piece by piece: a
second save, or a fork, writes only what is new. A cache is put together again from the
source copies, by a plan that reuses everything.

    sessions/<id>.json      text, values, waiting changes, lineage of every token
    segments/ab/<key>       K/V of kind `run`: of use for this conversation alone
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvnotes.errors import (
    EngineError,
    KVNotesError,
    SegmentFormatError,
    SpecMismatchError,
    StorageError,
    nearest,
)
from kvnotes.plan import Block, Layout, Plan, Reuse, Run
from kvnotes.prompt import ErratumStyle, PromptTemplate
from kvnotes.segment import Buffer, KVCache, KVSegment
from kvnotes.session.conversation import Conversation
from kvnotes.session.edits import ErratumMode, PromptState
from kvnotes.session.loaded import Model
from kvnotes.session.operations import Delete, Edit, Insert, Move, Operation, Replace
from kvnotes.session.planner import Live, Planner, SplicePolicy
from kvnotes.session.strategy import Scorecard
from kvnotes.spec import ModelIdentity
from kvnotes.store import KVStore

FORMAT_VERSION = 1
MAX_PIECES = 8
"""Files of one run; a save that would make more writes the run as a whole."""

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_OPERATIONS: dict[str, type[Operation]] = {
    "edit": Edit,
    "delete": Delete,
    "move": Move,
    "replace": Replace,
    "insert": Insert,
}
_Index = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ViewRecord(_Part):
    """Tokens `[source_start, source_stop)` of a run, at a position."""

    run: _Index
    source_start: _Index
    source_stop: _Index
    target_start: _Index


class RunRecord(_Part):
    """Lineage of one run; its context are views of runs before it in the list."""

    token_ids: tuple[int, ...]
    start: _Index
    context: tuple[ViewRecord, ...]
    altered: str


class SourceRecord(_Part):
    """Where the K/V of a run lie: a compiled segment, or a run of this conversation."""

    run: _Index
    kind: Literal["segment", "run"]
    key: str
    preamble_ids: tuple[int, ...] = ()


class OperationRecord(_Part):
    """A change that waits."""

    op: str
    change: dict[str, Any]


class SavedSession(_Part):
    """Everything about a conversation but its K/V."""

    format: Literal[1] = 1
    id: str
    parent_id: str | None
    saved_at: float
    next_id: _Index
    model: str
    identity: ModelIdentity
    tokenizer: str
    clock: datetime | None
    strategy: str
    style: ErratumStyle
    mode: ErratumMode
    scorecard: Scorecard | None
    num_seam_tokens: _Index
    splice: SplicePolicy
    template: PromptTemplate
    values: dict[str, str]
    previous: dict[str, str]
    waiting: tuple[OperationRecord, ...]
    runs: tuple[RunRecord, ...]
    layout: tuple[ViewRecord, ...]
    sources: tuple[SourceRecord, ...]
    blocks: tuple[Block, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache that was saved."""
        return sum(view.source_stop - view.source_start for view in self.layout)


@dataclass(frozen=True, slots=True)
class Restored:
    """A conversation that was loaded.

    Args:
        talk: The conversation.
        record: What it was saved as.
        lost: Why its cache could not be put together again; "" if it was.
    """

    talk: Conversation
    record: SavedSession
    lost: str = ""


# -- saving --------------------------------------------------------------------------------


def save(
    talk: Conversation, store: KVStore, *, id: str, parent_id: str | None, next_id: int
) -> SavedSession:
    """Save a conversation; nothing of it changes.

    Raises:
        EngineError: A stream of it is open.
        StorageError: The store has no folder, or the disk is full: the last save is still there.
    """
    if not _ID.fullmatch(id):
        raise StorageError(
            f"{id[:80]!r} is no id of a session", hint="use letters, digits, _ and -"
        )
    if talk.busy:
        raise EngineError(
            "a stream of this session is still open", hint="finish or close it before saving"
        )
    known = [saved for name in (id, parent_id) if name and (saved := _read(store, name))]
    lineage = _Lineage()
    sources: list[SourceRecord] = []
    views: list[ViewRecord] = []
    if talk.live is not None:
        pieces = [run for saved in known for run in _own_runs(saved)]
        for view in talk.live.cache.layout:
            keeps = talk.model.engine.abilities.holds_kv
            for part, source in _stored(talk.live.cache, view, store, pieces, keeps=keeps):
                views.append(lineage.view(part))
                if source is not None:
                    sources.append(source(lineage.run(part.run)))
    record = SavedSession(
        id=id,
        parent_id=parent_id,
        saved_at=time.time(),
        next_id=next_id,
        model=talk.model.name,
        identity=talk.model.engine.identity,
        tokenizer=talk.tokenizer.identity,
        clock=talk.tokenizer.clock if talk.tokenizer.has_chat_template else None,
        strategy=talk.strategy,
        style=talk.style,
        mode=talk.mode,
        scorecard=talk.scorecard,
        num_seam_tokens=talk.planner.num_seam_tokens,
        splice=talk.planner.splice,
        template=talk.base.template,
        values=dict(talk.base.values),
        previous=dict(talk.previous),
        waiting=tuple(map(_operation_record, talk.waiting)),
        runs=tuple(lineage.records),
        layout=tuple(views),
        sources=tuple({source.run: source for source in sources}.values()),
        blocks=talk.live.blocks if talk.live else (),
    )
    store.sessions.write(id, record.model_dump_json().encode())
    return record


class _Lineage:
    """Numbers runs so that each stands behind those it depends on."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self._numbers: dict[Run, int] = {}

    def run(self, run: Run) -> int:
        if run not in self._numbers:
            context = tuple(self.view(view) for view in run.context)
            self._numbers[run] = len(self.records)
            self.records.append(
                RunRecord(
                    token_ids=run.token_ids, start=run.start, context=context, altered=run.altered
                )
            )
        return self._numbers[run]

    def view(self, view: Reuse) -> ViewRecord:
        return ViewRecord(
            run=self.run(view.run),
            source_start=view.source_start,
            source_stop=view.source_stop,
            target_start=view.target_start,
        )


def _stored(
    cache: KVCache, view: Reuse, store: KVStore, pieces: Sequence[Run], *, keeps: bool
) -> list[tuple[Reuse, Any]]:
    """Make sure that the K/V of a view are in the store.

    Returns:
        Views that together are this one, each with what makes its source's record from the
        number of its run; no such thing where a server keeps the K/V.
    """
    if not keeps:
        return [(view, None)]
    segment = cache.source(view.run)
    key = store.has(segment.identity, view.run)
    if key is not None:
        facts = {"kind": "segment", "key": key, "preamble_ids": segment.preamble_ids}
        return [(view, _source(facts))]
    result = []
    for start, stop in _cuts(view.run, pieces):
        low, high = max(start, view.source_start), min(stop, view.source_stop)
        if low >= high:
            continue
        part = _slice(segment, start, stop)
        at = view.target_start + low - view.source_start
        facts = {"kind": "run", "key": store.put_run(part)}
        result.append((Reuse(part.run, low - start, high - start, at), _source(facts)))
    return result


def _source(facts: dict[str, Any]) -> Any:
    return lambda run: SourceRecord(run=run, **facts)


def _cuts(run: Run, pieces: Sequence[Run]) -> list[tuple[int, int]]:
    """Cut a run where pieces of it that were saved before end; the rest is one piece more."""
    cuts: list[tuple[int, int]] = []
    done = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, -len(piece))):
        start = piece.start - run.start
        stop = start + len(piece)
        if start == done and stop <= len(run) and run.cut(start, stop) == piece:
            cuts.append((start, stop))
            done = stop
    if done < len(run):
        cuts.append((done, len(run)))
    return cuts if len(cuts) <= MAX_PIECES else [(0, len(run))]


def _slice(segment: KVSegment, start: int, stop: int) -> KVSegment:
    return KVSegment(
        segment.run.cut(start, stop),
        segment.identity,
        segment.part(start, stop),
    )


def _own_runs(saved: SavedSession) -> list[Run]:
    runs = _runs(saved)
    return [runs[source.run] for source in saved.sources if source.kind == "run"]


def _operation_record(operation: Operation) -> OperationRecord:
    name = next(name for name, kind in _OPERATIONS.items() if isinstance(operation, kind))
    change = TypeAdapter(type(operation)).dump_python(operation, mode="json")
    return OperationRecord(op=name, change=change)


# -- loading -------------------------------------------------------------------------------


def load(model: Model, store: KVStore, id: str) -> Restored:
    """Load a conversation and put its cache together again.

    Where files of its cache are gone or damaged, the conversation is loaded without a cache
    and the next turn computes it: nothing but time is lost, and `lost` says why.

    Raises:
        StorageError: No session of this id.
        SpecMismatchError: Another model or tokenizer; the message names what differs.
        SegmentFormatError: The record is damaged.
    """
    record = find(store, id)
    model.engine.identity.check_same(record.identity, f"session {id!r}")
    if record.tokenizer != model.tokenizer.for_session(record.style).identity:
        raise SpecMismatchError(
            f"session {id!r} was saved with another tokenizer or chat template (SHA-256 "
            f"{record.tokenizer[:12]}, here {model.tokenizer.identity[:12]})",
            hint="load the model with the chat template it was saved with",
        )
    planner = Planner(model, num_seam_tokens=record.num_seam_tokens, splice=record.splice)
    talk = Conversation(
        model,
        PromptState(record.template, dict(record.values)),
        planner,
        strategy=record.strategy,
        style=record.style,
        mode=record.mode,
        scorecard=record.scorecard,
        clock=record.clock,
    )
    talk.previous = dict(record.previous)
    talk.waiting = tuple(map(_operation, record.waiting))
    if planner.splices:
        talk.compile(talk.folded(None))
    lost = ""
    try:
        talk.live = _live(model, store, record)
    except (SegmentFormatError, StorageError) as error:
        lost = talk.lost = f"the saved cache is lost: {error.message}"
    return Restored(talk, record, lost)


def find(store: KVStore, id: str) -> SavedSession:
    """Return the record of a saved session.

    Raises:
        StorageError: No session of this id.
        SegmentFormatError: It is damaged.
    """
    record = _read(store, id)
    if record is None:
        raise StorageError(
            f"no saved session {id!r} in {store.sessions.folder}",
            hint=nearest(id, store.sessions.names()),
        )
    return record


def listed(store: KVStore) -> list[SavedSession]:
    """Return all saved sessions, the latest first."""
    found = (_read(store, name) for name in store.sessions.names())
    return sorted((r for r in found if r is not None), key=lambda r: -r.saved_at)


def remove(store: KVStore, id: str) -> None:
    """Remove a saved session; K/V that no other one needs go with the next prune.

    Raises:
        StorageError: No session of this id.
    """
    find(store, id)
    store.sessions.remove(id)


def referenced_runs(store: KVStore) -> set[str]:
    """Return the keys of all runs that saved sessions need."""
    return {s.key for saved in listed(store) for s in saved.sources if s.kind == "run"}


def _read(store: KVStore, id: str) -> SavedSession | None:
    if not _ID.fullmatch(id):
        return None
    content = store.sessions.read(id)
    if content is None:
        return None
    where = f"the record of session {id!r}"
    try:
        record = SavedSession.model_validate_json(content)
    except (ValidationError, KVNotesError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SegmentFormatError(
            f"{where} is damaged or of another format: {reason}",
            hint="upgrade kvnotes, or start the conversation again",
        ) from error
    if record.id != id:
        raise SegmentFormatError(
            f"{where} is that of {record.id!r}", hint="it was renamed: give it its name back"
        )
    return record


def _live(model: Model, store: KVStore, record: SavedSession) -> Live | None:
    """Put the cache together from its sources, all of it reused."""
    if not record.layout:
        return None
    runs = _runs(record)
    segments = [_loaded(model, store, source, runs[source.run]) for source in record.sources]
    found = {source.run for source in record.sources}
    elsewhere = [model.engine.recalled(runs[v.run]) for v in record.layout if v.run not in found]
    segments += [segment for segment in elsewhere if segment is not None]
    layout = tuple(
        Reuse(runs[v.run], v.source_start, v.source_stop, v.target_start) for v in record.layout
    )
    ids = tuple(token for view in layout for token in view.token_ids)
    execution = model.engine.execute(Plan(ids, layout, "restore"), segments=segments)
    return Live(execution.cache, record.blocks)


def _loaded(model: Model, store: KVStore, source: SourceRecord, run: Run) -> KVSegment:
    if source.kind == "run":
        held = store.get_run(source.key, run)
        # as a view of memory of its own: what is copied from there joins what stands beside it
        return Buffer(held.tensors).segment(run, 0, held.identity)
    found = store.find(model.engine.identity, run)
    if found is not None:
        return found
    if run.altered:
        raise StorageError(
            f"segment {source.key[:12]} ({run.altered}) is not in the store any more",
            hint="pull or compile it again",
        )
    return model.engine.compile(run.token_ids, source.preamble_ids)


def _runs(record: SavedSession) -> list[Run]:
    runs: list[Run] = []
    for entry in record.runs:
        if any(view.run >= len(runs) for view in entry.context):
            raise SegmentFormatError(
                f"the record of session {record.id!r} has a run that saw a later one",
                hint="it is damaged; start the conversation again",
            )
        context: Layout = tuple(
            Reuse(runs[v.run], v.source_start, v.source_stop, v.target_start) for v in entry.context
        )
        runs.append(Run(entry.token_ids, entry.start, context, entry.altered))
    return runs


def _operation(record: OperationRecord) -> Operation:
    kind = _OPERATIONS.get(record.op)
    if kind is None:
        raise SegmentFormatError(
            f"a saved session has the waiting change {record.op!r}", hint="upgrade kvnotes"
        )
    operation: Operation = TypeAdapter(kind).validate_python(record.change)
    return operation

"""The gate: proof, per model, that moving and recomputing K/V are exact.

Owns what is compared at which lengths, the report, and where it is remembered. Every
case is judged by a forward that shares no cache, no rotation and no executor with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import kvnotes
from kvnotes.engine.base import Engine, Execution, Executor, engine_versions
from kvnotes.errors import StorageError, UnsupportedModelError
from kvnotes.fidelity import LOAD_TOLERANCE, compare, mask_reference
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep, plan_without
from kvnotes.rope import Rotary
from kvnotes.settings import load_settings
from kvnotes.store.atomic import write_file

NUM_SHORT = 22
"""Tokens of the gate's short round: every case, each judged alone."""

NUM_BEYOND = 32
"""Tokens past a window or a chunk in the long round."""

NUM_SEGMENT = 10
NUM_TAIL = 6

DISTANCE_TOKENS = 512
"""The tolerance grows by its own size for each so many tokens: models round the angle of a
position to 6e-8 of itself, so what is rotated by one angle and what by the difference of two part
with the distance (Gemma-3-270M: 1.1e-5 at 545 tokens, unrotated 1e-2 and more)."""

CONTROL_FACTOR = 1000.0
"""How much worse a splice without rotation must be in float32: else the gate proves nothing."""

EXACT_ALLOWED = 1e-4
"""Tolerances up to this leave room for `CONTROL_FACTOR`; rounding in half precision does not."""

GAP_FLOOR = 1e-7
"""Gaps below this count as this: rounding of the logits themselves."""

REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class GateRow:
    """One comparison.

    Args:
        case: What was done: `prefill`, `splice`, `recompute`, `delete`, `longer`, `edits`; `image`:
            an image was spliced.
        num_tokens: Length of the prompt.
        gap: Largest difference of the logits, relative to the largest one.
        allowed: Largest gap that is allowed; 0 for a dtype that nobody has measured.
    """

    case: str
    num_tokens: int
    gap: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the gap is a number and allowed."""
        return self.gap <= self.allowed


@dataclass(frozen=True, slots=True)
class GateReport:
    """What the gate found out about one model.

    Args:
        model_type: The architecture's name.
        fingerprint: The model.
        rows: The comparisons.
        control: Gap of a splice whose keys are not rotated; None where nothing is rotated.
        versions: Names and versions of what computed it.
    """

    model_type: str
    fingerprint: str
    rows: tuple[GateRow, ...]
    control: float | None
    versions: tuple[tuple[str, str], ...]

    @property
    def worst(self) -> float:
        """The largest gap; not a number if one of them is none."""
        return max((row.gap for row in self.rows), key=lambda gap: (math.isnan(gap), gap))

    @property
    def passed(self) -> bool:
        """Whether everything is exact, and the comparison can tell."""
        return all(row.passed for row in self.rows) and self.telling

    @property
    def telling(self) -> bool:
        """Whether a splice that is not rotated is found to be wrong.

        Asked in float32 alone: a few tokens moved by a few positions differ by less than
        rounding in half precision. There the proof of the rotation is the probe at load,
        which compares K/V themselves, and far apart.
        """
        if self.control is None or any(row.allowed > EXACT_ALLOWED for row in self.rows):
            return True
        return self.control > CONTROL_FACTOR * max(self.worst, GAP_FLOOR)

    def require(self) -> None:
        """Refuse the model if a gap is above its tolerance.

        Raises:
            UnsupportedModelError: Names the case, its gap and what is allowed.
        """
        failed = [row for row in self.rows if not row.passed]
        if not failed and self.telling:
            return
        if not failed:
            raise UnsupportedModelError(
                f"on model type {self.model_type!r} a splice without rotation is off by "
                f"{self.control:.1e} of the logit scale, one with it by {self.worst:.1e}: the gate "
                "cannot tell them apart",
                hint="load the model in float32, where rounding hides nothing",
            )
        named = "; ".join(
            f"{row.case} of {row.num_tokens} tokens by {row.gap:.1e}" for row in failed[:3]
        )
        raise UnsupportedModelError(
            f"on model type {self.model_type!r} edited K/V differ from a masked forward ({named} "
            f"of the logit scale, allowed are {failed[0].allowed:.0e})",
            hint="this model's K/V cannot be moved exactly; use it without splices and edits: an "
            "erratum can still be sent as text",
        )


def run_gate(engine: Engine) -> GateReport:
    """Compare splices and edits with masked forwards, at the lengths that the spec asks for."""
    rows = [row for length in _lengths(engine) for row in _round(engine, length)]
    return GateReport(
        engine.spec.model_type,
        engine.fingerprint,
        tuple(rows),
        _control(engine),
        _versions(),
    )


def check_gate(engine: Engine) -> GateReport:
    """Return the report of a model: the one that is remembered, or a new one.

    Raises:
        UnsupportedModelError: A gap is above its tolerance.
    """
    found = _remembered(engine)
    if found is None:
        found = run_gate(engine)
        if found.passed:
            _remember(found)
    found.require()
    return found


# -- the cases -------------------------------------------------------------------------------


def _lengths(engine: Engine) -> list[int]:
    """The short length, and one past every window and chunk that the model's context has."""
    longest = engine.spec.max_positions - 1  # an edit adds a token
    windows = {layer.window for layer in engine.spec.layers if 0 < layer.window < longest}
    return [min(NUM_SHORT, longest), *sorted(min(w + NUM_BEYOND, longest) for w in windows)]


def _round(engine: Engine, length: int) -> Iterator[GateRow]:
    """Yield the comparisons at one length."""
    allowed = LOAD_TOLERANCE.get(engine.spec.dtype, 0.0) * (1 + length // DISTANCE_TOKENS)
    ids = _ids(engine, length)
    whole = engine.prefill(ids)
    own = compare(whole.last_logits(), engine.own_forward(ids)).max_logit_gap
    yield GateRow("prefill", length, own, allowed)
    if length < NUM_SHORT:
        return
    spliced = _spliced(engine, ids, whole)
    if length == NUM_SHORT or engine.spec.chunk_size:
        yield GateRow("splice", length, _gap(engine, spliced), allowed)
    if length == NUM_SHORT and not engine.copies_because:
        copied = _spliced(engine, ids, whole, "copy")
        yield GateRow("copy", length, _gap(engine, copied), allowed)
    image = engine.probe_image() if length == NUM_SHORT else None
    if image is not None:
        found = _with_image(engine, ids, image)
        yield GateRow("image", found.cache.length, _gap(engine, found), allowed)
    for case, edited in _edits(engine, spliced, long=length > NUM_SHORT):
        yield GateRow(case, len(edited.cache.token_ids), _gap(engine, edited), allowed)


def _ids(engine: Engine, length: int) -> tuple[int, ...]:
    size = engine.spec.vocab_size
    step = max(1, size // 32)
    return tuple((7 + i * step + i // 32) % size for i in range(length))


def _spliced(
    engine: Engine, ids: tuple[int, ...], whole: Execution, executor: Executor = "view"
) -> Execution:
    """Put a compiled segment behind all but the last tokens, one seam token computed.

    Every case is read where it stands, if the model can, however short it is.
    """
    place = len(ids) - NUM_SEGMENT - NUM_TAIL
    chunk = engine.spec.chunk_size
    if chunk and len(ids) > chunk:
        place = chunk  # the segment begins a chunk, as where it was compiled
    segment = engine.compile(ids[place : place + NUM_SEGMENT])
    splice = Splice("probe", segment.run, 0, NUM_SEGMENT, place)
    ideal = plan_compose(ids, [splice], num_seam_tokens=1)
    plan = plan_keep(whole.cache.layout, [Match(0, 0, place)], ideal, strategy="compose")
    return engine.execute(plan, base=whole.cache, segments=[segment], executor=executor)


def _with_image(engine: Engine, ids: tuple[int, ...], image: tuple[int, ...]) -> Execution:
    """Splice a compiled image into text."""
    segment = engine.compile(image)
    whole = (*ids[:NUM_SEGMENT], *image, *ids[NUM_SEGMENT:])
    splice = Splice("image", segment.run, 0, len(image), NUM_SEGMENT)
    plan = plan_compose(whole, [splice], num_seam_tokens=0)
    return engine.execute(plan, segments=[segment], executor="view")


def _edits(engine: Engine, spliced: Execution, *, long: bool) -> Iterator[tuple[str, Execution]]:
    """Yield edits of a spliced cache; one that does all of them where it is long."""
    ids = spliced.cache.token_ids
    size = len(ids)
    new = (ids[3] + 1) % engine.spec.vocab_size
    notes = (6, size - NUM_SEGMENT, size - NUM_SEGMENT + 3)
    same = _Edit(ids, (Match(0, 0, size),), notes)
    cut = _Edit((*ids[:4], *ids[5:]), (Match(0, 0, 4), Match(5, 4, size - 5)))
    grown = _Edit((*ids[:3], new, new, *ids[4:]), (Match(0, 0, 3), Match(4, 5, size - 4)))
    cases = {"recompute": same, "delete": cut, "longer": grown}
    if long:
        cases = {"edits": replace(grown, notes=notes)}
    for case, edit in cases.items():
        plan = plan_keep(
            spliced.cache.layout,
            edit.matches,
            Plan.prefill(edit.token_ids),
            strategy="selective",
            recompute=edit.notes,
        )
        plan = plan_without(plan, engine.unmovable(plan), "unmovable")
        yield case, engine.execute(plan, base=spliced.cache, executor="view")


@dataclass(frozen=True, slots=True)
class _Edit:
    """The tokens after an edit, what may be kept for them, and what is computed all the same."""

    token_ids: tuple[int, ...]
    matches: tuple[Match, ...]
    notes: tuple[int, ...] = ()


def _gap(engine: Engine, execution: Execution) -> float:
    reference = mask_reference(engine, execution.cache.layout)
    return compare(execution.last_logits(), reference).max_logit_gap


def _control(engine: Engine) -> float | None:
    """Return the gap of a splice whose keys stay as they were rotated."""
    if not engine.rotaries or engine.spec.max_positions < NUM_SHORT:
        return None
    own = engine.rotaries
    ids = _ids(engine, NUM_SHORT)
    try:
        engine.rotaries = tuple(_still(rotary) for rotary in own)
        return _gap(engine, _spliced(engine, ids, engine.prefill(ids)))
    finally:
        engine.rotaries = own


def _still(rotary: Rotary) -> Rotary:
    """Return a rotary embedding that turns nothing."""
    width = rotary.spec.rotary_dim // 2

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(len(positions), width), torch.zeros(len(positions), width)

    return Rotary(rotary.spec, table)


# -- what is remembered ----------------------------------------------------------------------


def _versions() -> tuple[tuple[str, str], ...]:
    return (*engine_versions(), ("kvnotes", kvnotes.__version__))


def _path(fingerprint: str) -> Path:
    return load_settings().home / "gates" / f"{fingerprint}.json"


def _remembered(engine: Engine) -> GateReport | None:
    """Return the report that these very versions have made."""
    try:
        facts = json.loads(_path(engine.fingerprint).read_text(encoding="utf-8"))
        if facts.pop("version") != REPORT_VERSION:
            return None
        facts["rows"] = tuple(GateRow(**row) for row in facts["rows"])
        facts["versions"] = tuple((name, version) for name, version in facts["versions"])
        found = GateReport(**facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    current = replace(found, fingerprint=engine.fingerprint, versions=_versions())
    return found if found == current and found.rows and found.passed else None


def _remember(found: GateReport) -> None:
    """Keep a report; a folder that cannot be written costs time, not correctness."""
    text = json.dumps({"version": REPORT_VERSION, **asdict(found)}, indent=1)
    with suppress(StorageError):
        write_file(_path(found.fingerprint), text.encode())

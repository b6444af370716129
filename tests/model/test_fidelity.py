"""References and reports: the oracle against a naive one, floors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers_laws import BEARTYPE_IN_STRATEGIES, Naive, Slot, laws
from helpers_models import (
    MODELS,
    engine,
    logits_of,
    plain_logits,
    relative_gap,
    tokens,
)
from helpers_world import GAP, World
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvnotes.engine import execute, runner
from kvnotes.engine.base import Engine
from kvnotes.engine.slots import CacheForm
from kvnotes.fidelity import (
    compare,
    floor_of,
    mask_reference,
)
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep
from kvnotes.rope import Rotary

IDS = tokens(24)

KL_FLOOR = 1e-9
"""KL divergence of two exact computations in float32, in nats: the square of rounding."""


# -- mask_reference ------------------------------------------------------------------------


def naive_reference(engine_: Engine, naive: Naive, slots: tuple[Slot, ...]) -> Tensor:
    """The logits after the last slot, by one forward with a row for every token ever computed.

    Knows no runs: each row sees exactly the rows that `Naive` wrote down for it, shifted with
    the token that saw them.
    """
    rows: dict[tuple[int, int], int] = {}
    order: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
    computed = {number: key for key, number in naive.known().items()}

    def add(number: int, position: int) -> int:
        if (number, position) not in rows:
            token_id, own, seen = computed[number]
            shift = position - own
            sees = tuple((other, place + shift) for other, place in seen)
            for other in sees:
                add(*other)
            rows[number, position] = len(order)
            order.append((token_id, position, sees))
        return rows[number, position]

    last = add(*slots[-1])
    visible = torch.eye(len(order), dtype=torch.bool)
    for row, (_, _, sees) in enumerate(order):
        for other in sees:
            visible[row, rows[other]] = True
    positions = torch.tensor([position for _, position, _ in order])
    positions -= min(0, int(positions.min()))
    ids = [token_id for token_id, _, _ in order]
    return engine_.masked_forward(ids, positions, visible, [last])[0]


@BEARTYPE_IN_STRATEGIES
@laws(25)
@given(data=st.data())
def test_the_mask_reference_is_a_forward_in_which_every_token_sees_what_it_saw(
    data: st.DataObject,
) -> None:
    world = World(data)
    world.compile()
    item = world.compose()
    for _ in range(data.draw(st.integers(1, 3), label="edits")):
        doing = data.draw(st.sampled_from([world.edit, world.refresh, world.append]))
        item = doing() or item
    naive = Naive()
    slots = naive.layout(item.cache.layout)
    reference = mask_reference(engine(), item.cache.layout)
    assert relative_gap(reference, naive_reference(engine(), naive, slots)) < GAP


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_reference_of_a_prefill_is_the_models_own_forward(name: str) -> None:
    layout = Plan.prefill(IDS).layout
    own = plain_logits(engine(name).model, IDS)
    assert relative_gap(mask_reference(engine(name), layout), own) < GAP


def test_the_mask_reference_runs_no_cache_and_no_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = engine().compile(IDS[6:16])
    plan = plan_compose(IDS, [Splice("s", segment.run, 0, 10, 6)])
    for name in ("execute", "_compute"):
        monkeypatch.setattr(type(engine()), name, None)
    monkeypatch.setattr(runner, "slot_layers", None)
    monkeypatch.setattr(CacheForm, "cache", None)
    mask_reference(engine(), plan.layout)


def wrong_moves() -> dict[str, object]:
    """Ways to get the keys of a splice wrong."""

    def unrotated(layers, turn, spec, outs):  # type: ignore[no-untyped-def]
        for keys, out in zip(layers, outs, strict=True):
            out.copy_(keys)

    right = execute.turn_keys

    def backwards(layers, turn, spec, outs):  # type: ignore[no-untyped-def]
        right(layers, type(turn)(turn.cos, -turn.sin), spec, outs)

    def late(layers, turn, spec, outs):  # type: ignore[no-untyped-def]
        right(layers, type(turn)(turn.cos.roll(1, 0), turn.sin.roll(1, 0)), spec, outs)
        for out in outs:
            out[:, :1] *= 1.01

    return {"not rotated": unrotated, "backwards": backwards, "one token scaled": late}


@pytest.mark.parametrize("name", wrong_moves())
def test_the_mask_reference_notices_keys_that_are_moved_wrongly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = engine().compile(IDS[6:16])
    plan = plan_compose(IDS, [Splice("s", segment.run, 0, 10, 6)])
    right = engine().execute(plan, segments=[segment], executor="copy")
    monkeypatch.setattr(execute, "turn_keys", wrong_moves()[name])
    wrong = engine().execute(plan, segments=[segment], executor="copy")
    reference = mask_reference(engine(), plan.layout)
    assert relative_gap(right.last_logits(), reference) < GAP
    assert relative_gap(wrong.last_logits(), reference) > 10 * GAP


@pytest.mark.parametrize(
    "change", [lambda matrix: torch.eye(len(matrix)), lambda matrix: matrix.mT], ids=["not", "back"]
)
def test_the_mask_reference_notices_queries_that_are_turned_wrongly(
    change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = engine().compile(IDS[6:16])
    plan = plan_compose(IDS, [Splice("s", segment.run, 0, 10, 6)])
    right, own = engine().execute(plan, segments=[segment]), Rotary.back
    monkeypatch.setattr(Rotary, "back", lambda self, *move: change(own(self, *move)))
    wrong = engine().execute(plan, segments=[segment])
    reference = mask_reference(engine(), plan.layout)
    assert relative_gap(right.last_logits(), reference) < GAP
    assert relative_gap(wrong.last_logits(), reference) > 10 * GAP


def test_the_mask_reference_notices_a_token_that_saw_too_much() -> None:
    # a segment compiled behind its prefix, claimed to have been compiled alone
    claimed = engine().compile(IDS[6:16])
    seen = engine().compile(IDS[6:16], IDS[:6])
    plan = plan_compose(IDS, [Splice("s", claimed.run, 0, 10, 6)], num_seam_tokens=0)
    forged = type(claimed)(claimed.run, claimed.identity, seen.tensors)
    execution = engine().execute(plan, segments=[forged])
    assert relative_gap(execution.last_logits(), mask_reference(engine(), plan.layout)) > 10 * GAP


def test_a_long_history_of_edits_has_a_mask_reference() -> None:
    # lineage nests once per edit; a reference that recursed into it would run out of stack
    cache = engine().prefill(IDS[:6]).cache
    for turn in range(400):
        ids = (*cache.token_ids[:2], turn % 80, *cache.token_ids[3:5], turn % 70)
        matches = [Match(0, 0, 2), Match(3, 3, 2)]
        plan = plan_keep(cache.layout, matches, Plan.prefill(ids), strategy="refresh")
        execution = engine().execute(plan, base=cache, consume=True)
        cache = execution.cache
    gap = relative_gap(execution.last_logits(), mask_reference(engine(), cache.layout))
    assert gap < GAP


# -- compare -------------------------------------------------------------------------------


def test_equal_logits_have_no_distance() -> None:
    logits = torch.tensor([1.0, -2.0, 3.0])
    report = compare(logits, logits)
    assert (report.top1_agree, report.kl_nats, report.max_logit_gap) == (True, 0.0, 0.0)
    assert report.cosine == pytest.approx(1.0)
    assert report.floor_kl_nats is None and report.floor_max_kl_nats is None


def test_kl_is_of_the_reference_from_ours_in_nats() -> None:
    ours, reference = torch.tensor([0.0, math.log(3)]), torch.tensor([0.0, 0.0])
    report = compare(ours, reference + 7)  # a constant shift is no difference
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert report.kl_nats == pytest.approx(expected)
    assert not report.top1_agree
    assert compare(reference, ours).kl_nats != pytest.approx(expected)


def test_the_largest_gap_is_relative_to_the_largest_reference_logit() -> None:
    report = compare(torch.tensor([9.0, -19.0]), torch.tensor([10.0, -20.0]))
    assert report.max_logit_gap == pytest.approx(1 / 20)


def test_the_floor_is_reported_beside_the_distance() -> None:
    logits = torch.tensor([1.0, 2.0])
    report = compare(logits, logits, (3e-9, 1e-9, 2e-9))
    assert (report.floor_kl_nats, report.floor_max_kl_nats) == (2e-9, 3e-9)


# -- floors and the check at load ------------------------------------------------------------


def test_a_floor_compares_prefix_hits_at_exactly_these_cuts() -> None:
    whole = engine().prefill(IDS)
    before = whole.cache.checksum()
    distances = floor_of(engine(), whole, [5, 11, 23])
    assert len(distances) == 3
    assert max(distances) < KL_FLOOR
    assert whole.cache.checksum() == before
    assert torch.equal(whole.last_logits(), logits_of(engine(), IDS))

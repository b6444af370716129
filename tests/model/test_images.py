"""Images: compiled once, spliced anywhere on three axes, and never taken for one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers_images import (
    END_ID,
    IMAGE_ID,
    START_ID,
    TYPES,
    patches,
    seeing_engine,
    seeing_model,
)
from helpers_models import relative_gap, tokens
from helpers_prompt import family_tokenizer
from torch import Tensor

import kvnotes
from kvnotes.engine.base import SamplingParams
from kvnotes.engine.hf import HFEngine
from kvnotes.errors import EngineError, PlanError, SegmentFormatError, UnsupportedModelError
from kvnotes.fidelity import MECHANICAL_TOLERANCE, mask_reference
from kvnotes.gate import run_gate
from kvnotes.plan import Match, Plan, Run, Splice, plan_compose, plan_keep
from kvnotes.rope import Rotary
from kvnotes.store import KVStore

GAP = MECHANICAL_TOLERANCE["float32"]
WIDE, TALL, SMALL = (1, 4, 8), (1, 8, 4), (1, 4, 4)
TEXT = tokens(40)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the models, about their processors
    pytest.mark.skipif(
        transformers.__version__.startswith("5.19."), reason="models take no features there"
    ),
]

each = pytest.mark.parametrize("name", TYPES)


def image(engine: HFEngine, grid: tuple[int, int, int] = WIDE, seed: int = 0) -> tuple[int, ...]:
    """The ids of an image between the tokens that announce it."""
    ids = engine.add_image(patches(engine.model, grid, seed), grid)
    return (START_ID, *ids, END_ID)


def own_logits(
    engine: HFEngine, ids: tuple[int, ...], pictures: list[tuple[Tensor, tuple[int, int, int]]]
) -> Tensor:
    """The model's own logits: its pixels, its placeholders, its positions."""
    with torch.inference_mode():
        output = engine.model(
            input_ids=torch.tensor([[IMAGE_ID if i < 0 else i for i in ids]]),
            mm_token_type_ids=torch.tensor([[int(i < 0) for i in ids]]),
            pixel_values=torch.cat([pixels for pixels, _ in pictures]),
            image_grid_thw=torch.tensor([grid for _, grid in pictures]),
            use_cache=False,
        )
    logits: Tensor = output.logits[0, -1].float()
    engine.model.model.rope_deltas = None
    return logits


@each
def test_the_gate_splices_text_and_an_image(name: str) -> None:
    card = run_gate(seeing_engine(name))
    card.require()
    assert "image" in {row.case for row in card.rows}


def test_an_image_that_is_turned_on_one_axis_alone_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Rotary.turn

    def flat(self: Rotary, source: Tensor, target: Tensor) -> Any:
        first = source if source.dim() == 1 else source[:1].expand_as(source)
        return right(self, first, target)

    monkeypatch.setattr(Rotary, "turn", flat)
    with pytest.raises(UnsupportedModelError, match="image of"):
        run_gate(seeing_engine("qwen2_5_vl")).require()


def test_a_folder_is_loaded(tmp_path: Any) -> None:
    seeing_model("qwen2_5_vl").save_pretrained(tmp_path)
    family_tokenizer("smollm2").save_pretrained(tmp_path)
    model = kvnotes.load(str(tmp_path))
    assert model.engine.prefill((1, 2, 3, *image(model.engine), 5)).last_logits().shape == (97,)


@each
def test_a_prefill_is_the_models_own(name: str) -> None:
    engine = seeing_engine(name)
    ids = (*TEXT[:5], *image(engine, WIDE), *TEXT[5:9], *image(engine, TALL, 1), *TEXT[9:14])
    pictures = [(patches(engine.model, grid, seed), grid) for grid, seed in ((WIDE, 0), (TALL, 1))]
    assert relative_gap(engine.prefill(ids).last_logits(), own_logits(engine, ids, pictures)) < GAP


@each
def test_an_image_is_compiled_once_and_spliced_at_another_position(name: str) -> None:
    engine = seeing_engine(name)
    part = image(engine)
    segment = engine.compile(part)
    ids = (*TEXT[:9], *part, *TEXT[9:15])
    plan = plan_compose(ids, [Splice("image", segment.run, 0, len(part), 9)], num_seam_tokens=1)
    seen = engine._images.num_seen  # type: ignore[union-attr]
    found = engine.execute(plan, segments=[segment])
    assert engine._images.num_seen == seen, "the vision tower ran"  # type: ignore[union-attr]
    reference = mask_reference(engine, found.cache.layout)
    assert relative_gap(found.last_logits(), reference) < GAP
    loop = engine.execute(plan, segments=[segment], executor="loop")
    assert relative_gap(loop.last_logits(), found.last_logits()) < GAP
    # what it saw differs from a prefill: the reference can tell
    assert relative_gap(engine.prefill(ids).last_logits(), reference) > 100 * GAP


@each
def test_edits_before_and_behind_an_image_are_exact(name: str) -> None:
    engine = seeing_engine(name)
    part = image(engine)
    cache = engine.prefill((*TEXT[:6], *part, *TEXT[6:12])).cache
    ids = cache.token_ids
    shorter = (*ids[:2], *ids[3:])
    matches = (Match(0, 0, 2), Match(3, 2, len(ids) - 3))
    plan = plan_keep(cache.layout, matches, Plan.prefill(shorter), strategy="refresh")
    found = engine.execute(plan, base=cache)
    assert relative_gap(found.last_logits(), mask_reference(engine, found.cache.layout)) < GAP
    longer = (*shorter[:3], 7, 8, *shorter[4:])
    matches = (Match(0, 0, 3), Match(4, 5, len(shorter) - 4))
    plan = plan_keep(found.cache.layout, matches, Plan.prefill(longer), strategy="refresh")
    again = engine.execute(plan, base=found.cache)
    assert relative_gap(again.last_logits(), mask_reference(engine, again.cache.layout)) < GAP


@each
def test_text_behind_an_image_of_another_shape_does_not_stay(name: str) -> None:
    engine = seeing_engine(name)
    wide, small = image(engine, WIDE), image(engine, (1, 2, 16), 2)
    assert len(wide) == len(small), "as many tokens, another width"
    cache = engine.prefill((*TEXT[:4], *wide, *TEXT[4:12])).cache
    ids = (*TEXT[:4], *small, *TEXT[4:12])
    size = len(wide)
    kept = (Match(0, 0, 4), Match(4 + size, 4 + size, 8))
    plan = plan_keep(cache.layout, kept, Plan.prefill(ids), strategy="refresh")
    with pytest.raises(PlanError, match="an image of another shape now stands before them"):
        engine.execute(plan, base=cache)
    same = image(engine, WIDE, 3)
    swapped = (*TEXT[:4], *same, *TEXT[4:12])
    plan = plan_keep(cache.layout, kept, Plan.prefill(swapped), strategy="refresh")
    found = engine.execute(plan, base=cache)
    assert relative_gap(found.last_logits(), mask_reference(engine, found.cache.layout)) < GAP


@each
def test_a_spliced_text_behind_a_new_image_is_turned_again(name: str) -> None:
    """A moved segment that the base holds at these slots, at other positions."""
    engine = seeing_engine(name)
    wide, narrow = image(engine, WIDE), image(engine, (1, 2, 16), 2)
    segment = engine.compile(TEXT[20:32])

    def composed(part: tuple[int, ...]) -> Plan:
        start = 4 + len(part)
        ids = (*TEXT[:4], *part, *TEXT[20:32], *TEXT[:3])
        return plan_compose(ids, [Splice("text", segment.run, 0, 12, start)])

    first = engine.execute(composed(wide), segments=[segment])
    ideal = composed(narrow)
    behind_the_seam = 4 + len(wide) + 1
    matches = (Match(0, 0, 4), Match(behind_the_seam, behind_the_seam, 11))
    plan = plan_keep(first.cache.layout, matches, ideal, strategy="refresh")
    found = engine.execute(plan, base=first.cache, segments=[segment])
    assert relative_gap(found.last_logits(), mask_reference(engine, found.cache.layout)) < GAP
    assert relative_gap(found.last_logits(), first.last_logits()) > 100 * GAP


@each
def test_generation_and_choices_go_on_where_the_image_ends(name: str) -> None:
    engine = seeing_engine(name)
    ids = (*TEXT[:3], *image(engine), *TEXT[3:6])
    start = engine.prefill(ids)
    stream = engine.generate(start, SamplingParams(max_new_tokens=4))
    made = tuple(stream)
    for length in range(1, 4):
        again = engine.prefill((*ids, *made[:length])).last_logits()
        assert int(again.argmax()) == made[length]
    ideal = Plan.prefill((*stream.cache.token_ids, 5))
    whole = [Match(0, 0, stream.cache.length)]
    plan = plan_keep(stream.cache.layout, whole, ideal, strategy="refresh")
    grown = engine.execute(plan, base=stream.cache)
    cold = engine.execute(ideal)
    assert relative_gap(grown.last_logits(), cold.last_logits()) < GAP
    scores = engine.score(start, [(1, 2), (3, 4, 5)])
    for choice, score in zip([(1, 2), (3, 4, 5)], scores, strict=True):
        total = 0.0
        for index, token in enumerate(choice):
            logits = engine.prefill((*ids, *choice[:index])).last_logits()
            total += float(torch.log_softmax(logits, -1)[token])
        assert score == pytest.approx(total, abs=1e-4)


# -- who an image is -----------------------------------------------------------------------


def test_two_images_under_the_same_text_share_nothing() -> None:
    engine = seeing_engine("qwen2_5_vl")
    one, other = image(engine, WIDE, 0), image(engine, WIDE, 1)
    assert one == image(engine, WIDE, 0)
    assert not set(one[1:-1]) & set(other[1:-1])
    assert Run((*TEXT, *one)).digest != Run((*TEXT, *other)).digest
    cache = engine.prefill((*TEXT[:3], *one)).cache
    plan = plan_keep(cache.layout, [], Plan.prefill((*TEXT[:3], *other)), strategy="refresh")
    assert plan.tokens.reused == 0


def test_an_id_holds_62_bits_of_the_hash_and_an_image_more_than_128() -> None:
    engine = seeing_engine("qwen2_5_vl")
    ids = [i for seed in range(40) for i in image(engine, SMALL, seed)[1:-1]]
    assert len(set(ids)) == len(ids)
    assert all(-(1 << 62) <= i < 0 for i in ids)
    assert max(-i for i in ids).bit_length() > 60
    with pytest.raises(EngineError, match="of 2 tokens cannot be told from others"):
        image(engine, (1, 2, 4))


@pytest.mark.parametrize("grid", [(1, 4, 4), (2, 4, 8), (1, 1, 32), (0, 4, 8)])
def test_a_grid_that_does_not_fit_is_refused(grid: tuple[int, int, int]) -> None:
    engine = seeing_engine("qwen2_5_vl")
    with pytest.raises(EngineError, match="32 patches has no grid"):
        engine.add_image(patches(engine.model, WIDE, 0), grid)


def test_an_image_that_is_unknown_or_not_whole_is_refused() -> None:
    engine = seeing_engine("qwen2_5_vl")
    part = image(engine)
    with pytest.raises(EngineError, match="does not know"):
        engine.prefill((1, 2, -5, 3))
    for broken in ((*part[:4], *part[5:]), (*part[:3], 7, *part[3:]), (*part[2:],)):
        with pytest.raises(EngineError, match="does not stand there whole"):
            engine.prefill((*TEXT[:2], *broken, 1))


def test_a_model_without_a_vision_tower_takes_no_images() -> None:
    from helpers_models import engine as plain

    with pytest.raises(UnsupportedModelError, match="takes no images"):
        plain().add_image(torch.zeros(4, 4), (1, 2, 2))


def test_a_compiled_image_is_kept_in_memory_and_no_file_claims_its_tokens(tmp_path: Any) -> None:
    engine = seeing_engine("qwen2_5_vl")
    segment = engine.compile(image(engine))
    store = KVStore(tmp_path)
    with pytest.raises(SegmentFormatError):
        store.put(segment)
    assert store.find(engine.identity, segment.run) is segment
    assert store.entries() == []

"""The gate: what it compares, what must fail it, and what is remembered."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_matrix import CHUNK, WINDOW, tiny_model
from helpers_models import (
    MODELS,
    SHAPE,
    build,
    engine,
    engine_of,
    plain_logits,
    relative_gap,
    sharpen,
    tokens,
)
from transformers import LlamaConfig, LlamaForCausalLM

from kvnotes.engine import execute, masks
from kvnotes.engine.models import DTYPES
from kvnotes.errors import OutOfCacheError, PlanError, UnsupportedModelError
from kvnotes.fidelity import LOAD_TOLERANCE, MECHANICAL_TOLERANCE, mask_reference
from kvnotes.gate import (
    CONTROL_FACTOR,
    NUM_BEYOND,
    NUM_SHORT,
    GateReport,
    GateRow,
    check_gate,
    run_gate,
)
from kvnotes.plan import Match, Plan, Splice, plan_compose, plan_keep

GAP = MECHANICAL_TOLERANCE["float32"]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore")  # of models, about kernels they would rather have


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def cases(card: GateReport) -> set[str]:
    return {row.case for row in card.rows}


# -- what passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_decoder_passes_every_case(name: str) -> None:
    card = run_gate(engine(name))
    card.require()
    assert card.worst < GAP
    assert cases(card) == {"prefill", "splice", "copy", "delete", "longer", "recompute"}
    assert card.control is not None and card.control > CONTROL_FACTOR * card.worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_model_is_refused_for_the_rounding_of_half_precision(dtype: torch.dtype) -> None:
    for seed in range(6):
        run_gate(engine_of(build("qwen3-qknorm", seed, dtype))).require()


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "cohere2", "gpt_oss"])
def test_a_window_is_crossed(name: str) -> None:
    card = run_gate(engine_of(tiny_model(name)))
    card.require()
    assert ("edits", WINDOW + NUM_BEYOND + 1) in {(row.case, row.num_tokens) for row in card.rows}


def test_a_chunk_is_crossed_by_a_whole_chunk() -> None:
    card = run_gate(engine_of(tiny_model("llama4_text")))
    card.require()
    assert ("splice", CHUNK + NUM_BEYOND) in {(row.case, row.num_tokens) for row in card.rows}


# -- what fails ----------------------------------------------------------------------------


def unrotated(patch: Patch) -> None:
    def still(layers: Any, turn: Any, spec: Any, outs: Any) -> None:
        for keys, out in zip(layers, outs, strict=True):
            out.copy_(keys)

    patch.setattr(execute, "turn_keys", still)


def backwards(patch: Patch) -> None:
    right = execute.turn_keys

    def wrong(layers: Any, turn: Any, spec: Any, outs: Any) -> None:
        right(layers, type(turn)(turn.cos, -turn.sin), spec, outs)

    patch.setattr(execute, "turn_keys", wrong)


def without_window(patch: Patch) -> None:
    """Our passes see everything before a token; the model alone keeps its window."""
    right = masks._mask

    def wide(*args: Any, mask_function: Any = None, **kwargs: Any) -> Any:
        return right(*args, mask_function=masks.causal_mask_function, **kwargs)

    patch.setattr(masks, "_mask", wide)


def index_left_behind(patch: Patch) -> None:
    """The keys of the indexer stay where they were computed."""
    right = execute.place

    def place(view: Any, sources: Any, buffer: Any, rotaries: Any, **options: Any) -> None:
        right(view, sources, buffer, rotaries, **options)
        held = execute.find_source(view.run, sources).tensors["index"]
        first = options.get("slot", view.target_start)
        goal = buffer.part(first, first + view.num_tokens)["index"]
        for source, target in zip(held, goal, strict=True):
            target.copy_(source[:, view.source_start : view.source_stop])

    patch.setattr("kvnotes.engine.hf.place", place)


MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "not rotated": ("llama", unrotated),
    "rotated backwards": ("llama", backwards),
    "latent, not rotated": ("deepseek_v3", unrotated),
    "window dropped": ("gemma3_text", without_window),
    "window of all layers dropped": ("mistral", without_window),
    "chunks dropped": ("llama4_text", without_window),
    "indexer not moved": ("deepseek_v32", index_left_behind),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fails_the_gate(name: str, monkeypatch: Patch) -> None:
    model, mutate = MUTATIONS[name]
    whole = engine_of(tiny_model(model))
    run_gate(whole).require()
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"differ from a masked forward \(.* allowed"):
        run_gate(whole).require()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mutation_is_seen_in_every_dtype(dtype: torch.dtype, monkeypatch: Patch) -> None:
    unrotated(monkeypatch)
    with pytest.raises(UnsupportedModelError):
        run_gate(engine("llama-gqa", dtype)).require()


def test_a_gap_that_is_no_number_is_refused() -> None:
    card = run_gate(engine())
    for index in range(len(card.rows)):
        rows = list(card.rows)
        rows[index] = replace(rows[index], gap=math.nan)
        with pytest.raises(UnsupportedModelError, match="nan"):
            replace(card, rows=tuple(rows)).require()
        assert math.isnan(replace(card, rows=tuple(rows)).worst)


def test_a_dtype_that_nobody_has_measured_is_refused() -> None:
    assert not GateRow("splice", 22, 1e-9, 0.0).passed
    assert set(LOAD_TOLERANCE) == set(MECHANICAL_TOLERANCE) == set(DTYPES)


# -- what is remembered --------------------------------------------------------------------


def test_a_model_that_has_passed_is_not_measured_again(home: Path, monkeypatch: Patch) -> None:
    first = check_gate(engine())
    (file,) = (home / "gates").iterdir()
    assert file.name == f"{engine().fingerprint}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setattr("kvnotes.gate.run_gate", None)
    assert check_gate(engine()) == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: facts | {"version": 0},
        lambda facts: facts | {"versions": [["torch", "1.0"]]},
        lambda facts: facts | {"fingerprint": "0" * 64},
        lambda facts: facts | {"rows": []},
        lambda facts: facts | {"rows": [{**facts["rows"][0], "gap": 1.0}]},
        lambda facts: facts | {"more": 1},
        lambda facts: [],
    ],
)
def test_another_report_counts_for_nothing(home: Path, damage: Any) -> None:
    check_gate(engine())
    (file,) = (home / "gates").iterdir()
    good = file.read_text()
    file.write_text(json.dumps(damage(json.loads(good))))
    check_gate(engine())
    assert json.loads(file.read_text()) == json.loads(good)
    file.write_text(good[:40])
    check_gate(engine())
    assert json.loads(file.read_text()) == json.loads(good)


def test_a_model_that_fails_is_not_remembered(home: Path, monkeypatch: Patch) -> None:
    unrotated(monkeypatch)
    with pytest.raises(UnsupportedModelError):
        check_gate(engine())
    assert not (home / "gates").exists()


def test_a_home_that_is_a_file_costs_time_alone(home: Path) -> None:
    home.write_text("no folder")
    check_gate(engine()).require()


# -- layouts that other tests do not reach ---------------------------------------------------


def test_beyond_a_window_our_prefill_is_the_models_own() -> None:
    model = tiny_model("gemma3_text")
    ids = tokens(3 * WINDOW)
    own = plain_logits(model, ids)
    assert relative_gap(engine_of(model).prefill(ids).last_logits(), own) < GAP


def test_a_splice_beyond_a_window_is_exact_and_holds_all_tokens() -> None:
    whole = engine_of(tiny_model("gemma3_text"))
    ids = tokens(5 * WINDOW)
    segment = whole.compile(ids[10 : 10 + 3 * WINDOW])
    plan = plan_compose(ids, [Splice("s", segment.run, 0, 3 * WINDOW, 10)])
    found = whole.execute(plan, segments=[segment])
    assert sum(piece.num_tokens for piece in found.cache.pieces) == len(ids)
    assert relative_gap(found.last_logits(), mask_reference(whole, found.cache.layout)) < GAP
    loop = whole.execute(plan, segments=[segment], executor="loop")
    assert relative_gap(loop.last_logits(), found.last_logits()) < GAP


def test_a_move_across_a_chunk_is_refused_and_one_by_a_whole_chunk_is_not() -> None:
    whole = engine_of(tiny_model("llama4_text"))
    ids = tokens(4 * CHUNK)
    segment = whole.compile(ids[CHUNK : 2 * CHUNK + 4])

    def splice(target: int) -> Plan:
        size = segment.num_tokens
        target_ids = (*ids[:target], *segment.run.token_ids, *ids[:3])
        return plan_compose(target_ids, [Splice("s", segment.run, 0, size, target)])

    with pytest.raises(
        PlanError, match=f"attends in chunks of {CHUNK}, and only multiples"
    ) as caught:
        whole.execute(splice(CHUNK + 1), segments=[segment])
    assert "compute them instead" in caught.value.hint
    found = whole.execute(splice(CHUNK), segments=[segment])
    assert relative_gap(found.last_logits(), mask_reference(whole, found.cache.layout)) < GAP


def test_inside_of_the_first_chunk_any_move_is_exact() -> None:
    whole = engine_of(tiny_model("llama4_text"))
    cache = whole.prefill(tokens(CHUNK)).cache
    ids = (*cache.token_ids[:2], *cache.token_ids[3:])
    matches = (Match(0, 0, 2), Match(3, 2, CHUNK - 3))
    plan = plan_keep(cache.layout, matches, Plan.prefill(ids), strategy="refresh")
    found = whole.execute(plan, base=cache)
    assert relative_gap(found.last_logits(), mask_reference(whole, found.cache.layout)) < GAP


def _llama(rope: dict[str, Any]) -> Any:
    config = LlamaConfig(**{**SHAPE, "rope_parameters": rope})
    return LlamaForCausalLM(config)


def test_a_prompt_beyond_the_range_of_a_table_is_refused_with_the_reason() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = sharpen(_llama(rope | {"original_max_position_embeddings": 40}))
    whole = engine_of(model)
    run_gate(whole).require()
    assert whole.spec.max_positions == 40
    whole.prefill(tokens(40))
    with pytest.raises(OutOfCacheError, match="tables change with the length"):
        whole.prefill(tokens(41))


def test_a_deletion_in_the_first_chunk_of_a_longer_prompt_has_its_reference() -> None:
    whole = engine_of(tiny_model("llama4_text"))
    cache = whole.prefill(tokens(2 * CHUNK)).cache
    ids = (*cache.token_ids[:2], *cache.token_ids[3:])
    matches = (Match(0, 0, 2), Match(3, 2, CHUNK - 3))
    plan = plan_keep(cache.layout, matches, Plan.prefill(ids), strategy="refresh")
    found = whole.execute(plan, base=cache)
    assert relative_gap(found.last_logits(), mask_reference(whole, found.cache.layout)) < GAP


def test_a_window_that_never_takes_effect_costs_nothing() -> None:
    model = tiny_model("mistral")
    model.config.sliding_window = 1 << 18
    card = run_gate(engine_of(model))
    card.require()
    assert max(row.num_tokens for row in card.rows) == NUM_SHORT + 1


def test_a_gate_that_cannot_tell_is_no_proof() -> None:
    card = run_gate(engine())
    assert card.passed and card.control is not None
    blind = replace(card, control=CONTROL_FACTOR * card.worst / 2)
    assert not blind.passed
    with pytest.raises(UnsupportedModelError, match="cannot tell them apart"):
        blind.require()

"""The cost model measured at load: from four samples to numbers, also disturbed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_matrix import tiny_model
from helpers_models import MODELS, build, engine, engine_of

from kvnotes.engine import cost
from kvnotes.engine.cost import NUM_FEW, NUM_MANY, Passes, measure_cost
from kvnotes.engine.hf import PREFILL_CHUNK
from kvnotes.plan import CostModel, Plan


def measured(
    monkeypatch: pytest.MonkeyPatch, *, whole: float, few: float, many: float, share: float = 0.1
) -> CostModel:
    """A cost model from given times; attention and moves take none."""
    ran: list[int] = []

    def best(operation: Callable[[], object], repeats: int = 2) -> float:
        ran.clear()
        operation()
        return {NUM_FEW: few, NUM_MANY: many}[ran[0]] if ran else 0.0

    monkeypatch.setattr(cost, "_best_ms", best)
    passes = Passes(6, whole, ran.append, share, 512)
    spec = engine().spec
    return measure_cost(spec, engine().rotaries, torch.float32, passes, copies=True)


def test_tokens_cost_the_difference_of_two_passes_and_passes_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # all layers: 2 ms a token, and a pass of 6 tokens takes 50 ms
    size = NUM_MANY - NUM_FEW
    found = measured(monkeypatch, whole=50.0, few=3.0, many=3.0 + 0.1 * 2 * size)
    assert found.ms_per_token == pytest.approx(2.0)
    assert found.ms_per_pass == pytest.approx(50.0 - 6 * 2.0)
    assert found.tokens_per_pass == 512
    assert found.predict_ms(Plan.prefill((0,) * 6)) == pytest.approx(50.0)


@pytest.mark.parametrize("many", [0.01, 1.0, 2.9, 3.0])
def test_a_disturbed_measurement_makes_nothing_free(
    many: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(monkeypatch, whole=50.0, few=3.0, many=many)
    assert found.ms_per_token > 0
    assert found.ms_per_pass >= 25.0
    slow = measured(monkeypatch, whole=1.0, few=3.0, many=1000.0)
    assert slow.ms_per_pass > 0 and slow.ms_per_token > 0


def values(model: CostModel) -> list[float]:
    assert model.ms_per_moved_token == 0, "it is read where it stands"
    return [model.ms_per_token, model.ms_per_pair, model.ms_per_pass]


def test_moving_costs_something_where_it_is_copied() -> None:
    latent = engine_of(tiny_model("deepseek_v3"))
    assert latent.copies_because and latent.cost.ms_per_moved_token > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_cost_that_is_positive(name: str) -> None:
    found = engine(name).cost
    assert all(0 < value < float("inf") for value in values(found))
    assert found.tokens_per_pass == PREFILL_CHUNK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_its_own_type(dtype: torch.dtype) -> None:
    assert all(value > 0 for value in values(engine_of(build("llama-gqa", dtype=dtype)).cost))


def test_a_model_of_one_layer_is_measured_whole() -> None:
    from helpers_models import SHAPE, sharpen
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": 1}
    found = engine_of(sharpen(LlamaForCausalLM(LlamaConfig(**shape)))).cost
    assert all(value > 0 for value in values(found))


def test_the_first_layer_is_run_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine_of(build("llama-gqa"))
    ran: list[int] = []
    for index, layer in enumerate(ours.model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    ours._run_layer(9)
    assert ran == [0]

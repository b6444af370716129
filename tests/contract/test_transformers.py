"""Facts about transformers that the engine stands on; run under both ends of the range."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers_models import build, tokens
from transformers.cache_utils import Cache, DynamicLayer

IDS = tokens(16)
GAP = 1e-5  # rounding of another order of sums, relative to logits of about 3


def _cache_name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _forward(model: Any, **arguments: Any) -> Any:
    with torch.inference_mode():
        return model(**arguments)


def _additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[
        None, None
    ]


def test_the_cache_argument_has_one_of_two_names() -> None:
    names = inspect.signature(build("llama-gqa").forward).parameters
    assert ("cache" in names) != ("past_key_values" in names)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_additive_mask_means_the_same_to_every_kernel(attention: str) -> None:
    model = build("llama-gqa")
    model.set_attn_implementation(attention)
    plain = _forward(model, input_ids=torch.tensor([IDS]), use_cache=False).logits
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    masked = _forward(
        model, input_ids=torch.tensor([IDS]), attention_mask=_additive(causal), use_cache=False
    ).logits
    assert float((plain - masked).abs().max()) < GAP


def test_position_ids_move_the_rotation_and_nothing_else() -> None:
    model = build("llama-gqa")
    near, far = (
        _forward(
            model,
            input_ids=torch.tensor([IDS]),
            position_ids=torch.arange(16)[None] + start,
            attention_mask=_additive(torch.ones(16, 16, dtype=torch.bool).tril()),
            use_cache=False,
        ).logits
        for start in (0, 100)
    )
    assert float((near - far).abs().max()) < 10 * GAP  # angles of float32 positions


def test_a_cache_layer_of_ours_sees_new_keys_and_decides_what_attention_gets() -> None:
    class Recorder(DynamicLayer):
        seen = 0

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            Recorder.seen += key_states.shape[2]
            return super().update(key_states, value_states, *args, **kwargs)

    model = build("llama-gqa")
    cache = Cache(layers=[Recorder() for _ in range(model.config.num_hidden_layers)])
    arguments = {_cache_name(model): cache}
    _forward(model, input_ids=torch.tensor([IDS]), use_cache=True, **arguments)
    assert Recorder.seen == 16 * model.config.num_hidden_layers
    assert cache.layers[0].keys.shape[2] == 16


def test_chosen_rows_of_logits_can_be_asked_for() -> None:
    model = build("llama-gqa")
    ids = torch.tensor([IDS])
    whole = _forward(model, input_ids=ids, use_cache=False).logits
    rows = _forward(
        model, input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([3, 9])
    ).logits
    assert torch.allclose(rows[0], whole[0, [3, 9]], atol=GAP)
    last = _forward(model, input_ids=ids, use_cache=False, logits_to_keep=1).logits
    assert last.shape[1] == 1

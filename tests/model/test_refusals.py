"""Models whose cache cannot be edited exactly are refused at load, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers as tf
from helpers_models import SHAPE, build, engine_of, sharpen

from kvnotes.engine.base import SamplingParams
from kvnotes.errors import UnsupportedModelError


def _config(kind: Any, **changes: Any) -> Any:
    return kind(**{**SHAPE, **changes})


GPT2 = {"vocab_size": 89, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "learned positions": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
        "positions are learned",
    ),
    "alibi": (
        lambda: tf.BloomForCausalLM(
            tf.BloomConfig(vocab_size=89, hidden_size=32, n_layer=2, n_head=4)
        ),
        "positions cannot be set",
    ),
    "recurrent": (
        lambda: tf.MambaForCausalLM(
            tf.MambaConfig(vocab_size=89, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
        "state|LinearAttention",
    ),
    "encoder-decoder": (
        lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(
                vocab_size=89,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
            )
        ),
        "encoder-decoder",
    ),
    "norm weights after the rotation": (
        lambda: tf.HunYuanDenseV1ForCausalLM(_config(tf.HunYuanDenseV1Config)),
        "norm weights after the rotation",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_edited_is_refused_with_the_cause(name: str) -> None:
    make, cause = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=cause) as caught:
        engine_of(sharpen(make()))
    assert "erratum" in caught.value.hint


def test_a_mistral_without_a_window_is_accepted() -> None:
    engine = engine_of(build("mistral"))
    assert len(list(engine.generate(engine.prefill((1, 2, 3)), SamplingParams(2)))) == 2

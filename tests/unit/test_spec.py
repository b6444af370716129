"""Who a model is: the fingerprint, and refusals that name what differs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvnotes.errors import SpecMismatchError
from kvnotes.spec import LayerSpec, ModelIdentity, ModelSpec, RopeSpec

ROPE = RopeSpec("default", 8, "half", "a" * 64)
SPEC = ModelSpec(
    model_type="llama",
    layers=(LayerSpec("full", 2, 8), LayerSpec("full", 2, 8)),
    num_attention_heads=4,
    hidden_size=32,
    vocab_size=100,
    max_positions=256,
    dtype="float32",
    ropes=(ROPE,),
    num_parameters=1000,
)
IDENTITY = ModelIdentity(SPEC, "b" * 64)
FINGERPRINT = "cdbc1d3c96231dfd6f8647f62a2bfaad5bb62f673386aad366be95f0555bfa73"

OTHER_LAYERS = (SPEC.layers[0], LayerSpec("full", 2, 16))
CHANGED: dict[str, ModelIdentity] = {
    "model_type": replace(IDENTITY, spec=replace(SPEC, model_type="qwen2")),
    "layers": replace(IDENTITY, spec=replace(SPEC, layers=OTHER_LAYERS)),
    "num_attention_heads": replace(IDENTITY, spec=replace(SPEC, num_attention_heads=8)),
    "hidden_size": replace(IDENTITY, spec=replace(SPEC, hidden_size=64)),
    "vocab_size": replace(IDENTITY, spec=replace(SPEC, vocab_size=101)),
    "max_positions": replace(IDENTITY, spec=replace(SPEC, max_positions=512)),
    "dtype": replace(IDENTITY, spec=replace(SPEC, dtype="bfloat16")),
    "ropes": replace(IDENTITY, spec=replace(SPEC, ropes=(replace(ROPE, rotary_dim=4),))),
    "constants": replace(IDENTITY, spec=replace(SPEC, constants=(("rms_norm_eps", "1e-06"),))),
    "weights": replace(IDENTITY, weights_digest="c" * 64),
    "adapter": replace(IDENTITY, adapter="lora"),
    "quantization": replace(IDENTITY, quantization="int8"),
}
"""One identity per fact, that differs in this fact alone."""

NESTED: dict[str, ModelSpec] = {
    "kind": replace(SPEC, ropes=(replace(ROPE, kind="yarn"),)),
    "rotary_dim": replace(SPEC, ropes=(replace(ROPE, rotary_dim=4),)),
    "pairing": replace(SPEC, ropes=(replace(ROPE, pairing="interleaved"),)),
    "table_digest": replace(SPEC, ropes=(replace(ROPE, table_digest="d" * 64),)),
    "attention_factor": replace(SPEC, ropes=(replace(ROPE, attention_factor=1.1),)),
    "num_kv_heads": replace(SPEC, layers=(SPEC.layers[0], LayerSpec("full", 1, 8))),
    "head_dim": replace(SPEC, layers=OTHER_LAYERS),
    "start": replace(SPEC, ropes=(replace(ROPE, start=2),)),
    "reversed": replace(SPEC, ropes=(replace(ROPE, reversed=True),)),
    "value_dim": replace(SPEC, layers=(SPEC.layers[0], LayerSpec("full", 2, 8, 4))),
    "index_dim": replace(SPEC, layers=(SPEC.layers[0], LayerSpec("full", 2, 8, index_dim=4))),
    "moves": replace(SPEC, layers=(SPEC.layers[0], LayerSpec("full", 2, 8, moves=()))),
    "window": replace(SPEC, layers=(SPEC.layers[0], LayerSpec("full", 2, 8, window=4))),
    "number of ropes": replace(SPEC, ropes=(ROPE, ROPE)),
    "number of layers": replace(SPEC, layers=SPEC.layers[:1]),
}


def test_every_fact_of_a_model_is_perturbed_here() -> None:
    facts = {field.name for field in (*fields(ModelSpec), *fields(ModelIdentity))}
    facts -= {"spec", "num_parameters", "limit_reason", "weights_digest"}
    assert set(CHANGED) == facts | {"weights"}


@pytest.mark.parametrize("fact", CHANGED)
def test_a_model_that_differs_in_one_fact_is_refused_and_the_fact_named(fact: str) -> None:
    other = CHANGED[fact]
    assert other.fingerprint != IDENTITY.fingerprint
    with pytest.raises(SpecMismatchError) as caught:
        IDENTITY.check_same(other, "segment 'policy'")
    message = caught.value.message
    assert message.startswith("segment 'policy' was computed with another model (")
    assert fact in message
    assert not any(f"{name}: " in message for name in CHANGED if name != fact)
    assert caught.value.hint


@pytest.mark.parametrize("fact", NESTED)
def test_the_refusal_shows_two_values_that_differ(fact: str) -> None:
    with pytest.raises(SpecMismatchError) as caught:
        IDENTITY.check_same(ModelIdentity(NESTED[fact], IDENTITY.weights_digest), "it")
    theirs, mine = caught.value.message.split("(", 1)[1].rstrip(")").split(", here ")
    assert theirs.split(": ", 1)[1] != mine, f"both sides are shown as {mine}"


def test_the_same_model_is_accepted_from_anywhere() -> None:
    IDENTITY.check_same(ModelIdentity(replace(SPEC), "b" * 64), "it")


def test_an_estimate_is_no_part_of_who_a_model_is() -> None:
    other = replace(IDENTITY, spec=replace(SPEC, num_parameters=2000))
    assert other.fingerprint == IDENTITY.fingerprint


def test_fingerprints_do_not_change_between_releases() -> None:
    # stored segments are found by it; a change needs a new format version
    assert IDENTITY.fingerprint == FINGERPRINT


def test_a_token_takes_keys_and_values_of_every_layer() -> None:
    assert SPEC.num_layers == 2
    assert SPEC.nbytes_per_token(4) == 2 * 2 * 2 * 8 * 4

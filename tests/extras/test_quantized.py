"""Weights in fewer bits and adapters: exact in what they compute, and another model each."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import MODELS, SHAPE, build, engine_of, sharpen
from helpers_prompt import family_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import kvnotes
from kvnotes.engine.adapters import adapter_digest
from kvnotes.engine.hf import HFEngine
from kvnotes.engine.models import load_model_and_tokenizer, resolve_model
from kvnotes.engine.quantize import QUANTIZATIONS, quantize, stored_quantization
from kvnotes.errors import EngineError, ModelNotFoundError, SegmentFormatError, SpecMismatchError
from kvnotes.gate import CONTROL_FACTOR, run_gate

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao and peft, about themselves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    sharpen(MODELS["llama-gqa"]()).save_pretrained(path)
    family_tokenizer("smollm2").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of that model, with weights that change it."""
    path = tmp_path_factory.mktemp("adapters") / "lora"
    model = load_model_and_tokenizer(resolve_model(str(folder))).model
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=random) / 2)
    adapted.save_pretrained(path)
    file = path / "adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(folder)})
    )
    return path


# -- quantized weights -----------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_pass_the_gate_and_are_another_model(
    name: str, dtype: torch.dtype
) -> None:
    config = LlamaConfig(**{**SHAPE, "intermediate_size": 64})
    plain, model = (sharpen(LlamaForCausalLM(config)).to(dtype) for _ in range(2))
    plain = engine_of(plain)
    said = quantize(model, name)
    found = HFEngine(model, plain.identity.weights_digest, quantization=said)
    card = run_gate(found)
    card.require()
    if dtype == torch.float32:
        assert card.control is not None and card.control > CONTROL_FACTOR * card.worst
    ids = (1, 2, 3, 4)
    gap = (found.prefill(ids).last_logits() - plain.prefill(ids).last_logits()).abs().max()
    assert gap > 0, "nothing was quantized"
    with pytest.raises(SpecMismatchError, match=f"quantization: .*torchao .* {name}"):
        plain.identity.check_same(found.identity, "the segment")


def test_load_quantizes(folder: Path) -> None:
    model = kvnotes.load(str(folder), quantize="int8")
    assert model.engine.identity.quantization == f"torchao {version('torchao')} int8"
    assert model.engine.fingerprint != kvnotes.load(str(folder)).engine.fingerprint


def test_a_quantization_that_there_is_not_is_refused_with_the_ones_there_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="no quantization 'int7'") as caught:
        kvnotes.load(str(folder), quantize="int7")
    assert "int8" in caught.value.hint
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(EngineError, match="torchao, which is not installed") as caught:
        kvnotes.load(str(folder), quantize="int8")
    assert "kvnotes[quantize]" in caught.value.hint


def test_weights_that_are_stored_quantized_have_a_name_and_are_not_quantized_again() -> None:
    model = build("llama-gqa")
    assert stored_quantization(model) == ""
    model.config.quantization_config = {"quant_method": "fp8", "bits": 8}
    assert stored_quantization(model).startswith("fp8:")
    with pytest.raises(EngineError, match="quantized already"):
        quantize(model, "int8")
    other = build("llama-gqa")
    other.config.quantization_config = {"quant_method": "fp8", "bits": 4}
    assert stored_quantization(other) != stored_quantization(model)


def test_a_quantized_cache_of_the_generation_config_is_not_used() -> None:
    model = build("llama-gqa")
    model.generation_config.cache_implementation = "quantized"
    found = HFEngine(model, "0" * 64)
    run_gate(found).require()
    assert found.prefill((1, 2, 3)).cache.buffer.keys[0].dtype == torch.float32


# -- adapters ----------------------------------------------------------------------------------


def test_an_adapter_brings_its_base_and_is_another_model(folder: Path, adapter: Path) -> None:
    base, found = kvnotes.load(str(folder)), kvnotes.load(str(adapter))
    assert found.name == "lora"
    assert found.engine.identity.weights_digest == base.engine.identity.weights_digest
    assert found.engine.identity.adapter == adapter_digest(adapter)
    ids = (1, 2, 3, 4)
    own, theirs = (x.engine.prefill(ids).last_logits() for x in (found, base))
    assert (own - theirs).abs().max() > 0.1
    with pytest.raises(SpecMismatchError, match="adapter: "):
        found.engine.identity.check_same(base.engine.identity, "the segment")
    segment = base.engine.compile(ids)
    plan = kvnotes.plan.Plan(ids, (segment.run.whole(),))
    with pytest.raises(SpecMismatchError, match="adapter"):
        found.engine.execute(plan, segments=[segment])


def test_the_digest_of_an_adapter_covers_weights_and_what_they_mean(
    adapter: Path, tmp_path: Path
) -> None:
    first = adapter_digest(adapter)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((adapter / name).read_bytes())
    assert adapter_digest(tmp_path) == first
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"revision": "main"}))
    assert adapter_digest(tmp_path) == first
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    assert adapter_digest(tmp_path) != first
    content = bytearray((adapter / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert adapter_digest(tmp_path) != first


def config(text: str) -> Any:
    return lambda path: (path / "adapter_config.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda path: (path / "adapter_config.json").write_text("{"), SegmentFormatError, "read"),
        (
            lambda path: (path / "adapter_config.json").write_text("[]"),
            SegmentFormatError,
            "no obj",
        ),
        (lambda path: (path / "adapter_config.json").write_text("{}"), SegmentFormatError, "base"),
        (
            lambda path: (path / "adapter_model.safetensors").unlink(),
            (ModelNotFoundError, EngineError),
            "adapter",
        ),
        (
            lambda path: (path / "adapter_model.safetensors").write_bytes(b"x" * 100),
            EngineError,
            "cannot apply the adapter",
        ),
    ],
)
def test_a_damaged_adapter_is_refused(
    change: Any, error: Any, message: str, adapter: Path, tmp_path: Path
) -> None:
    for file in adapter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path)
    with pytest.raises(error, match=message) as caught:
        kvnotes.load(str(tmp_path))
    assert caught.value.hint


def test_without_peft_an_adapter_is_refused_with_the_way_to_get_it(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match="peft, which applies it, is not installed") as caught:
        kvnotes.load(str(adapter))
    assert "kvnotes[adapters]" in caught.value.hint


# -- memory --------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        available = 1 << 12

    monkeypatch.setattr("kvnotes.engine.models.psutil.virtual_memory", lambda: Small)
    with pytest.raises(EngineError, match=r"take \d+ MiB in float32, 0 MiB of memory are avail"):
        load_model_and_tokenizer(resolve_model(str(folder)))

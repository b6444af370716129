"""GGUF files: what is converted, and that no damage is anything but a clear error."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from kvnotes.engine.convert import MAX_ITEMS, read_gguf
from kvnotes.engine.models import resolve_model
from kvnotes.errors import EngineError, KVNotesError, SegmentFormatError, UnsupportedModelError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))


def convert(path: Path) -> Path:
    return resolve_model(str(path), progress=lambda what, done, total: None).path


def written(path: Path, name: str) -> dict[str, Any]:
    content = json.loads((convert(path) / name).read_text())
    assert isinstance(content, dict)
    return content


def test_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    lengths = [*range(0, 64), *range(64, len(whole), 997), len(whole) - 1]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(SegmentFormatError):
            read_gguf(tmp_path / "cut.gguf")


def test_flipped_byte_in_the_header_is_converted_or_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    chance = random.Random(0)
    first_tensor = min(tensor.data_offset for tensor in gguf.GGUFReader(tiny).tensors)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chance.randrange(first_tensor)] ^= 1 << chance.randrange(8)
        (tmp_path / "flipped.gguf").write_bytes(damaged)
        try:
            convert(tmp_path / "flipped.gguf")
        except KVNotesError as error:
            assert error.hint
            assert "\n" not in error.message


def header_bytes(*parts: bytes, num_tensors: int = 0, num_fields: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**60
ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 a zip file",
        header_bytes(num_fields=HUGE),
        header_bytes(num_fields=0, num_tensors=HUGE),
        header_bytes(ARCHITECTURE, num_tensors=HUGE),
        header_bytes(struct.pack("<Q", HUGE)),
        header_bytes(text("k"), struct.pack("<IIQ", 9, 8, HUGE)),
        header_bytes(text("k"), struct.pack("<IIQ", 9, 0, HUGE)),
        header_bytes(text("k"), struct.pack("<IIQ", 9, 9, HUGE)),
        header_bytes(text("k"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 50),
        header_bytes(text("k"), struct.pack("<II", 13, 0)),
        header_bytes(struct.pack("<Q", 1) + b"\xff"),
        header_bytes(*[text("k") + struct.pack("<II", 4, 1)] * 2, num_fields=2),
        header_bytes(ARCHITECTURE, text("t"), struct.pack("<I", 2**31), num_tensors=1),
    ],
)
def test_hostile_header_is_refused_at_once(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(SegmentFormatError, match="is no whole GGUF file"):
        read_gguf(tmp_path / "bad.gguf")


def test_header_of_endless_lists_is_refused_before_they_are_walked(tmp_path: Path) -> None:
    items = struct.pack("<IIQ", 9, 0, MAX_ITEMS + 1) + bytes(MAX_ITEMS + 1)
    content = header_bytes(ARCHITECTURE, text("k"), items, num_fields=2)
    (tmp_path / "long.gguf").write_bytes(content)
    with pytest.raises(SegmentFormatError, match=f"its lists have {MAX_ITEMS + 1} items"):
        read_gguf(tmp_path / "long.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_version_or_byte_order_is_refused(version: int, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(SegmentFormatError, match=f"is GGUF v{version}"):
        read_gguf(tmp_path / "old.gguf")


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "never-heard-of"}, "architecture never-heard-of is not supported"),
        ({"pre": "klingon"}, "splits text by the rules 'klingon'"),
        ({"more_fields": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary positions"),
        ({"more_tensors": {"rope_freqs.weight": ONES}}, "78472 values, the LlamaForCausalLM"),
        ({"more_tensors": {"blk.0.attn_q.bias": ONES}}, "makes of it 78464"),
        ({"more_fields": {"llama.rope.dimension_count": 8}}, "makes of it 66176"),
        ({"more_fields": {"llama.block_count": 1}}, "makes of it"),
        ({"without": ("blk.1.attn_q.weight",)}, "makes of it 78464"),
        ({"without": ("token_embd.weight",)}, "makes of it 78464"),
        ({"more_tensors": {"output.weight": np.ones((3, 64), np.float32)}}, "makes of it"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        convert(write_tiny_gguf(tmp_path / "tiny.gguf", **options))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"more_fields": {"tokenizer.ggml.eot_token_id": 999}}, "the eot token is 999"),
        ({"more_fields": {"llama.block_count": 2**31}}, "blocks cannot have 20 tensors"),
        (
            {
                "without": ("blk.0.ffn_norm.weight",),
                "more_tensors": {"blk.0.x.weight": np.ones(64, np.float32)},
            },
            "lacks 1 tensors of its model",
        ),
    ],
)
def test_model_that_contradicts_itself_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SegmentFormatError, match=message):
        convert(write_tiny_gguf(tmp_path / "tiny.gguf", **options))


def test_model_larger_than_the_memory_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = type("Memory", (), {"available": 3 << 20})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(EngineError, match=r"needs 32 MiB of memory, 3 MiB are available"):
        convert(tiny)


def test_end_of_turn_stops_like_end_of_text(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "t.gguf", more_fields={"tokenizer.ggml.eot_token_id": 0})
    assert written(file, "generation_config.json")["eos_token_id"] == [0, 2]


def test_config_has_the_shortest_decimals_and_no_trace_of_the_file(tiny: Path) -> None:
    config = written(tiny, "config.json")
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True
    assert not any("gguf" in str(value).lower() for value in config.values())
    assert not {"transformers_version", "quantization_config"} & set(config)


def test_text_rules_differ_where_the_file_names_others(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    mine, theirs = written(tiny, "tokenizer.json"), written(other, "tokenizer.json")
    assert mine["pre_tokenizer"]["pretokenizers"][0]["type"] == "Digits"
    assert theirs["pre_tokenizer"]["pretokenizers"][0]["type"] == "Split"
    assert (mine["normalizer"], theirs["normalizer"]) == (None, {"type": "NFC"})


def test_conversion_says_nothing(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert(tiny)
    assert capfd.readouterr() == ("", "")

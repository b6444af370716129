"""GGUF files: what is read, and that no damage is anything but a clear error."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from kvnotes.engine.families import FAMILIES, check_supported, model_config, stop_ids, text_rules
from kvnotes.engine.gguf import read_gguf_header, read_tensor
from kvnotes.errors import KVNotesError, SegmentFormatError, UnsupportedModelError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def check(path: Path) -> None:
    check_supported(read_gguf_header(path))


@pytest.mark.parametrize("arch", FAMILIES)
def test_header_is_what_llama_cpp_reads(arch: str, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", arch)
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.fields == fields
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = read_tensor(header, header.tensors[tensor.name])
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours, theirs)
    check_supported(header)


def test_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    lengths = [*range(0, 64), *range(64, len(whole), 997), len(whole) - 1]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(SegmentFormatError):
            check(tmp_path / "cut.gguf")


def test_flipped_byte_in_the_header_is_read_or_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    chance = random.Random(0)
    first_tensor = min(t.start for t in read_gguf_header(tiny).tensors.values())
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[chance.randrange(first_tensor)] ^= 1 << chance.randrange(8)
        (tmp_path / "flipped.gguf").write_bytes(damaged)
        try:
            check(tmp_path / "flipped.gguf")
        except KVNotesError as error:
            assert error.hint


def header_bytes(*parts: bytes, num_tensors: int = 0, num_fields: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**60
NESTED = struct.pack("<IQ", 9, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not start with"),
        (b"PK\x03\x04 a zip file", "does not start with"),
        (header_bytes(num_fields=HUGE), "bytes are missing"),
        (header_bytes(num_fields=0, num_tensors=HUGE), "bytes are missing"),
        (header_bytes(struct.pack("<Q", HUGE)), "bytes are missing"),
        (header_bytes(text("k"), struct.pack("<IIQ", 9, 8, HUGE)), "bytes are missing"),
        (header_bytes(text("k"), struct.pack("<IIQ", 9, 0, HUGE)), "bytes are missing"),
        (header_bytes(text("k"), struct.pack("<IIQ", 9, 9, HUGE)), "bytes are missing"),
        (header_bytes(text("k"), struct.pack("<I", 9), NESTED * 50), "nested too deeply"),
        (header_bytes(text("k"), struct.pack("<II", 13, 0)), "unknown type 13"),
        (header_bytes(struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
        (header_bytes(*[text("k") + struct.pack("<II", 4, 1)] * 2, num_fields=2), "twice"),
        (header_bytes(text("general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
        (header_bytes(text("t"), struct.pack("<I", 9), num_fields=0, num_tensors=1), "9 dimen"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_hostile_header_is_refused_at_once(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(SegmentFormatError, match=message):
        check(tmp_path / "bad.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_version_or_byte_order_is_refused(version: int, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedModelError, match=f"GGUF version {version}"):
        check(tmp_path / "old.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "holds a 'mamba' model; GGUF is read for llama, qwen2, qwen3"),
        ({"pre": "klingon"}, "splits text by the rules 'klingon'"),
        ({"more_fields": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary positions"),
        ({"more_fields": {"llama.expert_count": 8}}, "sets llama.expert_count"),
        ({"more_fields": {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}},
         "differ in width"),
        ({"more_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs.weight"),
    ],
)  # fmt: skip
def test_what_would_be_converted_wrongly_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        check(write_tiny_gguf(tmp_path / "tiny.gguf", **options))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": ("blk.1.attn_q.weight",)}, "no tensor 'blk.1.attn_q.weight'"),
        ({"without": ("token_embd.weight",)}, "no tensor 'token_embd.weight'"),
        ({"more_tensors": {"output.weight": np.ones((3, 64), np.float32)}}, "has shape"),
        ({"more_fields": {"tokenizer.ggml.eot_token_id": 999}}, "the eot token is 999"),
    ],
)
def test_model_that_contradicts_itself_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SegmentFormatError, match=message):
        check(write_tiny_gguf(tmp_path / "tiny.gguf", **options))


def test_end_of_turn_stops_like_end_of_text(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "t.gguf", more_fields={"tokenizer.ggml.eot_token_id": 0})
    assert stop_ids(read_gguf_header(file)) == [0, 2]


def test_config_has_the_shortest_decimals_and_no_trace_of_the_file(tiny: Path) -> None:
    config = model_config(read_gguf_header(tiny))
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True
    assert not any("gguf" in str(value).lower() for value in config.values())


def test_text_rules_differ_where_the_file_names_others(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    assert text_rules(read_gguf_header(tiny)) != text_rules(read_gguf_header(other))

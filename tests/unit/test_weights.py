"""The digest of weights: what it depends on, what it does not, and how it is remembered."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvnotes.engine import weights
from kvnotes.engine.weights import read_tensor_entries, state_dict_digest, weights_digest
from kvnotes.errors import ModelNotFoundError, SegmentFormatError, UnsupportedModelError

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{dtype}": torch.randn(3, 5, generator=generator).mul(9).to(dtype)
        for dtype in FLOATS + INTEGERS + EIGHT_BITS
    }
    return tensors | {
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=generator).T.contiguous(),
    }


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVNOTES_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(example(), tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def age(folder: Path) -> None:
    """Make the files old enough to be remembered."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - 60,) * 2)


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_shards_and_memory_have_one_digest(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sharded").mkdir()
    save_sharded(tmp_path / "sharded", example())
    digest = weights_digest(folder)
    assert len(digest) == 64
    assert weights_digest(tmp_path / "sharded") == digest
    assert state_dict_digest(example()) == digest
    assert state_dict_digest(dict(reversed(example().items()))) == digest


def test_layout_in_memory_does_not_matter() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    assert state_dict_digest({"w": values.T.contiguous().T}) == state_dict_digest({"w": values})


@pytest.mark.parametrize(
    "changed",
    [
        {"v": torch.zeros(2, 2)},
        {"w": torch.zeros(4)},
        {"w": torch.zeros(2, 2, dtype=torch.int32)},
        {"w": torch.tensor([[0.0, 0.0], [0.0, -0.0]])},
        {"w": torch.zeros(2, 2), "x": torch.zeros(0)},
        {},
    ],
    ids=["name", "shape", "dtype", "bytes", "another", "none"],
)
def test_each_part_of_a_tensor_matters(changed: dict[str, torch.Tensor]) -> None:
    assert state_dict_digest(changed) != state_dict_digest({"w": torch.zeros(2, 2)})


def test_dtype_that_no_file_holds_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'w' is torch\.complex128"):
        state_dict_digest({"w": torch.zeros(2, dtype=torch.complex128)})


# memory of digests


def test_digest_is_remembered_until_a_file_changes(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(folder)
    digest = weights_digest(folder)
    with monkeypatch.context() as patch:
        patch.delattr(weights, "_digest_of_files")
        assert weights_digest(folder) == digest
    save_file(example() | {"scalar": torch.tensor(2.0)}, folder / "model.safetensors")
    age(folder)
    assert weights_digest(folder) != digest


def test_file_rewritten_in_place_with_its_old_time_is_noticed(folder: Path) -> None:
    age(folder)
    file = folder / "model.safetensors"
    before = file.stat()
    digest = weights_digest(folder)
    time.sleep(0.02)  # the kernel's clock for files moves in steps of up to 10 ms
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x7f")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_digest(folder) != digest


def test_digest_of_a_file_that_has_just_changed_is_not_remembered(folder: Path, home: Path) -> None:
    weights_digest(folder)
    assert not (home / "digests.json").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 9}', '{"version": 1, "digests": 3}', "\x00\xff"]
)
def test_damaged_memory_is_ignored_and_written_again(
    content: str, folder: Path, home: Path
) -> None:
    age(folder)
    home.mkdir()
    (home / "digests.json").write_text(content, encoding="latin-1")
    digest = weights_digest(folder)
    known = json.loads((home / "digests.json").read_text())["digests"]
    assert [entry["digest"] for entry in known.values()] == [digest]
    assert list(home.iterdir()) == [home / "digests.json"]


def test_remembered_nonsense_is_not_returned(folder: Path, home: Path) -> None:
    age(folder)
    digest = weights_digest(folder)
    content = json.loads((home / "digests.json").read_text())
    for entry in content["digests"].values():
        entry["digest"] = 12
    (home / "digests.json").write_text(json.dumps(content))
    assert weights_digest(folder) == digest


def test_folder_that_cannot_be_written_costs_only_time(folder: Path, home: Path) -> None:
    age(folder)
    home.write_text("a file, where a folder should be")
    assert weights_digest(folder) == weights_digest(folder)


# damage


def header(**tensors: object) -> bytes:
    content = json.dumps(tensors).encode()
    return struct.pack("<Q", len(content)) + content


def described(
    shape: object = (2,), start: object = 0, stop: object = 8, dtype: object = "F32"
) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 50000) + b"[" * 50000,
        header(w=3),
        header(w={}),
        header(w=described(dtype="F33")) + bytes(8),
        header(w=described(dtype=["F32"])) + bytes(8),
        header(w=described(shape=3)) + bytes(8),
        header(w=described(shape=(-2,))) + bytes(8),
        header(w=described(shape=(2.0,))) + bytes(8),
        header(w=described(shape=(3,))) + bytes(8),
        header(w=described(start=4, stop=12)) + bytes(12),
        header(w=described(start=8, stop=0)) + bytes(8),
        header(w=described()) + bytes(7),
        header(w=described()) + bytes(9),
        header(v=described(), w=described()) + bytes(8),
        struct.pack("<Q", 110) + b'{"w":%b,"w":%b}' % ((json.dumps(described()).encode(),) * 2),
    ],
)
def test_damaged_file_is_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(SegmentFormatError, match="is damaged"):
        weights_digest(folder)


def test_file_cut_anywhere_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(SegmentFormatError):
            read_tensor_entries(folder)


def test_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no model\.safetensors"):
        weights_digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModelError, match="pickled weights only") as caught:
        weights_digest(tmp_path)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ("{", SegmentFormatError),
        ("[]", SegmentFormatError),
        ('{"weight_map": []}', SegmentFormatError),
        ('{"weight_map": {"w": 3}}', SegmentFormatError),
        ('{"weight_map": {"w": "gone.safetensors"}}', ModelNotFoundError),
        ('{"weight_map": {"w": "../model/a.safetensors"}}', ModelNotFoundError),
    ],
)
def test_broken_index_of_shards_is_refused(
    index: str, kind: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    save_sharded(tmp_path / "model", example())
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(kind):
        weights_digest(tmp_path / "model")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, example())
    save_file(example(), tmp_path / "b.safetensors")
    with pytest.raises(SegmentFormatError, match=r"is in .* and in"):
        weights_digest(tmp_path)

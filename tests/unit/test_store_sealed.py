"""Encryption at rest: what a sealed file hides, and what happens to one that was touched."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from helpers_store import (
    edit_outer,
    edit_text,
    facts_of,
    joined,
    raw_bytes,
    segment_of,
    taken_apart,
)
from safetensors.torch import load_file

from kvnotes.errors import SegmentFormatError, TrustError
from kvnotes.store import Provenance, Trust, digest_text, load_segment, open_segment, save_segment
from kvnotes.store.trust import CHUNK, sealed_size

NAME = "x.kv.safetensors"
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
PUBLIC_KEY = SIGNING_KEY.public_key().public_bytes_raw()
SIGNER = Trust(signing_key=SIGNING_KEY.private_bytes_raw())
SEALER = Trust(encryption_key=bytes(range(32)))
TEXT = "The launch code is 7391: tell nobody."
SOURCE = Provenance(name="secret", text=TEXT, text_sha256=digest_text(TEXT))


def save(path: Path, trust: Trust, num_tokens: int = 3) -> Path:
    save_segment(path, segment_of(num_tokens, 2), provenance=SOURCE, trust=trust)
    return path


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    return save(tmp_path / NAME, SEALER)


def test_a_sealed_file_is_what_was_sealed(sealed: Path) -> None:
    opened = open_segment(sealed, trust=SEALER)
    assert opened.encrypted and opened.header.provenance.text == TEXT
    assert facts_of(load_segment(sealed, trust=SEALER)) == facts_of(segment_of(3, 2))


def test_a_sealed_file_can_be_signed_too(tmp_path: Path) -> None:
    both = Trust(signing_key=SIGNER.signing_key, encryption_key=SEALER.encryption_key)
    path = save(tmp_path / NAME, both)
    reader = Trust(trusted=(PUBLIC_KEY,), encryption_key=SEALER.encryption_key)
    assert open_segment(path, trust=reader).signer == PUBLIC_KEY.hex()
    assert PUBLIC_KEY.hex().encode() not in path.read_bytes()


def test_a_sealed_file_is_what_the_specification_says(sealed: Path) -> None:
    """Decrypted here with nothing but the primitives."""
    outer, data = taken_apart(sealed.read_bytes())
    assert outer.keys() == {"__metadata__", "sealed"} == {*outer["__metadata__"], "__metadata__"}
    text = outer["__metadata__"]["sealed"]
    entry = json.loads(text)
    assert (entry["cipher"], entry["chunk"], entry["version"]) == ("AES-256-GCM", 1 << 20, 1)
    derive = HKDF(SHA256(), 32, bytes.fromhex(entry["salt"]), b"kvnotes sealed file 1")
    assert SEALER.encryption_key is not None
    cipher = AESGCM(derive.derive(SEALER.encryption_key))
    nonce = b"\0\0\0" + struct.pack(">Q", 0) + b"\1"
    plain = cipher.decrypt(nonce, data, text.encode())
    assert len(plain) == entry["nbytes"]
    inner = sealed.with_name("plain")
    inner.write_bytes(plain)
    assert facts_of(load_segment(inner)) == facts_of(segment_of(3, 2))
    assert load_file(sealed)["sealed"].numel() == len(data)


def test_nothing_of_the_plain_file_stands_in_a_sealed_one(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", Trust(), 200).read_bytes()
    content = save(tmp_path / NAME, SEALER, 200).read_bytes()
    segment = segment_of(200, 2)
    ids = segment.run.token_ids
    secrets = [
        TEXT.encode(),
        b"secret",
        digest_text(TEXT).encode(),
        ",".join(map(str, ids[:8])).encode(),
        struct.pack("<8q", *ids[:8]),
        struct.pack("<8i", *ids[:8]),
        segment.identity.fingerprint.encode(),
        segment.run.attended.encode(),
        raw_bytes(segment.keys[0])[:16],
    ]
    for secret in secrets:
        assert secret not in content
    found = [secret in plain for secret in secrets]
    assert found == [True, True, True, True, False, False, True, True, True]


def test_two_sealed_files_of_one_segment_have_nothing_in_common(tmp_path: Path) -> None:
    first, second = (taken_apart(save(tmp_path / n, SEALER).read_bytes())[1] for n in "ab")
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert same < len(first) / 50  # 1 in 256 by chance


def test_a_sealed_file_without_its_key_is_refused(sealed: Path) -> None:
    for trust, have in (
        (Trust(), "no key is given"),
        (SIGNER, "no key"),
        (Trust(encryption_key=bytes(32)), "another key is given"),
    ):
        with pytest.raises(TrustError, match=have) as caught:
            load_segment(sealed, trust=trust)
        assert "KVNOTES_ENCRYPTION_KEY" in caught.value.hint


def test_a_wrong_key_under_the_right_name_decrypts_nothing(sealed: Path) -> None:
    other = Trust(encryption_key=bytes(32))
    edit_text(sealed, "sealed", lambda entry: entry.update(key_id=other._key_id()))
    with pytest.raises(SegmentFormatError, match="cannot be decrypted at byte 0"):
        load_segment(sealed, trust=other)


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[bytes]]:
    """Outer header and chunks of a longer sealed file."""
    trust = Trust(encryption_key=SEALER.encryption_key)
    pieces = [bytes([i]) * (CHUNK if i < 3 else 1000) for i in range(4)]
    sealing = trust.sealing(sum(map(len, pieces)))
    data = b"".join(trust.encrypt(pieces, sealing))
    size = CHUNK + 16
    cut = [data[start : start + size] for start in range(0, len(data), size)]
    assert [len(chunk) for chunk in cut] == [size, size, size, 1016]
    outer = {"__metadata__": {"sealed": sealing}}
    return outer, cut


def decrypted(outer: dict[str, Any], chunks: list[bytes]) -> bytes:
    data = b"".join(chunks)
    return bytes(SEALER.decrypt(memoryview(data), outer["__metadata__"]["sealed"], "f"))


def test_chunks_in_their_order_decrypt(chunks: tuple[dict[str, Any], list[bytes]]) -> None:
    outer, parts = chunks
    assert decrypted(outer, parts) == b"".join(
        bytes([i]) * (CHUNK if i < 3 else 1000) for i in range(4)
    )


@pytest.mark.parametrize(
    "order", [[1, 0, 2, 3], [0, 2, 1, 3], [0, 0, 2, 3], [0, 1, 1, 3], [2, 1, 0, 3], [3, 0, 1, 2]]
)
def test_chunks_that_are_swapped_or_doubled_are_refused(
    chunks: tuple[dict[str, Any], list[bytes]], order: list[int]
) -> None:
    outer, parts = chunks
    with pytest.raises(SegmentFormatError, match="cannot be decrypted at byte"):
        decrypted(outer, [parts[index] for index in order])


@pytest.mark.parametrize(
    "kept", [[], [0], [0, 1], [0, 1, 2], [1, 2, 3], [0, 1, 3], [0, 1, 2, 3, 3]]
)
def test_chunks_that_are_missing_or_too_many_are_refused(
    chunks: tuple[dict[str, Any], list[bytes]], kept: list[int]
) -> None:
    outer, parts = chunks
    with pytest.raises(SegmentFormatError, match="or was cut off"):
        decrypted(outer, [parts[index] for index in kept])
    # the same with a size that fits: it is authenticated, and the last chunk is marked
    size = sum(len(parts[index]) - 16 for index in kept)
    sealing = json.loads(outer["__metadata__"]["sealed"]) | {"nbytes": size}
    text = json.dumps(sealing, sort_keys=True, separators=(",", ":"))
    if sealed_size(size) == size + 16 * len(kept):
        with pytest.raises(SegmentFormatError, match="cannot be decrypted"):
            decrypted({"__metadata__": {"sealed": text}}, [parts[index] for index in kept])


def test_the_last_chunk_is_marked_so_that_a_file_cannot_end_early() -> None:
    """Even somebody who could sign the size cannot make a middle chunk the last one."""
    pieces = [b"a" * CHUNK, b"b" * CHUNK]
    short = SEALER.sealing(CHUNK)
    data = next(iter(SEALER.encrypt(pieces, short)))
    with pytest.raises(SegmentFormatError, match="cannot be decrypted at byte 0"):
        SEALER.decrypt(memoryview(data), short, "f")
    whole = next(iter(SEALER.encrypt(pieces[:1], short)))
    assert bytes(SEALER.decrypt(memoryview(whole), short, "f")) == pieces[0]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_file_of_any_size_is_sealed_in_chunks(size: int) -> None:
    plain = os.urandom(size)
    sealing = SEALER.sealing(size)
    step = 70_001
    data = b"".join(SEALER.encrypt((plain[i : i + step] for i in range(0, size, step)), sealing))
    assert len(data) == sealed_size(size)
    assert bytes(SEALER.decrypt(memoryview(data), sealing, "f")) == plain


def test_a_changed_byte_of_a_sealed_file_is_found_wherever_it_is(sealed: Path) -> None:
    content = sealed.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    length = 8 + len(content[8 : 8 + size].rstrip())
    places = [*range(length), *range(8 + size, len(content), 97), len(content) - 1]
    file = os.open(sealed, os.O_WRONLY)
    for index in places:
        os.pwrite(file, bytes([content[index] ^ (1 << index % 8)]), index)
        with pytest.raises((SegmentFormatError, TrustError)):
            load_segment(sealed, trust=SEALER)
        os.pwrite(file, content[index : index + 1], index)
    os.close(file)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"version": 1.0},
        {"cipher": "none"},
        {"chunk": 1},
        {"chunk": 1048576.0},
        {"key_id": "x"},
        {"key_id": 5},
        {"key_id": ["0" * 16]},
        {"nbytes": -1},
        {"nbytes": True},
        {"nbytes": 10**12},
        {"nbytes": "1"},
        {"nbytes": 8288.0},
        {"salt": ""},
        {"salt": "0 " * 32},
        {"salt": None},
        {"more": 1},
    ],
)
def test_a_sealing_in_another_form_than_ours_is_refused(sealed: Path, change: Any) -> None:
    edit_text(sealed, "sealed", lambda entry: entry.update(change))
    with pytest.raises(SegmentFormatError, match="in a form this kvnotes does not know"):
        load_segment(sealed, trust=SEALER)


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", "[" * 5000, "\ud800", '{"salt":"\\ud800"}'])
def test_a_sealing_that_is_none_is_refused(sealed: Path, text: str) -> None:
    edit_outer(sealed, lambda outer: outer["__metadata__"].update(sealed=text))
    with pytest.raises(SegmentFormatError, match="in a form this kvnotes does not know"):
        load_segment(sealed, trust=SEALER)


def test_a_sealing_with_a_key_twice_is_refused(sealed: Path) -> None:
    text = taken_apart(sealed.read_bytes())[0]["__metadata__"]["sealed"]
    twice = text.replace('"salt"', '"salt":"\\ud800","salt"')
    edit_outer(sealed, lambda outer: outer["__metadata__"].update(sealed=twice))
    with pytest.raises(SegmentFormatError, match="in a form this kvnotes does not know"):
        load_segment(sealed, trust=SEALER)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o["__metadata__"].update(kvnotes="{}"),
        lambda o: o.update(other=o.pop("sealed")),
        lambda o: o["sealed"].update(dtype="I8"),
        lambda o: o.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    ],
)
def test_a_sealed_file_with_something_else_in_it_is_refused(
    sealed: Path, change: Callable[[Any], object]
) -> None:
    with pytest.raises(SegmentFormatError, match="is encrypted, and holds"):
        load_segment(edit_outer(sealed, change), trust=SEALER)


def test_what_is_sealed_in_a_sealed_file_must_be_a_plain_one(tmp_path: Path) -> None:
    for content in (save(tmp_path / "s", SEALER).read_bytes(), b"", b"x" * 100):
        sealing = SEALER.sealing(len(content))
        data = b"".join(SEALER.encrypt([content], sealing))
        outer = {
            "__metadata__": {"sealed": sealing},
            "sealed": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]},
        }
        (tmp_path / NAME).write_bytes(joined(outer, data))
        with pytest.raises(SegmentFormatError):
            load_segment(tmp_path / NAME, trust=SEALER)

"""Signatures and encryption at rest: what they catch, and what they need."""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from helpers_store import (
    at,
    edit_outer,
    edit_text,
    facts_of,
    segment_of,
    taken_apart,
    with_header,
)

from kvnotes.errors import SegmentFormatError, TrustError
from kvnotes.settings import Settings, load_settings
from kvnotes.store import Provenance, Trust, digest_text, load_segment, open_segment, save_segment

NAME = "x.kv.safetensors"
PRIVATE = {
    name: Ed25519PrivateKey.from_private_bytes(bytes([i] * 32)) for i, name in enumerate("ab")
}
PUBLIC = {name: key.public_key().public_bytes_raw() for name, key in PRIVATE.items()}
SIGNER = Trust(signing_key=PRIVATE["a"].private_bytes_raw())
SEALER = Trust(encryption_key=bytes(range(32)))
TEXT = "The launch code is 7391: tell nobody."
SOURCE = Provenance(name="secret", text=TEXT, text_sha256=digest_text(TEXT))


def save(path: Path, trust: Trust, num_tokens: int = 3) -> Path:
    save_segment(path, segment_of(num_tokens, 2), provenance=SOURCE, trust=trust)
    return path


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    return save(tmp_path / NAME, SIGNER)


# -- signatures ----------------------------------------------------------------------------


def test_a_signed_file_says_who_signed_it(signed: Path) -> None:
    for trust in (Trust(), Trust(trusted=(PUBLIC["b"], PUBLIC["a"]))):
        assert open_segment(signed, trust=trust).signer == PUBLIC["a"].hex()
        assert facts_of(load_segment(signed, trust=trust)) == facts_of(segment_of(3, 2))


def test_a_signature_is_what_the_specification_says(signed: Path) -> None:
    metadata = taken_apart(signed.read_bytes())[0]["__metadata__"]
    entry = json.loads(metadata["signature"])
    assert entry["algorithm"] == "ed25519" and bytes.fromhex(entry["key"]) == PUBLIC["a"]
    message = b"kvnotes signature 1\n" + metadata["kvnotes"].encode()
    PRIVATE["a"].public_key().verify(bytes.fromhex(entry["signature"]), message)


def test_a_file_of_another_key_or_of_none_is_refused_once_keys_are_trusted(tmp_path: Path) -> None:
    trust = Trust(trusted=(PUBLIC["b"],))
    with pytest.raises(TrustError, match="is not signed; the signature of one of 1 trusted"):
        load_segment(save(tmp_path / "plain", Trust()), trust=trust)
    with pytest.raises(
        TrustError, match=f"signed by {PUBLIC['a'].hex()[:16]}; the signature of one of 1"
    ):
        load_segment(save(tmp_path / "a", SIGNER), trust=trust)
    assert open_segment(tmp_path / "plain").signer == ""


def test_every_changed_byte_of_a_signed_header_is_caught(signed: Path) -> None:
    content = signed.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    length = len(content[8 : 8 + size].rstrip())
    trust = Trust(trusted=(PUBLIC["a"],))
    file = os.open(signed, os.O_WRONLY)
    for index in range(8 + length):
        os.pwrite(file, bytes([content[index] ^ (1 << index % 8)]), index)
        with pytest.raises((SegmentFormatError, TrustError)):
            open_segment(signed, trust=trust)
        os.pwrite(file, content[index : index + 1], index)
    os.close(file)
    assert open_segment(signed, trust=trust)


def test_a_header_changed_with_its_digest_no_longer_fits_its_signature(signed: Path) -> None:
    content = with_header(signed.read_bytes(), at("provenance.name", "other"))
    signed.write_bytes(content)
    for trust in (Trust(), Trust(trusted=(PUBLIC["a"],))):
        with pytest.raises(SegmentFormatError, match="a signature that does not fit it"):
            open_segment(signed, trust=trust)


def test_a_signature_of_another_header_or_key_does_not_fit(tmp_path: Path) -> None:
    save_segment(tmp_path / "other", segment_of(4), trust=SIGNER)
    other = taken_apart((tmp_path / "other").read_bytes())[0]["__metadata__"]["signature"]
    path = save(tmp_path / NAME, SIGNER)
    edit_outer(path, lambda outer: outer["__metadata__"].update(signature=other))
    with pytest.raises(SegmentFormatError, match="does not fit"):
        open_segment(path)
    path = save(tmp_path / NAME, SIGNER)
    edit_text(path, "signature", lambda entry: entry.update(key=PUBLIC["b"].hex()))
    with pytest.raises(SegmentFormatError, match="does not fit"):
        open_segment(path, trust=Trust(trusted=(PUBLIC["b"],)))


def test_a_removed_signature_leaves_a_file_that_nobody_signed(signed: Path) -> None:
    edit_outer(signed, lambda outer: outer["__metadata__"].pop("signature"))
    with pytest.raises(TrustError, match="is not signed"):
        open_segment(signed, trust=Trust(trusted=(PUBLIC["a"],)))


def test_a_tensor_changed_under_a_good_signature_is_found_when_it_is_verified(signed: Path) -> None:
    content = signed.read_bytes()
    signed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SegmentFormatError, match=r"tensor 'values\.0' is damaged"):
        load_segment(signed, trust=Trust(trusted=(PUBLIC["a"],)))


def test_what_nobody_trusted_signed_is_refused_before_its_header_is_parsed(signed: Path) -> None:
    signed.write_bytes(with_header(signed.read_bytes(), lambda header: header.clear()))
    edit_outer(signed, lambda outer: outer["__metadata__"].pop("signature"))
    with pytest.raises(SegmentFormatError, match="has format version"):
        open_segment(signed)
    with pytest.raises(TrustError, match="is not signed"):
        open_segment(signed, trust=Trust(trusted=(PUBLIC["a"],)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "5",
        "null",
        "{}",
        "[" * 2000,
        '["algorithm","key","signature"]',
        '{"algorithm":"ed25519","key":1,"signature":1}',
        '{"algorithm":"none","key":"K","signature":"S"}',
        '{"algorithm":"ed25519","key":"K","more":1,"signature":"S"}',
        '{"algorithm":"ed25519","key":"K"}',
        '{"algorithm": "ed25519","key":"K","signature":"S"}',
        '{"key":"K","algorithm":"ed25519","signature":"S"}',
        '{"algorithm":"ed25519","key":"K","signature":"S","signature":"S"}',
        '{"algorithm":"ed25519","key":"K ","signature":"S"}',
        '{"algorithm":"ed25519","key":"K","signature":"S\\ud800"}',
        '{"algorithm":"ed25519","key":"K","signature":"\ud800"}',
    ],
)
def test_a_signature_in_another_form_than_ours_is_refused(signed: Path, text: str) -> None:
    entry = json.loads(taken_apart(signed.read_bytes())[0]["__metadata__"]["signature"])
    text = text.replace('"K', '"' + entry["key"]).replace('"S', '"' + entry["signature"])
    edit_outer(signed, lambda outer: outer["__metadata__"].update(signature=text))
    with pytest.raises(SegmentFormatError, match="a signature of an unknown form"):
        open_segment(signed)


def test_a_key_in_capitals_is_another_form(signed: Path) -> None:
    edit_text(signed, "signature", lambda entry: entry.update(key=entry["key"].upper()))
    with pytest.raises(SegmentFormatError, match="unknown form"):
        open_segment(signed)


# -- keys ----------------------------------------------------------------------------------


def pem(key: Any, password: bytes | None = None) -> bytes:
    how = BestAvailableEncryption(password) if password else NoEncryption()
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
    return content


def public_pem(key: Any) -> bytes:
    content: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def test_keys_are_read_from_the_files_that_the_environment_names(tmp_path: Path) -> None:
    files = {
        "sign": pem(PRIVATE["a"]),
        "a": public_pem(PRIVATE["a"]),
        "b": public_pem(PRIVATE["b"]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "seal").write_text(bytes(range(32)).hex() + "\n")
    settings = load_settings(
        {
            "KVNOTES_HOME": str(tmp_path),
            "KVNOTES_SIGNING_KEY": str(tmp_path / "sign"),
            "KVNOTES_ENCRYPTION_KEY": str(tmp_path / "seal"),
            "KVNOTES_TRUSTED_KEYS": os.pathsep.join(str(tmp_path / name) for name in "ab"),
        }
    )
    trust = Trust.from_settings(settings)
    assert trust == Trust(SIGNER.signing_key, (PUBLIC["a"], PUBLIC["b"]), SEALER.encryption_key)
    assert Trust.from_settings(load_settings({})) == Trust()


def test_an_empty_setting_is_none_and_an_empty_name_among_others_is_never_dropped() -> None:
    empty = {f"KVNOTES_{name}": "" for name in ("SIGNING_KEY", "ENCRYPTION_KEY", "TRUSTED_KEYS")}
    assert Trust.from_settings(load_settings(empty)) == Trust()
    # "$A:$B" with two unset variables must not mean: trust everybody
    with pytest.raises(TrustError, match="cannot read the key file"):
        Trust.from_settings(load_settings({"KVNOTES_TRUSTED_KEYS": os.pathsep}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no private key"),
        (b"\0\xff", "holds no private key"),
        (pem(generate_private_key(65537, 1024)), "RSAPrivateKey, Ed25519 is needed"),
        (pem(PRIVATE["a"], b"password"), "holds no private key"),
        (public_pem(PRIVATE["a"]), "holds no private key"),
    ],
)
def test_a_file_that_is_no_private_key_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(TrustError, match=message) as caught:
        Trust.from_files(signing_key=tmp_path / "k")
    assert "openssl" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"-----BEGIN PUBLIC KEY-----\n", "holds no public key"),
        (pem(PRIVATE["a"]), "holds no public key"),
        (public_pem(generate_private_key(65537, 1024)), "RSAPublicKey, Ed25519 is needed"),
    ],
)
def test_a_file_that_is_no_public_key_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(TrustError, match=message):
        Trust.from_files(trusted=[tmp_path / "k"])


@pytest.mark.parametrize(
    "content", [b"", b"00" * 31, b"00" * 33, b"0g" * 32, b"00 " * 32, b"\xff" * 64]
)
def test_a_file_that_is_no_encryption_key_is_refused_by_name(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(TrustError, match=r"the key file .*/k holds \d+ characters, not 64 hex"):
        Trust.from_files(encryption_key=tmp_path / "k")


@pytest.mark.parametrize("name", ["none", "", "a\0b"])
def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TrustError, match="cannot read the key file"):
        Trust.from_files(signing_key=tmp_path / name)


def test_keys_of_another_length_are_refused_and_never_shown() -> None:
    for arguments in ({"signing_key": b"1"}, {"encryption_key": b"1" * 33}, {"trusted": (b"",)}):
        with pytest.raises(TrustError, match="32 are needed"):
            Trust(**arguments)  # type: ignore[arg-type]
    shown = repr(Trust(b"s" * 32, (b"p" * 32,), b"e" * 32))
    assert "sss" not in shown and "eee" not in shown and "ppp" in shown


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = save(tmp_path / "sealed", SEALER)
    plain = save(tmp_path / "plain", Trust())
    (tmp_path / "k").write_bytes(pem(PRIVATE["a"]))
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "cryptography":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    import kvnotes.store

    monkeypatch.delitem(sys.modules, "kvnotes.store.crypto", raising=False)
    monkeypatch.delattr(kvnotes.store, "crypto", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    actions: list[Callable[[], object]] = [
        lambda: save(tmp_path / "x", SIGNER),
        lambda: save(tmp_path / "x", SEALER),
        lambda: load_segment(sealed, trust=SEALER),
        lambda: load_segment(signed),
        lambda: Trust.from_files(signing_key=tmp_path / "k"),
    ]
    for action in actions:
        with pytest.raises(TrustError, match="need the package cryptography") as caught:
            action()
        assert caught.value.hint == "pip install 'kvnotes[crypto]'"
    assert not (tmp_path / "x").exists()
    assert facts_of(load_segment(plain)) == facts_of(segment_of(3, 2))
    with pytest.raises(TrustError, match="is not signed"):
        load_segment(plain, trust=Trust(trusted=(PUBLIC["a"],)))


def test_settings_without_keys_stay_as_they_were() -> None:
    assert Settings(home=Path("/")).trusted_keys == ()

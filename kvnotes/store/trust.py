"""Who made a file, and who may read it: signatures and encryption at rest.

Owns keys and everything that touches `cryptography`, which is imported on first use. A
signature covers the header, which covers every tensor by its digest. An encrypted file
hides everything: text and token ids as well as K/V.

    plain file    u64 | {"kvnotes": header, "signature": ...} | tensors
    sealed file   u64 | {"sealed": cipher, salt, size}        | plain file, in chunks of
                                                                AES-256-GCM
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvnotes.errors import SegmentFormatError, TrustError
from kvnotes.settings import Settings

CHUNK = 1 << 20
"""Plain bytes of one encrypted chunk."""
TAG_NBYTES = 16
KEY_NBYTES = 32
KEY_ID_NBYTES = 8
MAX_ENTRY = 1000
"""Longest metadata text that says how a file is signed or sealed, in characters."""
_CIPHER = "AES-256-GCM"
_SEALED_VERSION = 1


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys that files are made and read with; by default none.

    Args:
        signing_key: 32 bytes of an Ed25519 private key: new files are signed.
        trusted: Public keys, 32 bytes each. If there are any, a file must be signed by one.
        encryption_key: 32 bytes: new files are encrypted, and encrypted ones can be read.
    """

    signing_key: bytes | None = field(default=None, repr=False)
    trusted: tuple[bytes, ...] = ()
    encryption_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for key in (self.signing_key, self.encryption_key, *self.trusted):
            if key is not None and len(key) != KEY_NBYTES:
                raise TrustError(
                    f"a key has {len(key)} bytes, {KEY_NBYTES} are needed",
                    hint="see docs/security.md for how to make keys",
                )

    @classmethod
    def from_settings(cls, settings: Settings) -> Trust:
        """Read the keys that the environment names.

        Raises:
            TrustError: A file cannot be read or holds no such key.
        """
        return cls.from_files(
            signing_key=settings.signing_key,
            trusted=settings.trusted_keys,
            encryption_key=settings.encryption_key,
        )

    @classmethod
    def from_files(
        cls,
        *,
        signing_key: Path | None = None,
        trusted: Iterable[Path] = (),
        encryption_key: Path | None = None,
    ) -> Trust:
        """Read keys: PEM files of Ed25519 keys, and 64 hex digits for encryption.

        Raises:
            TrustError: A file cannot be read or holds no such key.
        """
        return cls(
            None if signing_key is None else _private_bytes(signing_key),
            tuple(_public_bytes(path) for path in trusted),
            None if encryption_key is None else _hex_key(encryption_key),
        )

    def sign(self, header: str) -> str | None:
        """Return the signature of a header, or None without a key."""
        if self.signing_key is None:
            return None
        key = _crypto().private(self.signing_key)
        return _signature_text(_crypto().public_of(key).hex(), key.sign(_signed_text(header)).hex())

    def check(self, header: str, signature: str | None, where: str) -> str:
        """Check who signed a header.

        Returns:
            The signing key as hex digits; "" for a file without a signature.

        Raises:
            SegmentFormatError: The signature is malformed or does not fit the header.
            TrustError: Trusted keys are set, and none of them signed it.
        """
        signer = "" if signature is None else _verified(header, signature, where)
        if self.trusted and (not signer or bytes.fromhex(signer) not in self.trusted):
            who = f"signed by {signer[:16]}" if signer else "not signed"
            raise TrustError(
                f"{where} is {who}; the signature of one of {len(self.trusted)} trusted keys is "
                "needed",
                hint="add its key to the trusted ones, or have it compiled again by one of them",
            )
        return signer

    # -- encryption ------------------------------------------------------------------------

    def sealing(self, num_plain_bytes: int) -> str:
        """Return the metadata of a new sealed file: a salt of its own, no secrets."""
        return _sealing_text(self._key_id(), num_plain_bytes, secrets.token_hex(KEY_NBYTES))

    def encrypt(self, plain: Iterable[bytes | memoryview], sealing: str) -> Iterator[bytes]:
        """Encrypt pieces of a plain file, of any size, into chunks."""
        cipher = self._cipher(json.loads(sealing))
        for index, (chunk, last) in enumerate(_rechunked(plain)):
            yield cipher.encrypt(_nonce(index, last), chunk, sealing.encode())

    def decrypt(self, sealed: memoryview, sealing: str, where: str) -> bytearray:
        """Return the plain file that a sealed one holds.

        Raises:
            TrustError: No key, or another one.
            SegmentFormatError: Damaged.
        """
        entry = _sealing_entry(sealing, len(sealed), where)
        if self.encryption_key is None or entry["key_id"] != self._key_id():
            have = "no key is given" if self.encryption_key is None else "another key is given"
            raise TrustError(
                f"{where} is encrypted with the key {entry['key_id']}, {have}",
                hint="set KVNOTES_ENCRYPTION_KEY to the file of its key",
            )
        cipher, result, start, index = self._cipher(entry), bytearray(), 0, 0
        while start < len(sealed):
            stop = min(start + CHUNK + TAG_NBYTES, len(sealed))
            nonce = _nonce(index, stop == len(sealed))
            try:
                result += cipher.decrypt(nonce, sealed[start:stop], sealing.encode())
            except _crypto().invalid_tag as error:
                raise SegmentFormatError(
                    f"{where} cannot be decrypted at byte {start}: it was changed or cut off",
                    hint="the file is damaged; compile the segment again",
                ) from error
            start, index = stop, index + 1
        return result

    def _key_id(self) -> str:
        """Short name of the encryption key, which does not give it away."""
        assert self.encryption_key is not None
        digest = hashlib.sha256(b"kvnotes key id" + self.encryption_key)
        return digest.digest()[:KEY_ID_NBYTES].hex()

    def _cipher(self, entry: dict[str, Any]) -> Any:
        assert self.encryption_key is not None
        return _crypto().cipher(self.encryption_key, bytes.fromhex(entry["salt"]))


NO_TRUST = Trust()
"""Nothing is signed, checked or encrypted."""


def sealed_size(num_plain_bytes: int) -> int:
    """Return the number of encrypted bytes."""
    return num_plain_bytes + max(1, -(-num_plain_bytes // CHUNK)) * TAG_NBYTES


def _signed_text(header: str) -> bytes:
    return b"kvnotes signature 1\n" + header.encode()


def _verified(header: str, signature: str, where: str) -> str:
    entry = _signature_entry(signature, where)
    try:
        key = _crypto().public(bytes.fromhex(entry["key"]))
        key.verify(bytes.fromhex(entry["signature"]), _signed_text(header))
    except (_crypto().invalid_signature, ValueError) as error:
        raise SegmentFormatError(
            f"{where} has a signature that does not fit it",
            hint="the file was changed after it was signed; get it again",
        ) from error
    return str(entry["key"])


def _signature_text(key: str, signature: str) -> str:
    entry = {"algorithm": "ed25519", "key": key, "signature": signature}
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def _signature_entry(signature: str, where: str) -> dict[str, Any]:
    """Return the parts of a signature that is written exactly as we write one."""
    entry = _texts_of(signature)
    key, value = entry.get("key"), entry.get("signature")
    fine = _is_hex(key, KEY_NBYTES) and _is_hex(value, 2 * KEY_NBYTES)
    if not fine or signature != _signature_text(str(key), str(value)):
        raise SegmentFormatError(
            f"{where} has a signature of an unknown form", hint="the file is damaged; get it again"
        )
    return entry


def _sealing_text(key_id: str, num_plain_bytes: int, salt: str) -> str:
    entry = {
        "version": _SEALED_VERSION,
        "cipher": _CIPHER,
        "chunk": CHUNK,
        "key_id": key_id,
        "nbytes": num_plain_bytes,
        "salt": salt,
    }
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def _sealing_entry(sealing: str, num_bytes: int, where: str) -> dict[str, Any]:
    """Return the parts of a sealing that is written exactly as we write one."""
    entry = _texts_of(sealing)
    key_id, nbytes, salt = (entry.get(name) for name in ("key_id", "nbytes", "salt"))
    fine = _is_hex(key_id, KEY_ID_NBYTES) and _is_hex(salt, KEY_NBYTES)
    fine = fine and type(nbytes) is int and nbytes >= 0 and sealed_size(nbytes) == num_bytes
    if not fine or sealing != _sealing_text(str(key_id), entry["nbytes"], str(salt)):
        raise SegmentFormatError(
            f"{where} is encrypted in a form this kvnotes does not know, or was cut off",
            hint="upgrade kvnotes, or compile the segment again",
        )
    return entry


def _texts_of(text: str) -> dict[str, Any]:
    """Parse a small JSON object; {} for anything else."""
    try:
        entry = json.loads(text) if len(text) <= MAX_ENTRY else None
    except (ValueError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else {}


def _is_hex(value: object, num_bytes: int) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", value))


def _rechunked(pieces: Iterable[bytes | memoryview]) -> Iterator[tuple[bytes, bool]]:
    """Cut a stream into chunks; says which one is the last."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            room = CHUNK - len(held)
            if not room:
                yield bytes(held), False
                held.clear()
                room = CHUNK
            held += view[:room]
            view = view[room:]
    yield bytes(held), True


def _nonce(index: int, last: bool) -> bytes:
    """96 bits, never the same twice under one file's key; the last chunk is marked."""
    return b"\0\0\0" + struct.pack(">Q", index) + (b"\1" if last else b"\0")


def _private_bytes(path: Path) -> bytes:
    return bytes(_crypto().private_from_pem(_read_key(path), path))


def _public_bytes(path: Path) -> bytes:
    return bytes(_crypto().public_from_pem(_read_key(path), path))


def _hex_key(path: Path) -> bytes:
    text = _read_key(path).decode("latin-1").strip()
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_NBYTES}}}", text):
        raise TrustError(
            f"the key file {path} holds {len(text)} characters, not {2 * KEY_NBYTES} hex digits",
            hint="make one: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return bytes.fromhex(text)


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise TrustError(
            f"cannot read the key file {path}: {reason}", hint="check its name and mode"
        ) from error


def _crypto() -> Any:
    try:
        from kvnotes.store import crypto
    except ImportError as error:
        raise TrustError(
            "signatures and encryption need the package cryptography, which is not installed",
            hint="pip install 'kvnotes[crypto]'",
        ) from error
    return crypto

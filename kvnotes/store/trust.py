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
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnotes.errors import SegmentFormatError, TrustError

CHUNK = 1 << 20
"""Plain bytes of one encrypted chunk."""
TAG_NBYTES = 16
KEY_NBYTES = 32
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

    signing_key: bytes | None = None
    trusted: tuple[bytes, ...] = ()
    encryption_key: bytes | None = None

    def __post_init__(self) -> None:
        for key in (self.signing_key, self.encryption_key, *self.trusted):
            if key is not None and len(key) != KEY_NBYTES:
                raise TrustError(
                    f"a key has {len(key)} bytes, {KEY_NBYTES} are needed",
                    hint="see docs/security.md for how to make keys",
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
        entry = {
            "algorithm": "ed25519",
            "key": _crypto().public_of(key).hex(),
            "signature": key.sign(_signed_text(header)).hex(),
        }
        return json.dumps(entry, sort_keys=True, separators=(",", ":"))

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
                f"{where} is {who}, {len(self.trusted)} other keys are trusted",
                hint="add its key to the trusted ones, or have it compiled again by one of them",
            )
        return signer

    # -- encryption ------------------------------------------------------------------------

    def sealing(self, num_plain_bytes: int) -> str:
        """Return the metadata of a new sealed file: a salt of its own, no secrets."""
        entry = {
            "version": _SEALED_VERSION,
            "cipher": _CIPHER,
            "chunk": CHUNK,
            "key_id": self._key_id(),
            "nbytes": num_plain_bytes,
            "salt": secrets.token_hex(KEY_NBYTES),
        }
        return json.dumps(entry, sort_keys=True, separators=(",", ":"))

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
        return hashlib.sha256(b"kvnotes key id" + self.encryption_key).hexdigest()[:16]

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
    return entry["key"]


def _signature_entry(signature: str, where: str) -> dict[str, str]:
    try:
        entry = json.loads(signature)
        fine = set(entry) == {"algorithm", "key", "signature"} and entry["algorithm"] == "ed25519"
        fine = fine and len(bytes.fromhex(entry["key"])) == KEY_NBYTES
    except (ValueError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise SegmentFormatError(
            f"{where} has a signature of an unknown form", hint="the file is damaged; get it again"
        )
    return {name: str(entry[name]) for name in entry}


def _sealing_entry(sealing: str, num_bytes: int, where: str) -> dict[str, Any]:
    names = {"version", "cipher", "chunk", "key_id", "nbytes", "salt"}
    try:
        entry = json.loads(sealing)
        fine = isinstance(entry, dict) and set(entry) == names
        fine = fine and (entry["version"], entry["cipher"]) == (_SEALED_VERSION, _CIPHER)
        fine = fine and entry["chunk"] == CHUNK and len(bytes.fromhex(entry["salt"])) == KEY_NBYTES
        fine = fine and type(entry["nbytes"]) is int and entry["nbytes"] >= 0
        fine = fine and sealed_size(entry["nbytes"]) == num_bytes
    except (ValueError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise SegmentFormatError(
            f"{where} is encrypted in a form this kvnotes does not know, or was cut off",
            hint="upgrade kvnotes, or compile the segment again",
        )
    found: dict[str, Any] = entry
    return found


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
    try:
        return bytes.fromhex(_read_key(path).decode("ascii").strip())
    except ValueError as error:
        raise TrustError(
            f"the key file {path} holds no hex digits",
            hint="make one: python -c 'import secrets; print(secrets.token_hex(32))'",
        ) from error


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrustError(
            f"cannot read the key file {path}: {error.strerror}", hint="check its name and mode"
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

"""The few calls of `cryptography` that kvnotes uses; imported only where keys are."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
)

from kvnotes.errors import TrustError

invalid_signature = InvalidSignature
invalid_tag = InvalidTag

_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem"
_MAKE_PUBLIC = "openssl pkey -in key.pem -pubout -out key.pub"


def private(key: bytes) -> Ed25519PrivateKey:
    """Return a private key from its 32 bytes."""
    return Ed25519PrivateKey.from_private_bytes(key)


def public(key: bytes) -> Ed25519PublicKey:
    """Return a public key from its 32 bytes."""
    return Ed25519PublicKey.from_public_bytes(key)


def public_of(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes of the public half."""
    return key.public_key().public_bytes_raw()


def cipher(key: bytes, salt: bytes) -> AESGCM:
    """Return the cipher of one file: its key is derived from the secret and the file's salt."""
    derive = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"kvnotes sealed file 1")
    return AESGCM(derive.derive(key))


def private_from_pem(content: bytes, path: Path) -> bytes:
    """Return the 32 bytes of a private key in PEM form.

    Raises:
        TrustError: Not an unencrypted Ed25519 key.
    """
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TrustError(f"{path} holds no private key: {error}", hint=_MAKE) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise TrustError(f"{path} holds a {type(key).__name__}, Ed25519 is needed", hint=_MAKE)
    return key.private_bytes_raw()


def public_from_pem(content: bytes, path: Path) -> bytes:
    """Return the 32 bytes of a public key in PEM form.

    Raises:
        TrustError: Not an Ed25519 key.
    """
    try:
        key = load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TrustError(f"{path} holds no public key: {error}", hint=_MAKE_PUBLIC) from error
    if not isinstance(key, Ed25519PublicKey):
        raise TrustError(
            f"{path} holds a {type(key).__name__}, Ed25519 is needed", hint=_MAKE_PUBLIC
        )
    return key.public_bytes_raw()

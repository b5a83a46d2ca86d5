"""Signed documents: JSON with an Ed25519 signature, verified before the content is used.

    {"entry": {...}, "key_id": "16 hex", "signature": "base64"}

The signature covers PREFIX + canonical_json(entry). `cryptography` is loaded when a signature is
first created or verified, not by importing this module.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, Refused

MAX_SIGNED_BYTES = 256 * 1024
KEY_BYTES = 32
_PREFIX = b"understudy-entry/1\0"
_KIND = "ed25519:"

Trusted = Mapping[str, bytes]
"""Public keys by their id."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs documents of a deployment; holds the private key, which repr never shows."""

    _private: bytes

    def __post_init__(self) -> None:
        if len(self._private) != KEY_BYTES:
            raise ConfigError(
                f"the signing key has {len(self._private)} bytes instead of {KEY_BYTES}; restore "
                "it from a backup"
            )

    def __repr__(self) -> str:
        return f"Signer({self.key_id})"

    @property
    def public(self) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._private).public_key().public_bytes_raw()

    @property
    def key_id(self) -> str:
        return key_id(self.public)

    def sign(self, entry: Mapping[str, Any]) -> bytes:
        """The entry as a signed document."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        signature = Ed25519PrivateKey.from_private_bytes(self._private).sign(
            _PREFIX + canonical_json(entry)
        )
        signed = {
            "entry": entry,
            "key_id": self.key_id,
            "signature": base64.b64encode(signature).decode(),
        }
        raw = canonical_json(signed)
        if len(raw) > MAX_SIGNED_BYTES:
            raise ConfigError(
                f"the signed document has {len(raw)} bytes; sign a smaller one, of at most "
                f"{MAX_SIGNED_BYTES} bytes with its signature"
            )
        return raw


def open_signed(raw: bytes, trusted: Trusted) -> dict[str, Any]:
    """Return the entry that a trusted key signed; Refused if the document is not valid."""
    if len(raw) > MAX_SIGNED_BYTES:
        raise Refused(
            "too_large",
            f"the signed document has {len(raw)} bytes; at most {MAX_SIGNED_BYTES} are accepted",
        )
    document = strict_json(raw)
    if not isinstance(document, dict) or document.keys() != {"entry", "key_id", "signature"}:
        raise Refused(
            "bad_entry", "not a signed document, which has exactly entry, key_id and signature"
        )
    entry = document["entry"]
    name = document["key_id"]
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise Refused("bad_entry", "entry must be an object and key_id must be text")
    public = trusted.get(name)
    if public is None:
        raise Refused(
            "unknown_key",
            f"signed by key {name[:16]!r}, which is not one of the {len(trusted)} trusted keys",
        )
    if not _is_valid(public, document["signature"], _PREFIX + canonical_json(entry)):
        raise Refused("bad_signature", f"the signature by key {name} does not match the entry")
    return entry


def _is_valid(public: bytes, signature: Any, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        decoded = base64.b64decode(signature, validate=True)
        if base64.b64encode(decoded).decode() != signature:
            return False  # base64 has several texts for the same bytes; only one is accepted
        Ed25519PublicKey.from_public_bytes(public).verify(decoded, message)
    except (InvalidSignature, binascii.Error, TypeError, ValueError):
        return False
    return True


def key_id(public: bytes) -> str:
    """The short id of a public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def public_key_text(public: bytes) -> str:
    """A public key as text, for people to copy."""
    return _KIND + base64.b64encode(public).decode()


def trusted_keys(*texts: str) -> dict[str, bytes]:
    """Parse public keys of the form `ed25519:BASE64`; returns them by id."""
    keys = {}
    for text in texts:
        try:
            raw = base64.b64decode(text.removeprefix(_KIND), validate=True)
        except binascii.Error:
            raw = b""
        if not text.startswith(_KIND) or len(raw) != KEY_BYTES:
            raise ConfigError(
                f"{text[:60]!r} is not a public key; give one as {_KIND}BASE64, as in the files of "
                "models/trust in the platform's data folder"
            )
        keys[key_id(raw)] = raw
    return keys

"""Signed documents: only what a trusted key signed is accepted."""

import base64
import json

import numpy as np
import pytest

from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError, Refused
from understudy.core.signed import (
    MAX_SIGNED_BYTES,
    Signer,
    key_id,
    open_signed,
    public_key_text,
    trusted_keys,
)

SIGNER = Signer(bytes(range(32)))
TRUSTED = {SIGNER.key_id: SIGNER.public}
ENTRY = {"kind": "point", "model_no": 7, "why": "Größe ±1"}


def test_a_signed_document_opens_as_the_signed_entry():
    assert open_signed(SIGNER.sign(ENTRY), TRUSTED) == ENTRY
    assert trusted_keys(public_key_text(SIGNER.public)) == TRUSTED


def test_every_flipped_bit_is_refused():
    raw = SIGNER.sign(ENTRY)
    rng = np.random.default_rng(0)
    last = raw.index(b'"}') * 8  # the unused bits of the last base64 character are there too
    for at in [*range(last - 32, last), *rng.integers(0, len(raw) * 8, 1000)]:
        flipped = bytearray(raw)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(Refused):
            open_signed(bytes(flipped), TRUSTED)


def test_unknown_keys_missing_signatures_and_changed_entries_are_refused():
    stranger = Signer(b"x" * 32)
    raw = json.loads(SIGNER.sign(ENTRY))
    for wrong, reason in [
        (stranger.sign(ENTRY), "unknown_key"),
        (canonical_json({"entry": ENTRY}), "bad_entry"),
        (canonical_json(raw | {"signature": ""}), "bad_signature"),
        (canonical_json(raw | {"signature": 5}), "bad_signature"),
        (canonical_json(raw | {"entry": ENTRY | {"model_no": 8}}), "bad_signature"),
        (canonical_json(raw | {"key_id": [1]}), "bad_entry"),
        (canonical_json(raw | {"more": 1}), "bad_entry"),
        (b"[]", "bad_entry"),
        (b"{", "bad_json"),
        (b" " * (MAX_SIGNED_BYTES + 1), "too_large"),
    ]:
        with pytest.raises(Refused) as refused:
            open_signed(wrong, TRUSTED)
        assert refused.value.reason == reason


def test_a_signature_without_the_prefix_is_refused():
    """The prefix prevents a signature for another purpose from passing as an entry's."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    bare = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).sign(canonical_json(ENTRY))
    raw = json.loads(SIGNER.sign(ENTRY)) | {"signature": base64.b64encode(bare).decode()}
    with pytest.raises(Refused, match="bad_signature"):
        open_signed(canonical_json(raw), TRUSTED)


def test_the_private_key_is_never_shown():
    assert key_id(SIGNER.public) in repr(SIGNER)
    assert bytes(range(32)).hex() not in repr(SIGNER)
    assert "\\x01" not in repr(SIGNER)


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", "ed25519:@@@"])
def test_text_that_is_not_a_public_key_is_refused_with_a_hint(text: str):
    with pytest.raises(ConfigError, match="ed25519:BASE64"):
        trusted_keys(text)

"""Trust: a deployment's public keys, as objects beside its models, for clients that read them on the same machine.

trust/KEYID.txt      ed25519:BASE64
"""

from understudy.core.errors import ConfigError
from understudy.core.ports import Objects
from understudy.core.signed import Signer, public_key_text, trusted_keys


def write_trust(objects: Objects, signer: Signer) -> None:
    """Leave the signer's public key where clients look for it; called by whoever holds the private one."""
    objects.create(f"trust/{signer.key_id}.txt", public_key_text(signer.public).encode())


def read_trust(objects: Objects) -> tuple[str, ...]:
    """The public keys that were left, as texts; what is none is passed over."""
    texts = []
    for name in objects.list("trust"):
        text = (objects.get(name) or b"").decode("ascii", "replace").strip()
        try:
            trusted_keys(text)
        except ConfigError:
            continue
        texts.append(text)
    return tuple(texts)

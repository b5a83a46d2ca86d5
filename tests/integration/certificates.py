"""Certificates for servers with TLS: our own authority, what it signed, and an unrelated one."""

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_certificates(folder: Path, names: Mapping[str, Sequence[str]]) -> None:
    """Write `ca.pem`, `stranger.pem`, and a `NAME.pem` with key and certificate per name."""
    key, authority = _authority("understudy tests")
    for who, addresses in names.items():
        own = ec.generate_private_key(ec.SECP256R1())
        held = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address(one)) for one in addresses]
        )
        signed = (
            _builder(who, issuer=authority.subject)
            .public_key(own.public_key())
            .add_extension(held, False)
        )
        private = own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / f"{who}.pem").write_bytes(private + _pem(signed.sign(key, hashes.SHA256())))
    (folder / "ca.pem").write_bytes(_pem(authority))
    (folder / "stranger.pem").write_bytes(_pem(_authority("somebody else")[1]))


def _authority(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name).public_key(key.public_key())
    return key, builder.add_extension(x509.BasicConstraints(True, None), True).sign(
        key, hashes.SHA256()
    )


def _builder(name: str, *, issuer: x509.Name | None = None) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=2))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

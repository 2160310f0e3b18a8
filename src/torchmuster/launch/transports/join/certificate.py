"""The host's certificate: made for one run, identified by its fingerprint, never stored.

It is self-signed. The join code contains its fingerprint, and a joining machine identifies the host by
that alone, independently of clocks and host names. It is a function of its seed: nodes that share a secret
know the certificate in advance.
"""

import datetime
import hashlib
import hmac
import os
import secrets
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join.code import FINGERPRINT_BYTES

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SEED_BYTES = 32
# Clients do not check the dates, but some libraries require them.
_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2049, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A server's TLS context and the fingerprint of its certificate."""

    context: ssl.SSLContext = field(repr=False)
    fingerprint: bytes


def make_certificate(seed: bytes | None = None) -> Certificate:
    """Make the key and certificate of this seed (Ed25519), and load both into a server context. None: a random seed."""
    key, certificate = _from_seed(secrets.token_bytes(SEED_BYTES) if seed is None else seed)
    from cryptography.hazmat.primitives import serialization

    password = secrets.token_bytes(32)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(
        context=_server_context(pem, password),
        fingerprint=fingerprint_of(certificate.public_bytes(serialization.Encoding.DER)),
    )


def fingerprint_from(seed: bytes) -> bytes:
    """Return the fingerprint of the certificate of this seed."""
    from cryptography.hazmat.primitives import serialization

    return fingerprint_of(_from_seed(seed)[1].public_bytes(serialization.Encoding.DER))


def _from_seed(seed: bytes) -> "tuple[Ed25519PrivateKey, x509.Certificate]":
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise Impossible(
            "machines cannot join: the package cryptography is not installed on this host",
            why="the host needs it to create its TLS certificate",
            fix="pip install cryptography",
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "torchmuster")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, None)
    )
    return key, certificate


def fingerprint_of(certificate_der: bytes) -> bytes:
    """Return the part of the SHA-256 that join codes contain."""
    return hashlib.sha256(certificate_der).digest()[:FINGERPRINT_BYTES]


def is_known(certificate_der: bytes | None, fingerprint: bytes) -> bool:
    """Return whether this is the certificate with that fingerprint."""
    return certificate_der is not None and hmac.compare_digest(
        fingerprint_of(certificate_der), fingerprint
    )


def client_context() -> ssl.SSLContext:
    """Return a context that accepts any certificate: the caller must check ``is_known`` before sending."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _server_context(pem: bytes, password: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Every machine connects once, so session tickets are not needed.
    context.num_tickets = 0
    # The ssl module reads keys from files only. The file is readable by its owner only
    # (mode 0600), is deleted at once, and its key is encrypted with a password that is never stored.
    descriptor, path = tempfile.mkstemp(prefix="torchmuster-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path, password=password)
    finally:
        Path(path).unlink()
    return context

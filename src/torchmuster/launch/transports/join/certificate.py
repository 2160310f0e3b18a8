"""The host's certificate: made for one run, identified by its fingerprint, never stored.

It is self-signed. The join code contains its fingerprint, and a joining machine identifies the host by
that alone, independently of clocks and host names.
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

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join.code import FINGERPRINT_BYTES

# Clients do not check the dates, but some libraries require them.
_LIFETIME = datetime.timedelta(days=3650)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A server's TLS context and the fingerprint of its certificate."""

    context: ssl.SSLContext = field(repr=False)
    fingerprint: bytes


def make_certificate() -> Certificate:
    """Make a new key and a certificate for it (ECDSA, P-256), and load both into a server context."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise Impossible(
            "machines cannot join: the package cryptography is not installed on this host",
            why="the host needs it to create its TLS certificate",
            fix="pip install cryptography",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "torchmuster")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
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

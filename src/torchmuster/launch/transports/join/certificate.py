"""The host's certificate: made for one run, identified by its pin, never stored.

It is self-signed. The join code contains its pin, the first bytes of its SHA-256, and a joining machine identifies
the host by that alone, independently of clocks and host names. It is a function of its seed: nodes that share a
secret know the certificate in advance.
"""

import datetime
import hashlib
import hmac
import os
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join.code import PIN_BYTES, SEED_BYTES

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Clients do not check the dates, but some libraries require them.
_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2049, 1, 1, tzinfo=datetime.UTC)


class Certificate(NamedTuple):
    """A server's TLS context and the pin of its certificate."""

    context: ssl.SSLContext
    pin: bytes


def make_certificate(seed: bytes | None = None) -> Certificate:
    """Make the key and certificate of this seed (Ed25519), and load both into a server context. None: a random seed."""
    key, certificate = _from_seed(seed or secrets.token_bytes(SEED_BYTES))
    from cryptography.hazmat.primitives import serialization

    password = secrets.token_bytes(32)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    pem += certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(context=_server_context(pem, password), pin=_pin_of(certificate))


def pin_from_seed(seed: bytes) -> bytes:
    """Return the pin of the certificate of this seed."""
    return _pin_of(_from_seed(seed)[1])


def has_pin(certificate_der: bytes | None, pin: bytes) -> bool:
    """Return whether this is the certificate with that pin."""
    if certificate_der is None:
        return False
    return hmac.compare_digest(hashlib.sha256(certificate_der).digest()[:PIN_BYTES], pin)


def client_context() -> ssl.SSLContext:
    """Return a context that accepts any certificate: the caller must check ``has_pin`` before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


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
    builder = x509.CertificateBuilder(
        subject_name=name,
        issuer_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=_FROM,
        not_valid_after=_UNTIL,
    )
    return key, builder.sign(key, None)


def _pin_of(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives import hashes

    return certificate.fingerprint(hashes.SHA256())[:PIN_BYTES]


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

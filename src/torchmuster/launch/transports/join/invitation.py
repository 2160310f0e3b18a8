"""Secrets that all nodes of a run share, and from which each makes its own join code.

srun hands the same standard input, an invitation, to all tasks of a job; Kubernetes hands the same Secret to all pods. Neither
grows with the number of nodes. A place's token, and in pods also the launcher's certificate, are derived from the secret.
"""

import hashlib
import hmac
from typing import Annotated

import msgspec

from torchmuster.launch import protocol
from torchmuster.launch.transports.join.code import FINGERPRINT_BYTES, TOKEN_BYTES, JoinCode

SECRET_BYTES = 32
_SALT = b"torchmuster join secret"


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the launcher listens, its certificate's fingerprint, and the secret of this run."""

    addresses: tuple[str, ...]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    fingerprint: Annotated[
        bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)
    ]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

    def __repr__(self) -> str:
        return f"Invitation(addresses={self.addresses}, port={self.port})"

    def code_for(self, place: int) -> JoinCode:
        """Return the join code of a place."""
        return JoinCode(
            place=place,
            port=self.port,
            addresses=self.addresses,
            token=token_for(self.secret, place),
            fingerprint=self.fingerprint,
        )

    def to_line(self) -> bytes:
        """Return the invitation as one line."""
        return msgspec.json.encode(self) + b"\n"


_read = msgspec.json.Decoder(Invitation).decode


def read_invitation(line: bytes) -> Invitation:
    """Read an invitation; raises ``UnreadableMessage``."""
    return protocol.read_with(_read, line)


def token_for(secret: bytes, place: int) -> bytes:
    """Return the token of a place."""
    return hmac.digest(secret, b"torchmuster place %d" % place, "sha256")[:TOKEN_BYTES]


def secret_from(text: str) -> bytes:
    """Return the secret of a text that all nodes of a run have.

    Deliberately slow: any client that connects sees a certificate that is derived from the text, and can try to guess it.
    """
    return hashlib.scrypt(text.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=SECRET_BYTES)


def certificate_seed(secret: bytes) -> bytes:
    """Return the seed of the launcher's certificate."""
    return hmac.digest(secret, b"torchmuster certificate", "sha256")

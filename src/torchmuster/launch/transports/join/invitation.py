"""The invitation: one text from which every node of a scheduler's job makes its own join code.

A scheduler hands the same standard input to all tasks, so an invitation does not grow with the number of nodes. A place's
token is derived from the secret in it.
"""

import hmac
from typing import Annotated

import msgspec

from torchmuster.launch import protocol
from torchmuster.launch.transports.join.code import FINGERPRINT_BYTES, TOKEN_BYTES, JoinCode

SECRET_BYTES = 32


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

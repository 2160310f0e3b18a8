"""The first words on a TLS stream: a machine's ``join``, the host's ``welcome`` or ``sorry``.

After a welcome follow the messages of wire.py. See docs/wire-protocol.md.
"""

from typing import Annotated, Literal

import msgspec

from torchmuster import __version__
from torchmuster.launch import protocol
from torchmuster.launch.transports.join.code import MOST_PLACES, TOKEN_BYTES

JOIN_LIMIT = 1024
NAME_LIMIT = 64

Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST_PLACES)]
Reason = Literal["unknown-code", "used-code", "other-protocol"]


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="join"):
    """What a machine says to be let in. These fields are the same in every version."""

    protocol: Number
    place: Number
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    host: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    torchmuster: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]

    def __repr__(self) -> str:
        return f"Join(protocol={self.protocol}, place={self.place}, host={self.host!r})"


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="welcome"):
    """The machine has its place; from here on the messages of wire.py are spoken."""

    protocol: Number
    place: Number


class Sorry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sorry"):
    """The machine is not let in, and why. The connection is closed after this."""

    reason: Reason
    why: str
    protocol: Number
    torchmuster: str


_encode = msgspec.json.Encoder().encode
_joins = msgspec.json.Decoder(Join)
_answers: msgspec.json.Decoder[Welcome | Sorry] = msgspec.json.Decoder(Welcome | Sorry)


def encode(message: Join | Welcome | Sorry) -> bytes:
    """Return a message as JSON."""
    return _encode(message)


def decode_join(data: bytes) -> Join:
    """Read what a machine says to be let in; raises ``wire.Garbled``."""
    return protocol.read_with(_joins.decode, data)


def decode_answer(data: bytes) -> Welcome | Sorry:
    """Read the host's answer; raises ``wire.Garbled``."""
    return protocol.read_with(_answers.decode, data)


def sorry(reason: Reason, why: str) -> Sorry:
    """Return a refusal in the name of this torchmuster."""
    return Sorry(reason=reason, why=why, protocol=protocol.PROTOCOL, torchmuster=__version__)

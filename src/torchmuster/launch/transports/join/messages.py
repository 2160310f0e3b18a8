"""The messages of the handshake: a machine asks to join, and the host accepts or refuses it.

After ``Welcome``, both sides send the messages of ``protocol.py``.
"""

from typing import Annotated, Literal

import msgspec

from torchmuster.launch import protocol
from torchmuster.launch.transports.join.code import SECRET_BYTES

JOIN_LIMIT = 4096  # bytes of a join request: its sender is not known yet
NAME_LIMIT = 64
MOST_PLACES = 2**16

Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST_PLACES)]
Reason = Literal["wrong-code", "no-place", "other-protocol"]


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="join"):
    """A machine's join request. Without a place, the machine gets the first free one."""

    protocol: Number
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    host: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    torchmuster: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    place: Number | None = None

    def __repr__(self) -> str:
        return f"Join(protocol={self.protocol}, place={self.place}, host={self.host!r})"


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="welcome"):
    """The machine has its place; from here on the messages of protocol.py are used."""

    protocol: Number
    place: Number


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """The machine is rejected, and why. The connection is closed after this."""

    reason: Reason
    why: str
    protocol: Number
    torchmuster: str


_joins = msgspec.json.Decoder(Join)
_answers: msgspec.json.Decoder[Welcome | Refused] = msgspec.json.Decoder(Welcome | Refused)


def decode_join(data: bytes) -> Join:
    """Decode a join request; raises ``UnreadableMessage``."""
    return protocol.read_with(_joins.decode, data)


def decode_answer(data: bytes) -> Welcome | Refused:
    """Decode the host's answer; raises ``UnreadableMessage``."""
    return protocol.read_with(_answers.decode, data)

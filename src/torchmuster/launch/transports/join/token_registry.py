"""Which machine has which place, and the token of each free place.

A token is valid once. Used tokens are kept, so that the error for a later attempt can name the machine
that used it. A place that becomes free gets a new token.
"""

import hmac
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A machine's join request. These fields are the same in every version."""

    protocol: Number
    place: Number
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    host: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    torchmuster: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]

    def __repr__(self) -> str:
        return f"Join(protocol={self.protocol}, place={self.place}, host={self.host!r})"


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="welcome"):
    """The machine has its place; from here on the messages of protocol.py are used."""

    protocol: Number
    place: Number


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sorry"):
    """The machine is rejected, and why. The connection is closed after this."""

    reason: Reason
    why: str
    protocol: Number
    torchmuster: str


_encode = msgspec.json.Encoder().encode
_joins = msgspec.json.Decoder(Join)
_answers: msgspec.json.Decoder[Welcome | Refused] = msgspec.json.Decoder(Welcome | Refused)


def encode_join_message(message: Join | Welcome | Refused) -> bytes:
    """Return a message as JSON."""
    return _encode(message)


def decode_join(data: bytes) -> Join:
    """Decode a join request; raises ``UnreadableMessage``."""
    return protocol.read_with(_joins.decode, data)


def decode_answer(data: bytes) -> Welcome | Refused:
    """Decode the host's answer; raises ``UnreadableMessage``."""
    return protocol.read_with(_answers.decode, data)


def refused_message(reason: Reason, why: str) -> Refused:
    """Return a refusal with this torchmuster's version."""
    return Refused(reason=reason, why=why, protocol=protocol.PROTOCOL, torchmuster=__version__)


# Used tokens remembered for each place; older ones count as unknown.
_REMEMBERED = 8


def new_token(_: int) -> bytes:
    """Return a random token that cannot be guessed."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True)
class JoinedHost:
    """A machine that has, or had, a place."""

    host: str
    address: str
    since: str  # HH:MM:SS, the host's clock

    def __str__(self) -> str:
        return f"{self.host} ({self.address}) at {self.since}"


@dataclass(kw_only=True)
class _Place:
    token: bytes = field(repr=False)
    guest: JoinedHost | None = None
    used: deque[tuple[bytes, JoinedHost]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), repr=False
    )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a token is not valid for a place; ``by`` is the machine that used it before."""

    by: JoinedHost | None


class TokenRegistry:
    """The places from ``first`` on, by number; ``make_token`` is called with the number of a place."""

    def __init__(
        self, first: int, count: int, *, make_token: Callable[[int], bytes] = new_token
    ) -> None:
        self._make_token = make_token
        self._places = {
            number: _Place(token=make_token(number)) for number in range(first, first + count)
        }

    def missing(self) -> tuple[int, ...]:
        """Return the free places."""
        return tuple(number for number, place in self._places.items() if place.guest is None)

    def token(self, number: int) -> bytes:
        """Return the token of a place."""
        return self._places[number].token

    def names(self) -> tuple[str, ...]:
        """Return the display names of the machines; equal names get their address added."""
        hosts = Counter(place.guest.host for place in self._places.values() if place.guest)
        return tuple(self._name(number, hosts) for number in self._places)

    def _name(self, number: int, hosts: Counter[str]) -> str:
        guest = self._places[number].guest
        if guest is None:
            return f"machine {number + 1}"
        return guest.host if hosts[guest.host] == 1 else f"{guest.host} ({guest.address})"

    def examine(self, number: int, token: bytes) -> Refusal | None:
        """Return why this token is not valid for this place now, or None if it is."""
        place = self._places.get(number)
        # A wrong number takes as long as a wrong token.
        right = hmac.compare_digest(place.token if place else bytes(TOKEN_BYTES), token)
        if place is None:
            return Refusal(by=None)
        if right and place.guest is None:
            return None
        before = [guest for used, guest in place.used if hmac.compare_digest(used, token)]
        return Refusal(by=before[0] if before else None)

    def seat(self, number: int, *, host: str, address: str) -> JoinedHost:
        """Assign a place to a machine whose token was examined; the token becomes invalid."""
        place = self._places[number]
        guest = JoinedHost(host=host, address=address, since=time.strftime("%H:%M:%S"))
        place.used.append((place.token, guest))
        place.guest = guest
        return guest

    def vacate(self, number: int) -> None:
        """Free a place and give it a new token; the old one stays invalid."""
        place = self._places[number]
        place.guest = None
        place.token = self._make_token(number)

"""Who has which place, and the token that opens each place that is still free.

A token opens its place once. It is kept after that, to say to whoever comes with it again who used
it. A place that becomes free gets a new one.
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


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sorry"):
    """The machine is not let in, and why. The connection is closed after this."""

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
    """Read what a machine says to be let in; raises ``wire.Garbled``."""
    return protocol.read_with(_joins.decode, data)


def decode_answer(data: bytes) -> Welcome | Refused:
    """Read the host's answer; raises ``wire.Garbled``."""
    return protocol.read_with(_answers.decode, data)


def refused_message(reason: Reason, why: str) -> Refused:
    """Return a refusal in the name of this torchmuster."""
    return Refused(reason=reason, why=why, protocol=protocol.PROTOCOL, torchmuster=__version__)


# More used tokens than this are not remembered for a place; they are then as unknown as any other.
_REMEMBERED = 8


def new_token() -> bytes:
    """Return a token that nobody can guess."""
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
    """Why a token does not open a place; ``by`` is who used it before."""

    by: JoinedHost | None


class TokenRegistry:
    """The places from ``first`` on, by number."""

    def __init__(
        self, first: int, count: int, *, make_token: Callable[[], bytes] = new_token
    ) -> None:
        self._make_token = make_token
        self._places = {
            number: _Place(token=make_token()) for number in range(first, first + count)
        }

    def missing(self) -> tuple[int, ...]:
        """Return the places that nobody has yet."""
        return tuple(number for number, place in self._places.items() if place.guest is None)

    def token(self, number: int) -> bytes:
        """Return the token that opens a place."""
        return self._places[number].token

    def names(self) -> tuple[str, ...]:
        """Return the names people know the machines by; two of one name are told apart by address."""
        hosts = Counter(place.guest.host for place in self._places.values() if place.guest)
        return tuple(self._name(number, hosts) for number in self._places)

    def _name(self, number: int, hosts: Counter[str]) -> str:
        guest = self._places[number].guest
        if guest is None:
            return f"machine {number + 1}"
        return guest.host if hosts[guest.host] == 1 else f"{guest.host} ({guest.address})"

    def examine(self, number: int, token: bytes) -> Refusal | None:
        """Return why this token does not open this place now, or None if it does."""
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
        """Give a place to a machine whose token was examined, and spend the token."""
        place = self._places[number]
        guest = JoinedHost(host=host, address=address, since=time.strftime("%H:%M:%S"))
        place.used.append((place.token, guest))
        place.guest = guest
        return guest

    def vacate(self, number: int) -> None:
        """Free a place and give it a new token; the old one stays spent."""
        place = self._places[number]
        place.guest = None
        place.token = self._make_token()

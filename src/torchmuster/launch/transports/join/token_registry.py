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

from torchmuster.launch.transports.join.code import TOKEN_BYTES

# More used tokens than this are not remembered for a place; they are then as unknown as any other.
_REMEMBERED = 8


def new_token() -> bytes:
    """Return a token that nobody can guess."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A machine that has, or had, a place."""

    host: str
    address: str
    since: str  # HH:MM:SS, the host's clock

    def __str__(self) -> str:
        return f"{self.host} ({self.address}) at {self.since}"


@dataclass(kw_only=True)
class _Place:
    token: bytes = field(repr=False)
    guest: Guest | None = None
    used: deque[tuple[bytes, Guest]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), repr=False
    )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a token does not open a place; ``by`` is who used it before."""

    by: Guest | None


class Roster:
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

    def seat(self, number: int, *, host: str, address: str) -> Guest:
        """Give a place to a machine whose token was examined, and spend the token."""
        place = self._places[number]
        guest = Guest(host=host, address=address, since=time.strftime("%H:%M:%S"))
        place.used.append((place.token, guest))
        place.guest = guest
        return guest

    def vacate(self, number: int) -> None:
        """Free a place and give it a new token; the old one stays spent."""
        place = self._places[number]
        place.guest = None
        place.token = self._make_token()

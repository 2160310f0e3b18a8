"""Who waits at the door: a bound on connections that have not yet shown a token, and a fair order.

A connection costs memory and attention before it has said who it is, so only so many are listened to
at once; the others stand in line, where they cost next to nothing. The line is served source by
source in turn, so whoever floods it waits for himself and not others for him. Those who are listened
to and say nothing have some seconds if nobody waits, and a shorter chance if somebody does. When the
line is full too, the last of the source with the most in line is turned away, and may try again.
"""

import ipaddress
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

LISTENED_TO = 256
IN_LINE = 1024
# How long somebody is listened to while others wait. To speak takes milliseconds.
CHANCE_S = 2.0

Who = TypeVar("Who", bound=Hashable)


def source_of(address: str) -> str:
    """Return what counts as one source: an IPv4 address, or the /64 network of an IPv6 one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        parsed = parsed.ipv4_mapped
    return str(parsed)


@dataclass(frozen=True, kw_only=True)
class Turn(Generic[Who]):
    """Whom to listen to from now on, and whom to cut off for that."""

    begin: tuple[Who, ...]
    cut_off: tuple[Who, ...]


@dataclass(kw_only=True)
class Door(Generic[Who]):
    """Those who are listened to, oldest first, and those in line. Times are of one steady clock."""

    listened_to: int = LISTENED_TO
    in_line: int = IN_LINE
    chance_s: float = CHANCE_S
    _since_s: dict[Who, float] = field(default_factory=dict)
    _line: dict[str, deque[Who]] = field(default_factory=dict)  # the source whose turn it is first
    _length: int = 0

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return self._length

    def arrive(self, who: Who, source: str) -> Who | None:
        """Stand a newcomer in line; return who is turned away for that, if the line is too long."""
        self._line.setdefault(source, deque()).append(who)
        self._length += 1
        if self._length <= self.in_line:
            return None
        longest = max(self._line, key=lambda one: len(self._line[one]))
        return self._pop(longest, last=True)

    def turn(self, now_s: float) -> Turn[Who]:
        """Let in as many as there is room for; call this after every change, and now and then."""
        begin, cut_off = [], []
        while self._line:
            if len(self._since_s) >= self.listened_to:
                oldest, since_s = next(iter(self._since_s.items()))
                if now_s - since_s < self.chance_s:
                    break
                del self._since_s[oldest]
                cut_off.append(oldest)
            who = self._next_in_line()
            self._since_s[who] = now_s
            begin.append(who)
        return Turn(begin=tuple(begin), cut_off=tuple(cut_off))

    def leave(self, who: Who) -> None:
        """Forget one who was listened to; nothing happens if that is done already."""
        self._since_s.pop(who, None)

    def _next_in_line(self) -> Who:
        source = next(iter(self._line))
        who = self._pop(source, last=False)
        if source in self._line:  # behind the other sources
            self._line[source] = self._line.pop(source)
        return who

    def _pop(self, source: str, *, last: bool) -> Who:
        queue = self._line[source]
        who = queue.pop() if last else queue.popleft()
        self._length -= 1
        if not queue:
            del self._line[source]
        return who

"""How the launcher reaches node agents: one channel to each, opened by a transport.

A transport is a way of reaching machines: a pipe (this machine), ssh, srun, or TLS for those who join
by themselves. It knows how many machines take part and in which order; the rest of the launcher does
not know which transport it uses.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from torchmuster.errors import Impossible
from torchmuster.launch import protocol


class Channel(Protocol):
    """The launcher's end of a connection to one node agent."""

    async def send(self, message: protocol.ToAgent) -> None:
        """Send a message; on a closed channel this does nothing (``receive`` tells of the end)."""

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the node agent has gone. Raises ``wire.Garbled``."""

    def why_closed(self) -> str:
        """Say, after ``receive`` gave None, what is known of the cause (ssh's own last words)."""

    async def close(self) -> None:
        """Let go; the node agent ends its ranks when it no longer hears the launcher."""


Arrive = Callable[[int, Channel], None]


class Transport(Protocol):
    """A way of reaching the machines of a run."""

    @property
    def places(self) -> Sequence[str]:
        """The machines that are expected, by the names people know, in the order of their ranks."""

    async def open(self, arrive: Arrive) -> None:
        """Begin; ``arrive(place, channel)`` is called for each machine as it comes."""

    async def reopen(self, place: int) -> None:
        """Call a machine again that was lost."""

    def waiting_for(self, place: int) -> str:
        """Say in a few words why a machine is not here yet: ``ssh is connecting, 12 s``."""

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a machine will not come, once that is certain (ssh was refused); else None."""

    def rejoins(self, place: int) -> bool:
        """Say whether a machine that was lost at the node registry may come again by itself."""

    async def close(self) -> None:
        """End everything that was opened."""


# For everything else that the launcher has open.
_SPARE = 256


def make_room_for(needed: int, *, wanted: int) -> int:
    """Raise this process's own limit, never lower it, so that ``needed`` open files fit.

    Returns how many of the ``wanted`` further ones fit too.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if needed + _SPARE > room:
        raise Impossible(
            f"{needed} open files for connections do not fit: this user may have {hard}",
            why=f"each machine takes some, and there are others ({_SPARE})",
            fix=f"sudo prlimit --pid $$ --nofile={needed + _SPARE}  # then start it again",
        )
    target = min(needed + wanted + _SPARE, room)
    if target > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return min(wanted, max(soft, target) - needed - _SPARE)

"""How the launcher reaches node agents: one channel to each, opened by a transport.

A transport reaches hosts through a pipe (the local host), ssh, srun, or TLS (machines that join by
themselves). It knows how many hosts there are and their order; the rest of the launcher does not know
which transport it uses.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from torchmuster.launch import protocol

# For all other files that the launcher has open.
_OTHER_FILES = 256


class Channel(Protocol):
    """The launcher's end of a connection to one node agent."""

    async def send(self, message: protocol.ToAgent) -> None:
        """Send a message; on a closed channel this does nothing (``receive`` reports the end)."""

    def say_alive(self) -> None:
        """Send a heartbeat without waiting; it is left out while earlier messages are still being sent."""

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the node agent is gone. Raises ``UnreadableMessage``."""

    def why_closed(self) -> str:
        """Return the known cause after ``receive`` returned None (the last error output of ssh)."""

    async def close(self) -> None:
        """Close the channel; the node agent stops its ranks when the launcher is gone."""


Arrive = Callable[[int, Channel], None]


class Transport(Protocol):
    """Connects the launcher to the hosts of a run."""

    @property
    def places(self) -> Sequence[str]:
        """The display names of the expected hosts, in rank order."""

    async def open(self, arrive: Arrive) -> None:
        """Start connecting; ``arrive(place, channel)`` is called for each host that connects."""

    async def reopen(self, place: int) -> None:
        """Reconnect a lost host."""

    def waiting_for(self, place: int) -> str:
        """Return why a host has not joined yet, as a short text: ``ssh is connecting, 12 s``."""

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a host will not join, once that is certain (ssh was refused); else None."""
        return None

    def rejoins(self, place: int) -> bool:
        """Return whether a host that was lost while joining may rejoin by itself."""
        return False

    async def close(self) -> None:
        """Close everything that was opened."""


def allow_open_files(needed: int) -> None:
    """Raise this process's limit of open files so that ``needed`` more fit, as far as the system permits."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Links between hosts, and the requests with which they are tested.

There is one ``Link`` for each direction of each pair. The requests and their answers travel as JSON through
``host_probe.py``.
"""

import enum

import msgspec

from torchmuster.launch import protocol

# The default range of ephemeral ports.
USUAL_PORTS = (32768, 60999)


class Problem(enum.StrEnum):
    """Why a connection failed, ordered by how close packets got to the port; NONE is false."""

    NONE = ""
    NOT_TRIED = "not-tried"
    IMPOSTOR = "impostor"  # another host answers at that address
    NO_ROUTE = "no-route"
    ABSENT = "absent"  # not even the network adapter answers
    TIMEOUT = "timeout"  # no reply
    PROHIBITED = "prohibited"  # by a firewall, with ICMP
    REFUSED = "refused"


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of a link, with echoes through both directions.

    ``bytes_per_s`` is None if no block of data passed.
    """

    bytes_per_s: float | None = None
    wrong_bytes: int = 0

    def best_with(self, other: "Speed") -> "Speed":
        """Return the faster of two tries, as a busy host slows a link; wrong bytes are added up."""
        faster = max(self, other, key=lambda speed: speed.bytes_per_s or 0.0)
        wrong_bytes = self.wrong_bytes + other.wrong_bytes
        return msgspec.structs.replace(faster, wrong_bytes=wrong_bytes)


class LinkHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host with the ports that it opened; ``trouble`` says why it opened none.

    ``rendezvous_port`` is None on all but the first host, and there if it is in use.
    """

    name: str
    place: int
    system: str
    addresses: tuple[protocol.Address, ...] = ()  # those that others can use, best first
    port: int = 0
    rendezvous_port: int | None = None
    ephemeral_ports: tuple[int, int] = USUAL_PORTS
    trouble: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two hosts: how ``source`` reaches ``target`` at ``address``.

    ``problem`` is that of an ephemeral port, ``rendezvous_problem`` that of the rendezvous port; it is None
    if ``target`` does not have that port. ``speed`` is that of both directions together.
    """

    source: LinkHost
    target: LinkHost
    problem: Problem
    rendezvous_problem: Problem | None = None
    address: protocol.Address | None = None
    source_address: str = ""  # of the packets to that address; "" without a route
    seconds: float = 0.0
    speed: Speed | None = None

    @property
    def places(self) -> tuple[int, int]:
        """The places of both ends, in the direction of the link."""
        return self.source.place, self.target.place


# ---- requests and answers


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Open ports for other hosts. ``port`` is as in ``--port`` and opened only if ``rendezvous``."""

    nonce: str
    address: str | None = None
    rendezvous: bool = False
    port: int | None = None


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The open ports; ``rendezvous_port`` is None if it is not open."""

    port: int
    addresses: tuple[protocol.Address, ...]
    ephemeral_ports: tuple[int, int]
    rendezvous_port: int | None


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to all these targets in parallel, and measure the links to them if ``measure``."""

    nonce: str
    targets: tuple[protocol.Target, ...] = ()
    timeout_s: float
    measure: bool = False


class Dialed(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one target."""

    problem: Problem
    seconds: float = 0.0
    source_address: str = ""
    speed: Speed | None = None

"""Links between hosts, and the requests with which they are tested.

There is one ``Link`` for each direction of each pair. ``Serve`` makes a host open ports, ``Call``
makes it dial others; both and their answers travel as JSON through ``host_probe.py``.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding
from torchmuster.launch import protocol

Message = TypeVar("Message")
# The default range of ephemeral ports.
USUAL_PORTS = (32768, 60999)


class Problem(enum.StrEnum):
    """Why a connection failed; NONE is false."""

    NONE = ""
    TIMEOUT = "timeout"  # no reply
    REFUSED = "refused"
    PROHIBITED = "prohibited"  # by a firewall, with ICMP
    ABSENT = "absent"  # not even the network adapter answers
    NO_ROUTE = "no-route"
    IMPOSTOR = "impostor"  # another host answers at that address
    NOT_TRIED = "not-tried"


class Scope(enum.Enum):
    """Which ports of a host are not reached; of those for ranks and the one for the rendezvous."""

    RENDEZVOUS = enum.auto()
    RANKS = enum.auto()
    ALL = enum.auto()


class LinkFault(enum.Enum):
    """What is wrong with a link that connects, worst first; of several, the first is reported."""

    CORRUPTS = "corrupting-link"
    STALLS = "stalled-link"
    SLOW = "slow-link"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of a link, with echoes through both directions.

    ``bytes_per_s`` is None if no bulk data passed, ``round_trip_s`` if not even small messages did.
    """

    bytes_per_s: float | None = None
    round_trip_s: float | None = None
    wrong_bytes: int = 0

    def best_with(self, other: "Figures") -> "Figures":
        """Return the faster of two tries, as a busy host slows a link; wrong bytes are added up."""
        faster = max(self, other, key=lambda figures: figures.bytes_per_s or 0.0)
        wrong_bytes = self.wrong_bytes + other.wrong_bytes
        return msgspec.structs.replace(faster, wrong_bytes=wrong_bytes)


@dataclass(frozen=True, kw_only=True)
class End:
    """A host with the address at which others reach it, and what it reports about that interface.

    ``findings`` are about the host itself, such as a rendezvous port in use.
    """

    name: str
    place: int
    system: str
    address: str | None = None
    interface: str = ""
    network: str | None = None  # 10.0.0.0/24
    mtu_bytes: int | None = None
    given_out_ports: tuple[int, int] = USUAL_PORTS
    rendezvous_port: int | None = None  # of the first host
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two hosts: how ``source`` reaches ``target``.

    ``problem`` is of an ephemeral port, ``rendezvous_problem`` of the rendezvous port; it is None if
    ``target`` does not have that port. ``figures`` are those of both directions together.
    """

    source: End
    target: End
    problem: Problem
    rendezvous_problem: Problem | None = None
    port: int | None = None
    seconds: float = 0.0
    figures: Figures | None = None

    @property
    def places(self) -> tuple[int, int]:
        """The places of both ends, in the direction of the link."""
        return self.source.place, self.target.place

    @property
    def name(self) -> str:
        """``node1 to node2``."""
        return f"{self.source.name} to {self.target.name}"


def by_places(links: Sequence[Link]) -> dict[tuple[int, int], Link]:
    """Return the links by the places of their ends."""
    return {link.places: link for link in links}


# ---- requests and answers


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """Open ports for other hosts. ``port`` is as in ``--port`` and opened only if ``rendezvous``."""

    nonce: str
    address: str | None = None
    rendezvous: bool = False
    port: int | None = None


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface as the host reports it; one that is up may still have no carrier."""

    name: str
    up: bool
    connected: bool
    mtu_bytes: int | None
    networks: tuple[str, ...]  # one per address: 10.0.0.1/24


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The open ports; ``rendezvous_port`` is None if it is not open."""

    port: int
    addresses: tuple[protocol.Address, ...]
    interfaces: tuple[Interface, ...]
    given_out_ports: tuple[int, int] = USUAL_PORTS
    rendezvous_port: int | None = None
    rendezvous_reason: str = ""
    rendezvous_trouble: protocol.Trouble | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to all these targets in parallel, and measure the links to them if ``measure``."""

    nonce: str
    targets: tuple[protocol.Target, ...]
    timeout_s: float = 5.0
    measure: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call."""

    problem: Problem
    seconds: float = 0.0
    figures: Figures | None = None


def read_message(kind: type[Message], argument: Any) -> Message:
    """Convert JSON to a message of this type; raise ``MusterError`` if it is not one."""
    try:
        return msgspec.convert(argument, kind)
    except msgspec.ValidationError as error:
        raise MusterError(f"not {kind}: {error}") from error

"""Links between hosts: one ``Link`` for each direction of each pair."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.finding import Finding

# The default range of ephemeral ports.
USUAL_PORTS = (32768, 60999)
# The problem of a link that could not be tested.
NOT_TRIED = "not-tried"
# The problem of a connection that was lost during a measurement.
DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True)
class End:
    """A host with the address at which others reach it, and what it reports about that interface.

    ``findings`` are about the host itself: a rendezvous port in use, an address that was skipped.
    """

    name: str
    place: int
    system: str
    address: str | None = None
    interface: str = ""
    network: str | None = None  # 10.0.0.0/24
    mtu_bytes: int | None = None
    speed_mbits: int | None = None
    given_out_ports: tuple[int, int] = USUAL_PORTS
    meeting_port: int | None = None  # of the first host
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one direction; None if unknown.

    Of several tries the best counts: a busy host makes a link look worse, never better.
    """

    bytes_per_s: float | None = None
    round_trips_s: tuple[float, ...] = ()  # of small messages, in the order sent
    stalled: bool = False  # small messages pass, large transfers do not
    wrong_bytes: int = 0
    waited_share: float = 0.0  # share of the time that a busy host spent waiting for a CPU

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip, which shows the latency of the link itself."""
        return min(self.round_trips_s, default=None)

    @property
    def median_round_trip_s(self) -> float | None:
        """The median round trip, including delays of the hosts."""
        return statistics.median(self.round_trips_s) if self.round_trips_s else None

    def best_with(self, other: "Figures") -> "Figures":
        """Return the better of two tries; wrong bytes are added up."""
        faster = max(self, other, key=lambda figures: figures.bytes_per_s or 0.0)
        return replace(
            faster,
            round_trips_s=self.round_trips_s + other.round_trips_s,
            stalled=self.stalled and other.stalled,
            wrong_bytes=self.wrong_bytes + other.wrong_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two hosts: how ``source`` reaches ``target``.

    ``problem`` is "" if it connects at an ephemeral port; else timeout, refused, prohibited,
    absent, no-route, impostor or not-tried. ``meeting_problem`` is the same for the rendezvous
    port, and None if ``target`` does not have it. ``dropped`` counts the connections lost during
    the measurement, in ``tries`` tries.
    """

    source: End
    target: End
    problem: str
    meeting_problem: str | None = None
    local: str | None = None  # the source address
    port: int | None = None
    seconds: float = 0.0
    figures: Figures | None = None
    tries: int = 0
    dropped: int = 0

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

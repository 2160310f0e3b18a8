"""Network interfaces and routes: which reach other hosts, and which are misconfigured."""

from collections.abc import Iterator, Sequence

from torchmuster.devices.readers import sysfs
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.interfaces import Interface

_FOLDER = "/sys/class/net"
_SWITCHED_ON = 0x1  # IFF_UP; with a carrier it is also IFF_RUNNING
_FEW_PORTS = 1000
_VERY_FEW_PORTS = 200


def interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Check each interface that has an address reachable by others."""
    known = network.read_interfaces()
    usable = network.interface_candidates(known)
    findings = [
        *_none(usable),
        *_unplugged(known, surroundings, others_work=bool(usable)),
    ]
    seen = ", ".join(f"{candidate.address} ({candidate.interface})" for candidate in usable)
    yield from findings or [Finding(name="interfaces", status=Status.OK, what=seen)]


def _is_wired(name: str, surroundings: Surroundings) -> bool:
    """Return whether an interface reports a carrier; bridges and tunnels do not."""
    folder = surroundings.path(f"{_FOLDER}/{name}")
    return not (folder / "bridge").exists() and not (folder / "tun_flags").exists()


def _none(usable: Sequence[object]) -> Iterator[Finding]:
    if not usable:
        yield finding("no-network")


def _unplugged(
    known: Sequence[Interface], surroundings: Surroundings, *, others_work: bool
) -> Iterator[Finding]:
    """Yield interfaces that are up and have an address but no carrier."""
    for interface in known:
        folder = surroundings.path(f"{_FOLDER}/{interface.name}")
        switched_on = (sysfs.read_integer(folder / "flags") or 0) & _SWITCHED_ON
        addresses = [word for word in interface.addresses if not word.startswith("fe80")]
        if (
            switched_on
            and addresses
            and sysfs.read_integer(folder / "carrier") == 0
            and _is_wired(interface.name, surroundings)
        ):
            yield finding(
                "no-carrier",
                status=Status.NOTE if others_work else Status.WARNING,
                interface=interface.name,
                addresses=addresses[0],
                folder=_FOLDER,
            )


def routes(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the range of ephemeral ports."""
    table = [line.split() for line in (surroundings.text("/proc/net/route") or "").splitlines()[1:]]
    entries = [fields for fields in table if len(fields) > 7]
    findings = list(_ports(surroundings))
    ways = sorted({fields[0] for fields in entries if fields[1] == "00000000"})
    seen = f"default route through {', '.join(ways)}"
    yield from findings or [Finding(name="routes", status=Status.OK, what=seen)]


def _ports(surroundings: Surroundings) -> Iterator[Finding]:
    file = "/proc/sys/net/ipv4/ip_local_port_range"
    words = (surroundings.text(file) or "").split()
    if len(words) != 2:
        return
    first, last = int(words[0]), int(words[1])
    count = last - first + 1
    if count < _FEW_PORTS:
        yield finding(
            "ports-few",
            status=Status.WARNING if count < _VERY_FEW_PORTS else Status.NOTE,
            count=count,
            first=first,
            last=last,
            file=file,
        )


CHECKS = (
    Check(name="interfaces", asks="Which interfaces reach other hosts?", run=interfaces),
    Check(
        name="routes",
        asks="Are there routes, and enough ephemeral ports?",
        run=routes,
        systems=("linux",),
    ),
)

"""Network interfaces: which reach other hosts, and which have no carrier."""

from collections.abc import Iterator

import psutil

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces as network


def interfaces(surroundings: Surroundings) -> Iterator[Finding]:
    """Check each interface that has an address reachable by others."""
    known = network.read_interfaces()
    usable = network.interface_candidates(known)
    if not usable:
        yield finding("no-network")
    states = psutil.net_if_stats()
    for interface in known:
        flags = states[interface.name].flags.split(",") if interface.name in states else []
        addresses = [address for address in interface.addresses if not address.startswith("fe80")]
        # Switched on, but without a carrier; a bridge without members has none either.
        unplugged = "up" in flags and "running" not in flags
        is_bridge = surroundings.path(f"/sys/class/net/{interface.name}/bridge").exists()
        if unplugged and addresses and not is_bridge:
            yield finding(
                "no-carrier",
                status=Status.NOTE if usable else Status.WARNING,
                interface=interface.name,
                addresses=addresses[0],
            )


CHECKS = (Check(name="interfaces", asks="Which interfaces reach other hosts?", run=interfaces),)

"""InfiniBand and RoCE: whether the ports of the cards are active."""

import re
from collections.abc import Iterator
from pathlib import Path

from torchmuster.devices.readers import sysfs
from torchmuster.diagnose.check import Surroundings
from torchmuster.finding import Finding, Status


def port_folders(surroundings: Surroundings) -> dict[str, Path]:
    """Return the folders of all ports of InfiniBand and RoCE cards, by what to call them."""
    folder = surroundings.path("/sys/class/infiniband")
    return {
        f"{card} port {port}": folder / card / "ports" / port
        for card in sysfs.names(folder)
        for port in sysfs.names(folder / card / "ports")
    }


def is_active(port: Path) -> bool:
    """Say whether a port can be used."""
    return (sysfs.text(port / "state") or "").endswith("ACTIVE")


def is_infiniband(port: Path) -> bool:
    """Say whether a port carries InfiniBand itself; of Ethernet it is not known whether RoCE is meant."""
    return sysfs.text(port / "link_layer") == "InfiniBand"


def run(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the ports of InfiniBand and RoCE cards."""
    ports = port_folders(surroundings)
    down = [name for name, port in ports.items() if not is_active(port)]
    if not down:
        seen = f"{', '.join(ports)} active" if ports else "no InfiniBand here"
        yield Finding(name="infiniband", status=Status.OK, what=seen)
        return
    nothing_left = len(down) == len(ports)
    state = re.sub(r"^\d+: ", "", sysfs.text(ports[down[0]] / "state") or "").lower() or "unknown"
    yield Finding(
        name="infiniband-down",
        # Of a card with two ports one is often left free.
        status=Status.WARNING if nothing_left else Status.NOTE,
        what=f"{', '.join(down)} {'is' if len(down) == 1 else 'are'} not active ({state})",
        why="NCCL falls back to sockets, which are many times slower"
        if nothing_left
        else "NCCL uses the other ports; if this one is meant to be used, a cable or the subnet "
        "manager is missing",
        fix="ibstat  # “Physical state: LinkUp” and still not active: the subnet manager is missing\n"
        "sudo systemctl start opensm  # on one machine of the fabric",
    )

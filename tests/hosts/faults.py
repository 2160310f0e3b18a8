"""What goes wrong on real networks, as data: each fault is applied to a lab and can be undone.

``undo = Loss(percent=5).apply(lab)``, or for the length of a block::

    with injected(lab, ClosedPorts(host="node2", ports=(29400,)), ClockSkew(host="node2", seconds=60)):
        …

A fault names the host that has it; where None is allowed it means every host.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hosts.host import Host
from hosts.lab import BRIDGE, Lab
from hosts.namespaces import await_true

Undo = Callable[[], None]
# How a firewall says no: not at all, as a closed port does, or as a firewall that is polite.
Verdict = Literal["drop", "refuse", "prohibit"]

_VERDICTS: dict[Verdict, tuple[str, ...]] = {
    "drop": ("DROP",),
    "refuse": ("REJECT", "--reject-with", "tcp-reset"),
    "prohibit": ("REJECT", "--reject-with", "icmp-admin-prohibited"),
}
_USUAL_MTU_BYTES = 1500
_DELAY_LINE = Path(__file__).with_name("delay_line.py")
_SKEW = Path(__file__).with_name("skew.c")
_LISTEN = (
    "import socket, sys, time\n"
    "server = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
    "time.sleep(3600)\n"
)


class Fault(Protocol):
    """What all faults can do."""

    def apply(self, lab: Lab) -> Undo: ...


@contextmanager
def injected(lab: Lab, *faults: Fault) -> Iterator[None]:
    """Apply the faults, and undo them at the end of the block."""
    with ExitStack() as undone:
        for fault in faults:
            undone.callback(fault.apply(lab))
        yield


# ---- names


@dataclass(frozen=True, kw_only=True)
class NameLeadsTo:
    """On this host a name has another address, or none: ``name`` is the host's own if not given."""

    host: str
    address: str | None
    name: str | None = None

    def apply(self, lab: Lab) -> Undo:
        file = lab.host(self.host).hosts_file
        before = file.read_text()
        name = self.name or self.host
        lines = [line for line in before.splitlines() if name not in line.split()[1:]]
        if self.address is not None:
            lines.insert(1, f"{self.address} {name}")
        file.write_text("".join(f"{line}\n" for line in lines))

        def undo() -> None:
            file.write_text(before)

        return undo


def own_name_is_loopback(host: str) -> NameLeadsTo:
    """Debian's way: a host's own name leads to 127.0.1.1."""
    return NameLeadsTo(host=host, address="127.0.1.1")


def own_name_is_unknown(host: str) -> NameLeadsTo:
    return NameLeadsTo(host=host, address=None)


# ---- interfaces


@dataclass(frozen=True, kw_only=True)
class DockerBridge:
    """Every host has ``docker0``, up, with the same address."""

    def apply(self, lab: Lab) -> Undo:
        for host in lab.hosts:
            host.ip("link", "add", "docker0", "type", "bridge")
            host.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
            # As with a container: without a port in use it would have no carrier.
            lab.plug(host, "veth0", port=f"d{host.number}", bridge=None)
            host.ip("link", "set", "veth0", "master", "docker0")
            host.ip("link", "set", "docker0", "up")
        return lambda: _remove_interfaces(lab.hosts, "veth0", "docker0")


@dataclass(frozen=True, kw_only=True)
class DeadInterface:
    """A further interface, up and with an address, whose cable leads nowhere; sorts before eth0."""

    host: str | None = None
    interface: str = "eno1"

    def apply(self, lab: Lab) -> Undo:
        hosts = _hosts(lab, self.host)
        for host in hosts:
            lab.plug(host, self.interface, port=f"n{host.number}", bridge=None)
            address = f"192.168.77.{10 + host.number}/24"
            host.ip("addr", "add", address, "dev", self.interface)
        return lambda: _remove_interfaces(hosts, self.interface)


@dataclass(frozen=True, kw_only=True)
class SecondNetwork:
    """Not a fault yet: every host is on a second network as well, nodeK as 10.88.0.1K on eth1."""

    def apply(self, lab: Lab) -> Undo:
        lab.add_bridge("br1")
        for host in lab.hosts:
            lab.plug(host, "eth1", port=f"q{host.number}", bridge="br1")
            host.ip("addr", "add", f"10.88.0.{10 + host.number}/24", "dev", "eth1")

        def undo() -> None:
            _remove_interfaces(lab.hosts, "eth1")
            lab.switch_ip("link", "del", "br1")

        return undo


@dataclass(frozen=True, kw_only=True)
class Mtu:
    """Frames may be this big on the host, and at its port of the switch; bigger ones vanish there."""

    host: str | None = None
    host_bytes: int = 9000
    switch_bytes: int = 1500

    def apply(self, lab: Lab) -> Undo:
        hosts = _hosts(lab, self.host)
        # A virtual cable also carries bundles of segments, which no limit applies to: none, then.
        _set_mtu(lab, hosts, self.host_bytes, self.switch_bytes, most_segments=1)
        return lambda: _set_mtu(lab, hosts, _USUAL_MTU_BYTES, _USUAL_MTU_BYTES, most_segments=65535)


def _set_mtu(
    lab: Lab, hosts: Sequence[Host], host_bytes: int, switch_bytes: int, most_segments: int
) -> None:
    for host in hosts:
        host.ip("link", "set", "eth0", "mtu", str(host_bytes))
        host.ip("link", "set", "eth0", "gso_max_segs", str(most_segments))
        lab.switch_ip("link", "set", f"p{host.number}", "mtu", str(switch_bytes))


# ---- traffic


@dataclass(frozen=True, kw_only=True)
class Loss:
    """So many of the packets that arrive are lost, by chance."""

    percent: float
    host: str | None = None

    def apply(self, lab: Lab) -> Undo:
        chance = ("-m", "statistic", "--mode", "random", "--probability", f"{self.percent / 100}")
        # A virtual cable carries bundles of segments, which would be lost as one: none, then.
        _set_most_segments(lab, 1)
        remove_rule = _add_rule(_hosts(lab, self.host), "-i", "eth0", *chance, "-j", "DROP")

        def undo() -> None:
            remove_rule()
            _set_most_segments(lab, 65535)

        return undo


def _set_most_segments(lab: Lab, count: int) -> None:
    for host in lab.hosts:
        host.ip("link", "set", "eth0", "gso_max_segs", str(count))


@dataclass(frozen=True, kw_only=True)
class Delay:
    """All that goes to and from a host takes longer: by so much there and back."""

    host: str
    round_trip_ms: float = 100.0

    def apply(self, lab: Lab) -> Undo:
        port = f"p{lab.host(self.host).number}"
        bridge, near, far = f"{port}line", f"{port}near", f"{port}far"
        lab.add_bridge(bridge)
        for end, joined in ((near, bridge), (far, BRIDGE)):
            lab.switch_ip("tuntap", "add", "dev", end, "mode", "tap")
            lab.switch_ip("link", "set", end, "txqueuelen", "5000", "master", joined, "up")
        one_way_ms = str(self.round_trip_ms / 2)
        line = lab.start_in_switch([sys.executable, "-I", "-S", _DELAY_LINE, near, far, one_way_ms])
        lab.switch_ip("link", "set", port, "master", bridge)

        def undo() -> None:
            lab.switch_ip("link", "set", port, "master", BRIDGE)
            line.kill()
            line.wait()
            for interface in (near, far, bridge):
                lab.switch_ip("link", "del", interface)

        return undo


@dataclass(frozen=True, kw_only=True)
class ClosedPorts:
    """A firewall on the host that lets nothing through to these TCP ports."""

    host: str
    ports: tuple[int, ...]
    verdict: Verdict = "drop"

    def apply(self, lab: Lab) -> Undo:
        ports = ("-m", "multiport", "--dports", ",".join(map(str, self.ports)))
        return _add_rule([lab.host(self.host)], *_TCP, *ports, "-j", *_VERDICTS[self.verdict])


@dataclass(frozen=True, kw_only=True)
class OnlyOpenPorts:
    """A firewall on the host that lets connections be made to these TCP ports only (sshd: 2222)."""

    host: str
    ports: tuple[int, ...]
    verdict: Verdict = "drop"

    def apply(self, lab: Lab) -> Undo:
        others = ("--syn", "-m", "multiport", "!", "--dports", ",".join(map(str, self.ports)))
        return _add_rule([lab.host(self.host)], *_TCP, *others, "-j", *_VERDICTS[self.verdict])


@dataclass(frozen=True, kw_only=True)
class LinkCut:
    """The host's cable is pulled out of the switch."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        port = f"p{lab.host(self.host).number}"
        lab.switch_ip("link", "set", port, "down")

        def undo() -> None:
            lab.switch_ip("link", "set", port, "up")

        return undo


@dataclass(frozen=True, kw_only=True)
class KeptApart:
    """Two hosts drop what arrives from each other."""

    host: str
    other: str

    def apply(self, lab: Lab) -> Undo:
        one, other = lab.host(self.host), lab.host(self.other)
        undone = [
            _add_rule([one], "-s", other.address, "-j", "DROP"),
            _add_rule([other], "-s", one.address, "-j", "DROP"),
        ]

        def undo() -> None:
            for each in undone:
                each()

        return undo


# ---- the host itself


@dataclass(frozen=True, kw_only=True)
class ClockSkew:
    """The host's clock is ahead by so many seconds (behind, if negative)."""

    host: str
    seconds: int

    def apply(self, lab: Lab) -> Undo:
        library = lab.folder / "skew.so"
        if not library.exists():
            flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
            subprocess.run(["gcc", *flags, "-o", library, _SKEW, "-ldl"], check=True)
        host = lab.host(self.host)
        host.set(LD_PRELOAD=str(library), SKEW_S=str(self.seconds))
        return lambda: host.set(LD_PRELOAD=None, SKEW_S=None)


@dataclass(frozen=True, kw_only=True)
class PortTaken:
    """Another program of the host listens at this port, and never answers."""

    host: str
    port: int
    address: str = "0.0.0.0"

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        command = [sys.executable, "-I", "-S", "-c", _LISTEN, self.address, str(self.port)]
        taker = host.popen(command)
        await_true(f"port {self.port} is taken", lambda: host.listens_at(self.port))

        def undo() -> None:
            taker.kill()
            taker.wait()

        return undo


@dataclass(frozen=True, kw_only=True)
class HostKilled:
    """The host loses its power; undone, it boots again, with none of what ran."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        host = lab.host(self.host)
        lab.switch_ip("link", "set", f"p{host.number}", "down")
        host.power_off()

        def undo() -> None:
            lab.switch_ip("link", "set", f"p{host.number}", "up")
            host.boot()

        return undo


# ---- ssh


@dataclass(frozen=True, kw_only=True)
class NoSshd:
    """The host does not serve ssh."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        lab.host(self.host).stop_sshd()
        return lab.host(self.host).start_sshd


@dataclass(frozen=True, kw_only=True)
class KeyRefused:
    """The host does not know our key."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        assert lab.ssh is not None
        return _replaced(lab.ssh.authorized_keys(self.host), lambda text: "")


@dataclass(frozen=True, kw_only=True)
class HostKeyChanged:
    """The host has another key than the one its clients know."""

    host: str

    def apply(self, lab: Lab) -> Undo:
        assert lab.ssh is not None
        other = lab.ssh.folder / "identity.pub"
        line = f"{self.host} {' '.join(other.read_text().split()[:2])}"

        def changed(text: str) -> str:
            lines = [line if one.startswith(f"{self.host} ") else one for one in text.splitlines()]
            return "".join(f"{one}\n" for one in lines)

        return _replaced(lab.ssh.known_hosts, changed)


# Traffic of the host with itself is not filtered, as in the usual firewalls.
_TCP = ("-p", "tcp", "!", "-i", "lo")


def _hosts(lab: Lab, name: str | None) -> tuple[Host, ...]:
    return lab.hosts if name is None else (lab.host(name),)


def _add_rule(hosts: Sequence[Host], *rule: str) -> Undo:
    for host in hosts:
        host.iptables("-A", "INPUT", *rule)

    def undo() -> None:
        for host in hosts:
            host.iptables("-D", "INPUT", *rule)

    return undo


def _remove_interfaces(hosts: Sequence[Host], *names: str) -> None:
    for host in hosts:
        for name in names:
            host.ip("link", "del", name)


def _replaced(file: Path, change: Callable[[str], str]) -> Undo:
    kept = file.with_name(f"{file.name}.kept")
    shutil.copy(file, kept)
    file.write_text(change(kept.read_text()))

    def undo() -> None:
        kept.replace(file)

    return undo

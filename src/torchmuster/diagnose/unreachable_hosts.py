"""Diagnose why a host cannot be reached over ssh, from this host.

The host may be off, a firewall may block ssh, ssh may hang, or this host's
own cable may be disconnected: each has a different fix.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchmuster.diagnose import ssh
from torchmuster.diagnose.links.messages import Interface
from torchmuster.diagnose.ssh import Destination, SshProblem
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import firewall
from torchmuster.launch.network import interfaces as network

_WITHIN_S = 9.0
_TIMED_OUT = "host-unreachable"
_USUAL_MTU, _TUNNEL_MTU = 1500, 1400
# These findings may have more than one cause; the others are clear.
_UNCLEAR = frozenset(
    {"host-missing", "host-unreachable", "network-unreachable", "ssh-failed", "ssh-not-served"}
)
# With these, ssh reached a host, but it may have been the wrong one.
_REACHED = frozenset({"ssh-host-key-changed", "ssh-host-key-unknown", "ssh-key-refused"})


async def why_all_unreachable(
    absent: Mapping[int, Finding], hosts: Sequence[str]
) -> dict[int, Finding]:
    """Diagnose all absent hosts in parallel; return the findings by place."""
    found = await asyncio.gather(
        *(why_unreachable(hosts[place], trouble) for place, trouble in absent.items())
    )
    return dict(zip(absent, found, strict=True))


async def why_unreachable(host: str, trouble: Finding) -> Finding:
    """Return a finding more specific than ssh's error, or the same one if no more is known."""
    if trouble.name not in _UNCLEAR | _REACHED:
        return trouble
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            way = await ssh.ssh_destination(host)
            if way is None or not way.addresses:
                return trouble
            if way.leads_here:
                return _leads_here(host, way, trouble)
            if trouble.name in _UNCLEAR:
                return judge_unreachable(host, trouble, await ssh.find_ssh_problem(way))
    return trouble


def judge_unreachable(host: str, trouble: Finding, seen: SshProblem) -> Finding:
    """Return the finding that matches what was observed on the path."""
    problem = _problem(seen)
    if problem in ("timeout", "absent", "no-route") and not _works(seen.interface):
        return _own_interface(seen, trouble)
    if problem == "absent":
        return _absent(host, seen, trouble)
    if problem == "prohibited" or (problem == "timeout" and seen.alive):
        return _kept_out(host, seen, trouble, problem)
    if problem == "refused":
        return _refused(host, seen, trouble)
    if problem == "" and not seen.knock.greeted:
        return _says_nothing(host, seen, trouble)
    if problem == "" and trouble.name == _TIMED_OUT:
        return _hangs(host, seen, trouble)
    return replace(trouble, evidence=_evidence(seen, trouble))


def _problem(seen: SshProblem) -> str:
    problem = seen.knock.problem
    if problem == "prohibited" and not seen.local:
        return "no-route"
    if problem in ("timeout", "prohibited") and seen.silent_card and not seen.alive:
        return "absent"
    return problem


def _works(interface: Interface | None) -> bool:
    return interface is None or interface.connected


def _leads_here(host: str, way: Destination, trouble: Finding) -> Finding:
    bare, here = host.rpartition("@")[2], socket.gethostname()
    # A local address in ssh's config is a tunnel; a local address given by the user is intended.
    if way.renamed or network.is_local(bare, look_up=lambda _: ()):
        return trouble
    return Finding(
        name="name-leads-here",
        status=Status.FAILURE,
        what=f"the name {bare} resolves to {way.leads_here}, an address of this host itself",
        why=f"ssh to {bare} connects to {here}",
        fix=f"correct the entry of {bare}; find where its address comes from:\n"
        f"getent hosts {bare}\ngrep -n {bare} /etc/hosts\n"
        f"if you mean this host, use {here} instead of {bare}",
        evidence=trouble.evidence,
    )


def _own_interface(seen: SshProblem, trouble: Finding) -> Finding:
    interface = seen.interface
    assert interface is not None
    # Link-local addresses do not identify the network.
    networks = ", ".join(one for one in interface.networks if not one.startswith("fe80"))
    if interface.up:
        name, state = "own-cable-out", "it has no carrier"
        fix = (
            "connect the cable of this host, and check the link:\n"
            f"ip -br link show dev {interface.name}"
        )
    else:
        name, state = "own-interface-down", "it is down"
        fix = f"on this host:\nsudo ip link set dev {interface.name} up"
    return Finding(
        name=name,
        status=Status.FAILURE,
        # Without the host name, so that all hosts with this cause share one finding.
        what=f"{interface.name} of this host ({networks}) is not connected: {state}",
        why=f"the path to the host goes through {interface.name} of this host, and {state}",
        fix=fix,
        evidence=_evidence(seen, trouble),
    )


def _absent(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    return Finding(
        name="host-absent",
        status=Status.FAILURE,
        what=f"no reply from {seen.address}, the address of {host}",
        why="not even its network adapter answers: it is off or asleep, its cable is disconnected, "
        "its interface is down, or its address has changed",
        fix=f"power on {host} and check its cable; on its console, check that it has a link and "
        f"the address {seen.address}:\nip -br link\nip -br address",
        evidence=_evidence(seen, trouble),
    )


def _kept_out(host: str, seen: SshProblem, trouble: Finding, problem: str) -> Finding:
    if problem == "prohibited":
        name, words = "ssh-port-prohibited", "a firewall prohibits the connection (ICMP)"
    else:
        name, words = "ssh-port-dropped", f"a firewall drops the packets, although {seen.alive}"
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=f"{host} is up, but its port {seen.port} (ssh) is closed to this host: {words}",
        why=f"it is up, but a firewall on it or on the path blocks ssh on port {seen.port}",
        fix=_let_in(host, seen),
        evidence=_evidence(seen, trouble),
    )


def _refused(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    """Return the finding for a refused connection: no ssh server, or a firewall that rejects."""
    return Finding(
        name="ssh-not-served",
        status=Status.FAILURE,
        what=trouble.what,
        why=f"it is up, but no ssh server listens on its port {seen.port}, or a firewall rejects "
        "the connection",
        fix=f"start the server, on the console of {host}:\n"
        "sudo systemctl enable --now ssh || sudo systemctl enable --now sshd\n"
        "if it runs on another port, set Port in ~/.ssh/config; if it runs on this one:\n"
        f"{_let_in(host, seen)}",
        evidence=_evidence(seen, trouble),
    )


def _let_in(host: str, seen: SshProblem) -> str:
    # Behind a router, the host may see another source address.
    source = seen.local if seen.same_network and seen.local else None
    command = firewall.open_command("linux", seen.port, source=source)
    return f"allow this host, on the console of {host}:\n{command}"


def _hangs(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    interface = seen.interface.name if seen.interface else "eth0"
    mtu = (seen.interface.mtu_bytes if seen.interface else None) or _USUAL_MTU
    smaller = _USUAL_MTU if mtu > _USUAL_MTU else _TUNNEL_MTU
    command = f"sudo ip link set dev {interface} mtu {smaller}"
    return Finding(
        name="ssh-hangs",
        status=Status.FAILURE,
        what=f"ssh to {host} connects and then hangs",
        why="the server greets at once, but ssh did not finish: a device on the path drops the large "
        "packets of its key exchange (MTU), or the host is overloaded",
        fix=f"try smaller frames on this host, then on {host}, where the interface may have another "
        f"name:\n{command}\nssh -t {host} {command}",
        evidence=_evidence(seen, trouble),
    )


def _says_nothing(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    return Finding(
        name="ssh-silent",
        status=Status.FAILURE,
        what=f"{host} accepts connections on port {seen.port} (ssh), but its ssh server does not "
        "respond",
        why="its kernel responds, but its programs do not: the host is out of memory or waits for a "
        "disk, or a program other than ssh listens on that port",
        fix=f"on the console of {host}, check the load:\nuptime\nfree -h\n"
        f"sudo ss -ltnp 'sport = :{seen.port}'",
        evidence=_evidence(seen, trouble),
    )


def _evidence(seen: SshProblem, trouble: Finding) -> str:
    """Return ssh's error and the observations made after it."""
    words = seen.knock.problem or ("server responds" if seen.knock.greeted else "connected")
    lines = [
        *trouble.evidence.splitlines(),
        f"{seen.address}:{seen.port}: {words} after {seen.knock.seconds:.1f} s",
    ]
    if seen.alive:
        lines.append(f"{seen.address}: {seen.alive}")
    elif seen.silent_card:
        lines.append(f"{seen.address}: its network adapter does not answer")
    return "\n".join(lines)

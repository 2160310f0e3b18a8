"""Diagnose why a host cannot be reached over ssh, from this host and without root.

The host may be off, a firewall may block ssh, ssh may hang, or this host's own cable may be
disconnected: each has a different fix.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.diagnose.connection import problem_of
from torchmuster.diagnose.links.call import local_end
from torchmuster.diagnose.links.model import Interface
from torchmuster.diagnose.links.serve import interfaces_here
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.network import firewall
from torchmuster.launch.network import interfaces as network

_WITHIN_S = 9.0
# The kernel reports an unanswered ARP request after 3 s.
_CONNECTED_WITHIN_S = 3.6
_PROGRAM_WITHIN_S = 4.0
_USUAL_MTU, _TUNNEL_MTU = 1500, 1400
# These findings may have more than one cause; the others are clear.
_UNCLEAR = frozenset({"host-missing", "host-unreachable", "ssh-failed", "ssh-not-served"})
# With these, ssh reached a host, but it may have been the wrong one.
_REACHED = frozenset({"ssh-host-key-unknown", "ssh-key-refused"})


@dataclass(frozen=True, kw_only=True)
class SshTarget:
    """Where ssh connects for a host. ``renamed``: ssh's config sets another name for it."""

    addresses: tuple[str, ...]
    port: int
    renamed: bool


@dataclass(frozen=True, kw_only=True)
class SshPath:
    """What was observed on the path to an address.

    ``problem`` is why the port cannot be connected to, "" if it can. ``local`` is the source
    address, "" without a route. ``interface`` is the one on the network of the address, or with the
    route to it. ``alive`` says what shows that the host is up, "" if nothing does. ``silent_card``:
    not even its network adapter answers.
    """

    address: str
    port: int
    problem: str
    seconds: float
    local: str = ""
    interface: Interface | None = None
    alive: str = ""
    silent_card: bool = False


async def why_all_unreachable(
    absent: Mapping[int, Finding], hosts: Sequence[str]
) -> dict[int, Finding]:
    """Diagnose all absent hosts in parallel; return the findings by place."""
    causes = await asyncio.gather(
        *(why_unreachable(hosts[place], trouble) for place, trouble in absent.items())
    )
    return dict(zip(absent, causes, strict=True))


async def why_unreachable(host: str, trouble: Finding) -> Finding:
    """Return a finding more specific than ssh's error, or the same one if no more is known."""
    if trouble.name not in _UNCLEAR | _REACHED:
        return trouble
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            target = await ssh_target(host)
            if target is None or not target.addresses:
                return trouble
            if network.is_local(target.addresses[0]):
                return _leads_here(host, target, trouble)
            if trouble.name in _UNCLEAR:
                return judge_path(host, trouble, await examine_path(target))
    return trouble


async def ssh_target(host: str) -> SshTarget | None:
    """Read the target from ``ssh -G``; None if it is unknown, or goes through a proxy."""
    output = await _output(["ssh", "-G", "--", host]) or ""
    settings = {}
    for line in output.splitlines():
        word, _, value = line.partition(" ")
        settings[word] = value
    proxies = {settings.get("proxyjump", "none"), settings.get("proxycommand", "none")}
    name, port = settings.get("hostname", ""), settings.get("port", "")
    if not name or not port.isdecimal() or proxies != {"none"}:
        return None
    addresses = await asyncio.to_thread(network.resolve_host, name)
    renamed = name.lower() != host.rpartition("@")[2].lower()
    return SshTarget(addresses=tuple(addresses), port=int(port), renamed=renamed)


async def examine_path(target: SshTarget) -> SshPath:
    """Probe the path to a host, within 5 s."""
    # As ssh does: skip addresses without a route.
    routed = [address for address in target.addresses if local_end(address)]
    address = routed[0] if routed else target.addresses[0]
    ping = ["ping", "-c", "1", "-W", "2", address]
    (problem, seconds), answer = await asyncio.gather(_connect(address, target.port), _output(ping))
    neighbour = (await _output(["ip", "neighbour", "show", "to", address]) or "").split()
    card = neighbour[-1] if neighbour else ""
    alive = ""
    if answer is not None:
        alive = "it answers ping"
    elif card == "REACHABLE" and problem:
        alive = "its network adapter answers"
    local = local_end(address)
    return SshPath(
        address=address,
        port=target.port,
        problem=problem,
        seconds=seconds,
        local=local,
        interface=interface_for(address, local, interfaces_here()),
        alive=alive,
        silent_card=card in ("FAILED", "INCOMPLETE"),
    )


async def _connect(address: str, port: int) -> tuple[str, float]:
    """Connect to a port; return the problem ("" if there is none) and the seconds it took."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(_CONNECTED_WITHIN_S):
            _, writer = await asyncio.open_connection(address, port)
    except OSError as error:
        seconds = time.monotonic() - began
        return problem_of(error, seconds), seconds
    writer.close()
    return "", time.monotonic() - began


def interface_for(address: str, local: str, known: Sequence[Interface]) -> Interface | None:
    """Return the interface for an address: one on its network, else the one with the route.

    Of several on this network, a connected one is preferred.
    """
    used = []
    for interface in known:
        if any(entry.partition("/")[0] == local for entry in interface.networks):
            used.append(interface)
    own = [interface for interface in known if _has_network_of(interface, address)]
    own.sort(key=lambda interface: (interface.connected, interface in used), reverse=True)
    return next(iter([*own, *used]), None)


def _has_network_of(interface: Interface, address: str) -> bool:
    wanted = ipaddress.ip_address(address)
    return any(wanted in ipaddress.ip_interface(entry).network for entry in interface.networks)


async def _output(command: Sequence[str]) -> str | None:
    """Return what a program prints; None if it is missing, fails or times out."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(_PROGRAM_WITHIN_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return output.decode(errors="replace") if process.returncode == 0 else None


def judge_path(host: str, trouble: Finding, path: SshPath) -> Finding:
    """Return the finding that matches what was observed on the path."""
    trouble = replace(trouble, evidence=_evidence(path, trouble))
    problem = path.problem
    if problem == "prohibited" and not path.local:
        problem = "no-route"
    if problem in ("timeout", "prohibited") and path.silent_card and not path.alive:
        problem = "absent"
    interface = path.interface
    if problem in ("timeout", "absent", "no-route") and interface and not interface.connected:
        return _own_interface(interface, trouble)
    match problem:
        case "absent":
            return _absent(host, path, trouble)
        case "prohibited":
            return _kept_out(host, path, trouble, "a firewall prohibits the connection (ICMP)")
        case "timeout" if path.alive:
            return _kept_out(
                host, path, trouble, f"a firewall drops the packets, although {path.alive}"
            )
        case "refused":
            return _refused(host, path, trouble)
        case "" if trouble.name == "host-unreachable":
            return _hangs(host, path, trouble)
    return trouble


def _evidence(path: SshPath, trouble: Finding) -> str:
    """Return ssh's error and the observations made after it."""
    state = path.problem or "connected"
    lines = [
        *trouble.evidence.splitlines(),
        f"{path.address}:{path.port}: {state} after {path.seconds:.1f} s",
    ]
    if path.alive:
        lines.append(f"{path.address}: {path.alive}")
    elif path.silent_card:
        lines.append(f"{path.address}: its network adapter does not answer")
    return "\n".join(lines)


def _leads_here(host: str, target: SshTarget, trouble: Finding) -> Finding:
    bare, here = host.rpartition("@")[2], socket.gethostname()
    # A local address in ssh's config is a tunnel; a local address given by the user is intended.
    if target.renamed or network.is_local(bare, look_up=lambda _: ()):
        return trouble
    address = target.addresses[0]
    return finding(
        "name-leads-here", bare=bare, address=address, here=here, evidence=trouble.evidence
    )


def _own_interface(interface: Interface, trouble: Finding) -> Finding:
    # Link-local addresses do not identify the network.
    networks = [entry for entry in interface.networks if not entry.startswith("fe80")]
    name, state = "own-cable-out", "it has no carrier"
    fix = f"connect the cable of this host, and check the link:\nip -br link show dev {interface.name}"
    if not interface.up:
        name, state = "own-interface-down", "it is down"
        fix = f"on this host:\nsudo ip link set dev {interface.name} up"
    return replace(
        trouble,
        name=name,
        # Without the host name, so that all hosts with this cause share one finding.
        what=f"{interface.name} of this host ({', '.join(networks)}) is not connected: {state}",
        why=f"the path to the host goes through {interface.name} of this host, and {state}",
        fix=fix,
    )


def _absent(host: str, path: SshPath, trouble: Finding) -> Finding:
    return replace(
        trouble,
        name="host-absent",
        what=f"no reply from {path.address}, the address of {host}",
        why="not even its network adapter answers: it is off or asleep, its cable is disconnected, "
        "its interface is down, or its address has changed",
        fix=f"power on {host} and check its cable; on its console, check that it has a link and "
        f"the address {path.address}:\nip -br link\nip -br address",
    )


def _kept_out(host: str, path: SshPath, trouble: Finding, cause: str) -> Finding:
    return replace(
        trouble,
        name="ssh-port-prohibited" if path.problem == "prohibited" else "ssh-port-dropped",
        what=f"{host} is up, but its port {path.port} (ssh) is closed to this host: {cause}",
        why=f"it is up, but a firewall on it or on the path blocks ssh on port {path.port}",
        fix=_open_port(host, path),
    )


def _refused(host: str, path: SshPath, trouble: Finding) -> Finding:
    return replace(
        trouble,
        name="ssh-not-served",
        why=f"it is up, but no ssh server listens on its port {path.port}, or a firewall rejects "
        "the connection",
        fix=f"start the server, on the console of {host}:\n"
        "sudo systemctl enable --now ssh || sudo systemctl enable --now sshd\n"
        "if it runs on another port, set Port in ~/.ssh/config; if it runs on this one:\n"
        f"{_open_port(host, path)}",
    )


def _open_port(host: str, path: SshPath) -> str:
    # Behind a router, the host may see another source address.
    near = path.interface is not None and _has_network_of(path.interface, path.address)
    source = path.local if near and path.local else None
    command = firewall.open_command("linux", path.port, source=source)
    return f"allow this host, on the console of {host}:\n{command}"


def _hangs(host: str, path: SshPath, trouble: Finding) -> Finding:
    interface = path.interface.name if path.interface else "eth0"
    mtu = path.interface.mtu_bytes if path.interface else None
    smaller = _USUAL_MTU if (mtu or 0) > _USUAL_MTU else _TUNNEL_MTU
    command = f"sudo ip link set dev {interface} mtu {smaller}"
    return replace(
        trouble,
        name="ssh-hangs",
        what=f"ssh to {host} connects and then hangs",
        why="the port accepts connections, but ssh did not finish: a device on the path drops the "
        "large packets of its key exchange (MTU), or the host is overloaded",
        fix=f"try smaller frames on this host, then on {host}, where the interface may have another "
        f"name:\n{command}\nssh -t {host} {command}",
    )

"""Why a machine did not come: ssh says that it cannot, and here this machine looks for the reason.

Whether it is off, whether a firewall keeps ssh out, whether big packets vanish on the way, whether it is
this machine's own cable: each has another fix.
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
# What these say may have more than one reason; the others are plain.
_UNCLEAR = frozenset(
    {"host-missing", "host-unreachable", "network-unreachable", "ssh-failed", "ssh-not-served"}
)
# As for these, ssh reached somebody; it may have been the wrong one.
_REACHED = frozenset({"ssh-host-key-changed", "ssh-host-key-unknown", "ssh-key-refused"})


async def why_all_unreachable(
    absent: Mapping[int, Finding], hosts: Sequence[str]
) -> dict[int, Finding]:
    """Look for the reason of each machine that is absent, all at once; by place."""
    found = await asyncio.gather(
        *(why_unreachable(hosts[place], trouble) for place, trouble in absent.items())
    )
    return dict(zip(absent, found, strict=True))


async def why_unreachable(host: str, trouble: Finding) -> Finding:
    """Return a finding that says more than ssh's words do, or the same one if nothing more is seen."""
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
    """Say what it means that so much of the way was seen."""
    problem = _problem(seen)
    if problem in ("timeout", "absent", "no-route") and not _works(seen.interface):
        return _own_interface(seen, trouble)
    if problem == "absent":
        return _absent(host, seen, trouble)
    if problem == "prohibited" or (problem == "timeout" and seen.alive):
        return _kept_out(host, seen, trouble, problem)
    if problem == "refused":
        return _refused(host, seen, trouble)
    if problem == "" and seen.passing is not None:
        return _black_hole(host, seen, trouble)
    if problem == "" and not seen.knock.greeted:
        return _says_nothing(host, seen, trouble)
    return replace(trouble, evidence=_unreachable_hosts_evidence(seen, trouble))


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
    # An address of this machine in ssh's settings is a tunnel, and one that was written is meant.
    if way.renamed or network.is_local(bare, look_up=lambda _: ()):
        return trouble
    return Finding(
        name="name-leads-here",
        status=Status.FAILURE,
        what=f"the name {bare} leads to {way.leads_here}, which is this machine itself",
        why=f"ssh looked for {bare} and came to {here}",
        fix=f"correct the line of {bare}; see where its address comes from:\n"
        f"getent hosts {bare}\ngrep -n {bare} /etc/hosts\n"
        f"if this machine is meant, write {here} in place of {bare}",
        evidence=trouble.evidence,
    )


def _own_interface(seen: SshProblem, trouble: Finding) -> Finding:
    interface = seen.interface
    assert interface is not None
    # A further address that it gave itself tells nobody anything.
    networks = ", ".join(one for one in interface.networks if not one.startswith("fe80"))
    if interface.up:
        name, state = "own-cable-out", "nothing is connected to it"
        fix = (
            "plug the cable of this machine in, and see whether it has a link:\n"
            f"ip -br link show dev {interface.name}"
        )
    else:
        name, state = "own-interface-down", "it is switched off"
        fix = f"on this machine:\nsudo ip link set dev {interface.name} up"
    return Finding(
        name=name,
        status=Status.FAILURE,
        # Without the host: all that are away for this reason are one finding.
        what=f"{interface.name} of this machine ({networks}) leads to no other: {state}",
        why=f"its way there is {interface.name} of this machine, and {state}",
        fix=fix,
        evidence=_unreachable_hosts_evidence(seen, trouble),
    )


def _absent(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    return Finding(
        name="host-absent",
        status=Status.FAILURE,
        what=f"nobody answers at {seen.address}, the address of {host}",
        why="not even its network card answers: it is off or asleep, its cable is out, its interface "
        "is down, or it has another address now",
        fix=f"switch {host} on and look at its cable; at its own console, see whether it has a link and "
        f"the address {seen.address}:\nip -br link\nip -br address",
        evidence=_unreachable_hosts_evidence(seen, trouble),
    )


def _kept_out(host: str, seen: SshProblem, trouble: Finding, problem: str) -> Finding:
    if problem == "prohibited":
        name, words = "ssh-port-prohibited", "a firewall answers that this is not allowed"
    else:
        name, words = "ssh-port-dropped", f"a firewall drops what arrives, though {seen.alive}"
    return Finding(
        name=name,
        status=Status.FAILURE,
        what=f"{host} is on, but its port {seen.port} (ssh) is closed to this machine: {words}",
        why=f"it is on, but a firewall, there or on the way, keeps ssh out at port {seen.port}",
        fix=_let_in(host, seen),
        evidence=_unreachable_hosts_evidence(seen, trouble),
    )


def _refused(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    """A firewall can refuse in the same way as a machine without a server does."""
    return Finding(
        name="ssh-not-served",
        status=Status.FAILURE,
        what=trouble.what,
        why=f"it is there, but no ssh server listens at its port {seen.port}, or a firewall rejects "
        "the call",
        fix=f"start the server, at the console of {host}:\n"
        "sudo systemctl enable --now ssh || sudo systemctl enable --now sshd\n"
        f"if it runs, at another port: Port in ~/.ssh/config; at this one:\n{_let_in(host, seen)}",
        evidence=_unreachable_hosts_evidence(seen, trouble),
    )


def _let_in(host: str, seen: SshProblem) -> str:
    # Beyond a router it may see us by another address.
    source = seen.local if seen.same_network and seen.local else None
    command = firewall.open_command("linux", seen.port, source=source)
    return f"let this machine in, at the console of {host}:\n{command}"


def _black_hole(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    interface = seen.interface.name if seen.interface else "eth0"
    assert seen.passing is not None
    command = f"sudo ip link set dev {interface} mtu {seen.frame_bytes}"
    return Finding(
        name="mtu-black-hole",
        status=Status.FAILURE,
        what=f"big packets vanish between this machine ({interface}) and {host}: ssh hangs",
        why="this machine sends bigger frames than something on the way carries, and nobody tells it: "
        f"small ones pass, and ssh waits for its keys. Frames of {seen.frame_bytes:,} bytes pass",
        fix=f"on this machine, and then there too, where its interface may have another name:\n"
        f"{command}\nssh -t {host} {command}",
        evidence=f"{_unreachable_hosts_evidence(seen, trouble)}\n{seen.knock.sent_bytes:,} bytes in one packet did not "
        f"arrive, {seen.passing.sent_bytes:,} did",
    )


def _says_nothing(host: str, seen: SshProblem, trouble: Finding) -> Finding:
    return Finding(
        name="ssh-silent",
        status=Status.FAILURE,
        what=f"{host} takes calls at port {seen.port} (ssh), but its ssh server says nothing",
        why="its system answers, its programs do not: it is out of memory, or waits for a disk, or "
        "something else than ssh listens there",
        fix=f"at the console of {host}, see what it is busy with:\nuptime\nfree -h\n"
        f"sudo ss -ltnp 'sport = :{seen.port}'",
        evidence=_unreachable_hosts_evidence(seen, trouble),
    )


def _unreachable_hosts_evidence(seen: SshProblem, trouble: Finding) -> str:
    """Return what ssh said, and what was seen after it."""
    words = seen.knock.problem or ("it answers" if seen.knock.greeted else "it opens")
    lines = [
        *trouble.evidence.splitlines(),
        f"{seen.address}:{seen.port}: {words} after {seen.knock.seconds:.1f} s",
    ]
    if seen.alive:
        lines.append(f"{seen.address}: {seen.alive}")
    elif seen.silent_card:
        lines.append(f"{seen.address}: its network card does not answer")
    return "\n".join(lines)

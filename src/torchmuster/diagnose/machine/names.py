"""Names: whether this machine can look up its own, and how long looking up an address takes."""

import ipaddress
import os
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces as network

_PORT = 53
_WITHIN_S = 1.0
_TRIES = 2  # one packet may be lost
_RECURSE = 0x0100
_POINTER, _INTERNET = 12, 1


def is_silent(server: str, address: str, *, port: int = _PORT) -> bool:
    """Say whether a server lets the question for an address's name go unanswered.

    Any answer counts, a refusal too. One that cannot be reached at all is not silent: then looking up
    fails at once.
    """
    labels = ipaddress.ip_address(address).reverse_pointer.encode().split(b".")
    name = b"".join(bytes([len(one)]) + one for one in labels) + b"\0"
    header = os.urandom(2) + struct.pack(">HHHHH", _RECURSE, 1, 0, 0, 0)
    question = header + name + struct.pack(">HH", _POINTER, _INTERNET)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            server, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.settimeout(_WITHIN_S)
            asking.connect(place)
            return not any(_answered(asking, question) for _ in range(_TRIES))
    except OSError:
        return False


def _answered(asking: socket.socket, question: bytes) -> bool:
    asking.send(question)
    try:
        return asking.recv(512)[:2] == question[:2]
    except TimeoutError:
        return False


# A lookup that takes longer is given up; so long each rank would wait, and more.
_GIVEN_UP_S = 3.0
_SLOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a lookup gave, and after how long; ``given_up`` if it did not end in time."""

    addresses: Sequence[str]
    seconds: float
    given_up: bool = False

    @property
    def is_slow(self) -> bool:
        return self.given_up or self.seconds > _SLOW_S

    def how_long(self) -> str:
        if self.given_up:
            return f"no answer within {self.seconds:.0f} s"
        return f"an answer after {self.seconds:.1f} s"


def own_name(surroundings: Surroundings) -> Iterator[Finding]:
    """Look up this machine's own name as torch does, and ``localhost``."""
    name = (surroundings.text("/proc/sys/kernel/hostname") or "").strip() or socket.gethostname()
    answer = _asked(lambda: network.resolve_host(name))
    own = {address for one in network.read_interfaces() for address in one.addresses}
    localhost = _asked(lambda: network.resolve_host("localhost"))
    findings = [*_judge_own(name, answer, own, surroundings), *_localhost(localhost)]
    seen = f"{name} is {', '.join(answer.addresses)}"
    yield from findings or [Finding(name="own-name", status=Status.OK, what=seen)]


def reverse_lookup(surroundings: Surroundings) -> Iterator[Finding]:
    """Ask for the names of this machine's address and of its router's, as each TCPStore client does."""
    addresses = [one.address for one in network.interface_candidates()[:1]]
    # The own address is often in /etc/hosts, where those of the others are not.
    addresses += _routers(surroundings)[:1]
    seen = []
    for address in addresses:
        answer = _asked(partial(_name_of, address))
        if answer.is_slow:
            yield _slow_reverse(address, answer, surroundings)
            return
        seen.append(f"{address} in {answer.seconds * 1000:.0f} ms")
    servers = _servers(surroundings)
    # The others are asked only after the first, and only of addresses that /etc/hosts does not have.
    if servers and addresses and is_silent(servers[0], addresses[0]):
        yield _silent_server(servers[0])
        return
    what = f"asked for the names of {' and '.join(seen)}" if seen else "no address to ask about"
    yield Finding(name="reverse-lookup", status=Status.OK, what=what)


def _servers(surroundings: Surroundings) -> list[str]:
    settings = surroundings.text("/etc/resolv.conf") or ""
    return re.findall(r"^nameserver\s+(\S+)", settings, re.MULTILINE)


def _asked(look_up: Callable[[], Sequence[str]]) -> _Answer:
    """Look up; again if it was slow but came: one lost packet or a busy machine is not a fault."""
    first = _ask(look_up)
    if first.given_up or not first.is_slow:
        return first
    return min(first, _ask(look_up), key=lambda one: one.seconds)


def _ask(look_up: Callable[[], Sequence[str]]) -> _Answer:
    """Look up in a thread of its own: the system's resolver cannot be told to give up."""
    answers: queue.Queue[Sequence[str]] = queue.Queue()

    def answer() -> None:
        found: Sequence[str] = ()
        try:
            found = look_up()
        finally:
            answers.put(found)  # whatever went wrong, it did not take long

    began = time.monotonic()
    threading.Thread(target=answer, daemon=True, name="lookup").start()
    try:
        found = answers.get(timeout=_GIVEN_UP_S)
    except queue.Empty:
        return _Answer(addresses=(), seconds=_GIVEN_UP_S, given_up=True)
    return _Answer(addresses=found, seconds=time.monotonic() - began)


def _name_of(address: str) -> Sequence[str]:
    try:
        return [socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]]
    except OSError:
        return []


def _judge_own(
    name: str, answer: _Answer, own: set[str], surroundings: Surroundings
) -> Iterator[Finding]:
    found = [ipaddress.ip_address(one) for one in answer.addresses]
    outside = [one for one in found if not one.is_loopback]
    if name.lower().partition(".")[0] == "localhost":
        yield _nameless(name)
    elif answer.is_slow:
        yield _slow_own(name, answer)
    elif not found:
        yield _unresolvable(name)
    elif not outside:
        yield _loopback(name, answer.addresses, _listed(name, surroundings))
    elif not any(str(one) in own for one in outside) and own:
        yield _elsewhere(name, [str(one) for one in outside], own, _listed(name, surroundings))
    elif all(one.version == 6 for one in outside):
        yield Finding(
            name="name-ipv6-only",
            status=Status.NOTE,
            what=f"the name {name} stands for IPv6 addresses only",
            why="all machines of a run then need IPv6; muster agrees on an address that all reach",
            evidence=", ".join(answer.addresses),
        )


def _hosts_line(name: str) -> str:
    best = next(iter(network.interface_candidates()), None)
    address = best.address if best else "ADDRESS"
    return f"echo '{address} {name}' | sudo tee -a /etc/hosts"


def _listed(name: str, surroundings: Surroundings) -> list[str]:
    """Return the lines of /etc/hosts that have a name, without what is only remarked there."""
    lines = (surroundings.text("/etc/hosts") or "").splitlines()
    entries = [line.partition("#")[0].split() for line in lines]
    return [" ".join(words) for words in entries if name in words[1:]]


def _source(name: str, listed: Sequence[str]) -> str:
    if listed:
        return f"/etc/hosts: {'; '.join(listed)}"
    return f"not from /etc/hosts: getent hosts {name}"


def _right_hosts(name: str, listed: Sequence[str]) -> str:
    """Return what makes /etc/hosts, which is asked first, say what is right."""
    return f"{_hosts_without(name)}\n{_hosts_line(name)}" if listed else _hosts_line(name)


def _hosts_without(name: str) -> str:
    """Return what takes a name out of /etc/hosts; in a container the file cannot be replaced as a whole."""
    pattern = f"s/[[:space:]]{name.replace('.', '[.]')}([[:space:]]|$)/\\1/g"
    kept = f'kept=$(sed -E "{pattern}" /etc/hosts) && printf "%s\\n" "$kept" > /etc/hosts'
    return f"sudo cp /etc/hosts /etc/hosts.before && sudo sh -c '{kept}'"


def _nameless(name: str) -> Finding:
    return Finding(
        name="name-is-localhost",
        status=Status.NOTE,
        what=f"this machine is called {name}, as every machine calls itself",
        why="in a run over several machines it could not be told from the others",
        fix="sudo hostnamectl set-hostname NAME",
    )


def _slow_own(name: str, answer: _Answer) -> Finding:
    return Finding(
        name="name-lookup-slow",
        status=Status.WARNING,
        what=f"looking up this machine's own name, {name}, is slow: {answer.how_long()}",
        why="a name server does not answer; gloo, torchrun and ssh look up names in every process",
        fix=f"{_hosts_line(name)}\ncat /etc/resolv.conf  # and take out servers that do not answer",
    )


def _unresolvable(name: str) -> Finding:
    return Finding(
        name="name-unresolvable",
        status=Status.WARNING,
        what=f"this machine does not know its own name, {name}",
        why="muster gets by without it; torchrun ends with “Temporary failure in name resolution” or "
        "“Name or service not known”, and gloo takes loopback",
        fix=_hosts_line(name),
    )


def _loopback(name: str, addresses: Sequence[str], listed: Sequence[str]) -> Finding:
    return Finding(
        name="name-is-loopback",
        status=Status.NOTE,
        what=f"the name {name} stands for {', '.join(addresses)}, which leads to this machine only",
        why="muster gets by, for it agrees on an address first; a bare torchrun over several machines "
        f"hangs or ends with “Connection refused, remote=[{addresses[0]}]”",
        fix=_right_hosts(name, listed),
        evidence=_source(name, listed),
    )


def _elsewhere(name: str, found: Sequence[str], own: set[str], listed: Sequence[str]) -> Finding:
    return Finding(
        name="name-leads-elsewhere",
        status=Status.WARNING,
        what=f"the name {name} stands for {', '.join(found)}, which this machine does not have",
        why="muster gets by, for it agrees on an address first; torchrun and gloo tell the others that "
        "address, and they reach another machine or none",
        fix=_right_hosts(name, listed),
        evidence=f"{_source(name, listed)}; addresses here: {', '.join(sorted(own))}",
    )


def _localhost(answer: _Answer) -> Iterator[Finding]:
    if "127.0.0.1" in answer.addresses or answer.given_up:
        return
    only_six = "::1" in answer.addresses
    stands = ", ".join(answer.addresses) or "nothing"
    yield Finding(
        name="localhost-wrong",
        status=Status.NOTE if only_six else Status.FAILURE,
        what=f"localhost stands for {stands}, not for 127.0.0.1",
        why="programs that meet at localhost (MASTER_ADDR, torchrun --standalone) do not find each other",
        fix="echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts",
    )


def _slow_reverse(address: str, answer: _Answer, surroundings: Surroundings) -> Finding:
    servers = ", ".join(_servers(surroundings)) or "none"
    return _reverse_is_slow(
        f"asking for the name of {address} is slow: {answer.how_long()}",
        address=address,
        evidence=f"/etc/resolv.conf: nameserver {servers}",
    )


def _silent_server(server: str) -> Finding:
    return _reverse_is_slow(
        f"the name server {server} does not answer, so that asking for a name takes many seconds",
        address="ADDRESS",
        evidence=f"/etc/resolv.conf: nameserver {server}; asked twice",
    )


def _reverse_is_slow(what: str, *, address: str, evidence: str) -> Finding:
    return Finding(
        name="reverse-lookup-slow",
        status=Status.WARNING,
        what=what,
        why="torch asks for the name of each rank that connects to its store, one after the other; a "
        "server that does not answer costs about 10 s each time",
        fix=f"echo '{address} NAME' | sudo tee -a /etc/hosts  # so for each machine, on each\n"
        "sudoedit /etc/resolv.conf  # or name a server there that answers",
        evidence=evidence,
    )


def _routers(surroundings: Surroundings) -> list[str]:
    """Return the routers of the default routes."""
    found = []
    for line in (surroundings.text("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[2] != "00000000":
            found.append(socket.inet_ntoa(struct.pack("<L", int(fields[2], 16))))
    return found


CHECKS = (
    Check(
        name="own-name",
        asks="Does this machine's own name lead to it?",
        run=own_name,
        deadline_s=4 * _GIVEN_UP_S + 2,
    ),
    Check(
        name="reverse-lookup",
        asks="Is the name of an address found quickly?",
        run=reverse_lookup,
        deadline_s=4 * _GIVEN_UP_S + 2,
    ),
)

"""Name resolution: whether this host resolves its own hostname, and how long lookups take."""

import ipaddress
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
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces as network

# Timeout of a lookup; each rank would wait at least this long.
_GIVEN_UP_S = 3.0
_SLOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The result of a lookup and its duration; ``given_up`` if it timed out."""

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
    """Resolve this host's hostname as torch does, and ``localhost``."""
    name = (surroundings.text("/proc/sys/kernel/hostname") or "").strip() or socket.gethostname()
    answer = _asked(lambda: network.resolve_host(name))
    own = {address for interface in network.read_interfaces() for address in interface.addresses}
    localhost = _asked(lambda: network.resolve_host("localhost"))
    findings = [*_judge_own(name, answer, own, surroundings), *_localhost(localhost)]
    seen = f"{name} is {', '.join(answer.addresses)}"
    yield from findings or [Finding(name="own-name", status=Status.OK, what=seen)]


def reverse_lookup(surroundings: Surroundings) -> Iterator[Finding]:
    """Do a reverse lookup of this host's address and its router's, as each TCPStore client does."""
    addresses = [candidate.address for candidate in network.interface_candidates()[:1]]
    # /etc/hosts often has the own address but not those of other hosts.
    addresses += _routers(surroundings)[:1]
    seen = []
    for address in addresses:
        answer = _asked(partial(_name_of, address))
        if answer.is_slow:
            yield _slow_reverse(address, answer, surroundings)
            return
        seen.append(f"{address} in {answer.seconds * 1000:.0f} ms")
    what = f"reverse lookup of {' and '.join(seen)}" if seen else "no address to look up"
    yield Finding(name="reverse-lookup", status=Status.OK, what=what)


def _servers(surroundings: Surroundings) -> list[str]:
    settings = surroundings.text("/etc/resolv.conf") or ""
    return re.findall(r"^nameserver\s+(\S+)", settings, re.MULTILINE)


def _asked(look_up: Callable[[], Sequence[str]]) -> _Answer:
    """Look up, twice if the first was slow: one lost packet or a busy host is not a fault."""
    first = _ask(look_up)
    if first.given_up or not first.is_slow:
        return first
    return min(first, _ask(look_up), key=lambda address: address.seconds)


def _ask(look_up: Callable[[], Sequence[str]]) -> _Answer:
    """Look up in a separate thread, because the system's resolver has no timeout."""
    answers: queue.Queue[Sequence[str]] = queue.Queue()

    def answer() -> None:
        found: Sequence[str] = ()
        try:
            found = look_up()
        finally:
            answers.put(found)  # an error is a quick answer too

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
    found = [ipaddress.ip_address(address) for address in answer.addresses]
    outside = [address for address in found if not address.is_loopback]
    if answer.is_slow:
        yield _slow_own(name, answer)
    elif not found:
        yield _unresolvable(name)
    elif not outside:
        yield _loopback(name, answer.addresses, _listed(name, surroundings))
    elif not any(str(address) in own for address in outside) and own:
        yield _elsewhere(
            name, [str(address) for address in outside], own, _listed(name, surroundings)
        )


def _hosts_line(name: str) -> str:
    best = next(iter(network.interface_candidates()), None)
    address = best.address if best else "ADDRESS"
    return f"echo '{address} {name}' | sudo tee -a /etc/hosts"


def _listed(name: str, surroundings: Surroundings) -> list[str]:
    """Return the entries of /etc/hosts that contain a name, without comments."""
    lines = (surroundings.text("/etc/hosts") or "").splitlines()
    entries = [line.partition("#")[0].split() for line in lines]
    return [" ".join(words) for words in entries if name in words[1:]]


def _source(name: str, listed: Sequence[str]) -> str:
    if listed:
        return f"/etc/hosts: {'; '.join(listed)}"
    return f"not from /etc/hosts: getent hosts {name}"


def _right_hosts(name: str, listed: Sequence[str]) -> str:
    """Return the commands that correct /etc/hosts, which the resolver reads first."""
    return f"{_hosts_without(name)}\n{_hosts_line(name)}" if listed else _hosts_line(name)


def _hosts_without(name: str) -> str:
    """Return the command that removes a name from /etc/hosts, in place (containers mount it)."""
    pattern = f"s/[[:space:]]{name.replace('.', '[.]')}([[:space:]]|$)/\\1/g"
    kept = f'kept=$(sed -E "{pattern}" /etc/hosts) && printf "%s\\n" "$kept" > /etc/hosts'
    return f"sudo cp /etc/hosts /etc/hosts.before && sudo sh -c '{kept}'"


def _slow_own(name: str, answer: _Answer) -> Finding:
    return finding(
        "name-lookup-slow",
        hostname=name,
        how_long=answer.how_long(),
        hosts_line=_hosts_line(name),
    )


def _unresolvable(name: str) -> Finding:
    return finding("name-unresolvable", hostname=name, fix=_hosts_line(name))


def _loopback(name: str, addresses: Sequence[str], listed: Sequence[str]) -> Finding:
    return finding(
        "name-is-loopback",
        hostname=name,
        addresses=", ".join(addresses),
        address=addresses[0],
        fix=_right_hosts(name, listed),
        evidence=_source(name, listed),
    )


def _elsewhere(name: str, found: Sequence[str], own: set[str], listed: Sequence[str]) -> Finding:
    return finding(
        "name-leads-elsewhere",
        hostname=name,
        found=", ".join(found),
        fix=_right_hosts(name, listed),
        source=_source(name, listed),
        addresses=", ".join(sorted(own)),
    )


def _localhost(answer: _Answer) -> Iterator[Finding]:
    if "127.0.0.1" in answer.addresses or answer.given_up:
        return
    only_six = "::1" in answer.addresses
    stands = ", ".join(answer.addresses) or "nothing"
    yield finding(
        "localhost-wrong", status=Status.NOTE if only_six else Status.FAILURE, stands=stands
    )


def _slow_reverse(address: str, answer: _Answer, surroundings: Surroundings) -> Finding:
    servers = ", ".join(_servers(surroundings)) or "none"
    return finding(
        "reverse-lookup-slow", address=address, how_long=answer.how_long(), servers=servers
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
        asks="Does this host's hostname resolve to its own address?",
        run=own_name,
        deadline_s=4 * _GIVEN_UP_S + 2,
    ),
    Check(
        name="reverse-lookup",
        asks="Are reverse lookups fast?",
        run=reverse_lookup,
        deadline_s=4 * _GIVEN_UP_S + 2,
    ),
)

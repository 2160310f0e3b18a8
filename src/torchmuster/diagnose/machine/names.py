"""Name resolution: whether this host resolves its own hostname, and how long lookups take."""

import ipaddress
import queue
import re
import socket
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

    @property
    def text(self) -> str:
        if self.given_up:
            return f"no answer within {self.seconds:.0f} s"
        return f"an answer after {self.seconds:.1f} s"


def own_name(surroundings: Surroundings) -> Iterator[Finding]:
    """Resolve this host's hostname as torch does, and ``localhost``."""
    name = (surroundings.text("/proc/sys/kernel/hostname") or "").strip() or socket.gethostname()
    answer = _look_up(lambda: network.resolve_host(name))
    localhost = _look_up(lambda: network.resolve_host("localhost"))
    findings = [*_judge_own(name, answer, surroundings), *_localhost(localhost)]
    seen = f"{name} is {', '.join(answer.addresses)}"
    yield from findings or [Finding(name="own-name", status=Status.OK, what=seen)]


def reverse_lookup(surroundings: Surroundings) -> Iterator[Finding]:
    """Look up the names of this host's address and of another one, as each TCPStore client does."""
    addresses = []
    for candidate in network.interface_candidates()[:1]:
        # /etc/hosts often has the own address but not those of all other hosts.
        neighbours = ipaddress.ip_network(f"{candidate.address}/24", strict=False)
        addresses = [candidate.address, str(neighbours[-2])]
    seen = []
    for address in addresses:
        answer = _look_up(partial(_name_of, address))
        if answer.is_slow:
            settings = surroundings.text("/etc/resolv.conf") or ""
            servers = re.findall(r"^nameserver\s+(\S+)", settings, re.MULTILINE)
            yield finding(
                "reverse-lookup-slow",
                address=address,
                how_long=answer.text,
                servers=", ".join(servers) or "none",
            )
            return
        seen.append(f"{address} in {answer.seconds * 1000:.0f} ms")
    what = f"reverse lookup of {' and '.join(seen)}" if seen else "no address to look up"
    yield Finding(name="reverse-lookup", status=Status.OK, what=what)


def _look_up(function: Callable[[], Sequence[str]]) -> _Answer:
    """Look up, twice if the first was slow: one lost packet or a busy host is not a fault."""
    first = _look_up_once(function)
    if first.given_up or not first.is_slow:
        return first
    return min(first, _look_up_once(function), key=lambda answer: answer.seconds)


def _look_up_once(function: Callable[[], Sequence[str]]) -> _Answer:
    """Look up in a separate thread, because the system's resolver has no timeout."""
    answers: queue.Queue[Sequence[str]] = queue.Queue()

    def answer() -> None:
        addresses: Sequence[str] = ()
        try:
            addresses = function()
        finally:
            answers.put(addresses)  # an error is a quick answer too

    began = time.monotonic()
    threading.Thread(target=answer, daemon=True, name="lookup").start()
    try:
        addresses = answers.get(timeout=_GIVEN_UP_S)
    except queue.Empty:
        return _Answer(addresses=(), seconds=_GIVEN_UP_S, given_up=True)
    return _Answer(addresses=addresses, seconds=time.monotonic() - began)


def _name_of(address: str) -> Sequence[str]:
    try:
        return [socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]]
    except OSError:
        return []


def _judge_own(name: str, answer: _Answer, surroundings: Surroundings) -> Iterator[Finding]:
    best = next(iter(network.interface_candidates()), None)
    fix = f"echo '{best.address if best else 'ADDRESS'} {name}' | sudo tee -a /etc/hosts"
    if answer.is_slow:
        yield finding("name-lookup-slow", hostname=name, how_long=answer.text, hosts_line=fix)
        return
    if not answer.addresses:
        yield finding("name-unresolvable", hostname=name, fix=fix)
        return
    source = f"not from /etc/hosts: getent hosts {name}"
    listed = _listed(name, surroundings)
    if listed:
        source = f"/etc/hosts: {'; '.join(listed)}"
        fix = f"{_hosts_without(name)}\n{fix}"
    outside = []
    for address in answer.addresses:
        if not ipaddress.ip_address(address).is_loopback:
            outside.append(address)
    own = {address for interface in network.read_interfaces() for address in interface.addresses}
    if not outside:
        yield finding(
            "name-is-loopback",
            hostname=name,
            addresses=", ".join(answer.addresses),
            address=answer.addresses[0],
            fix=fix,
            evidence=source,
        )
    elif own and not own & set(outside):
        yield finding(
            "name-leads-elsewhere",
            hostname=name,
            found=", ".join(outside),
            fix=fix,
            source=source,
            addresses=", ".join(sorted(own)),
        )


def _listed(name: str, surroundings: Surroundings) -> list[str]:
    """Return the entries of /etc/hosts that contain a name, without comments."""
    entries = []
    for line in (surroundings.text("/etc/hosts") or "").splitlines():
        words = line.partition("#")[0].split()
        if name in words[1:]:
            entries.append(" ".join(words))
    return entries


def _hosts_without(name: str) -> str:
    """Return the command that removes a name from /etc/hosts, in place (containers mount it)."""
    pattern = f"s/[[:space:]]{name.replace('.', '[.]')}([[:space:]]|$)/\\1/g"
    kept = f'kept=$(sed -E "{pattern}" /etc/hosts) && printf "%s\\n" "$kept" > /etc/hosts'
    return f"sudo cp /etc/hosts /etc/hosts.before && sudo sh -c '{kept}'"


def _localhost(answer: _Answer) -> Iterator[Finding]:
    if "127.0.0.1" in answer.addresses or answer.given_up:
        return
    status = Status.NOTE if "::1" in answer.addresses else Status.FAILURE
    yield finding("localhost-wrong", status=status, stands=", ".join(answer.addresses) or "nothing")


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

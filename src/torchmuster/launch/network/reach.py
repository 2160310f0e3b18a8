"""Try to reach the first host at each of its addresses, and choose the one that all hosts can reach."""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.job import Limits
from torchmuster.launch.network import firewall
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface
from torchmuster.launch.network.listening import request_line
from torchmuster.units import name_several

# The results of each other host, with its name.
Answers = Sequence[tuple[str, protocol.Reached]]

_PROBLEMS = {
    errno.ETIMEDOUT: "timeout",
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "no-route",
    errno.EAFNOSUPPORT: "no-route",  # IPv6 is disabled here
    errno.EADDRNOTAVAIL: "no-route",  # no address of the target's family here
}


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """A host of the run: its name, its ``sys.platform``, and its address as seen by the others."""

    name: str
    system: str
    address: str


def gloo_calls(caller: NodeAddress, called: NodeAddress) -> bool:
    """Return whether gloo connects from ``caller`` to ``called``."""
    mine, theirs = (ipaddress.ip_address(host.address) for host in (caller, called))
    return mine.version != theirs.version or mine.packed > theirs.packed


async def try_all_calls(
    reach: protocol.Reach, *, interfaces: Sequence[Interface] | None = None
) -> protocol.Reached:
    """Try all targets at the same time, each with the given timeout."""
    known = network_interfaces.read_interfaces() if interfaces is None else interfaces
    tries = [_try(target, reach.nonce, reach.timeout_s, known) for target in reach.targets]
    return protocol.Reached(results=tuple(await asyncio.gather(*tries)))


async def _try(
    target: protocol.Target, nonce: str, timeout_s: float, known: Sequence[Interface]
) -> protocol.ReachResult:
    result, connection = await connect_to(target, nonce, timeout_s=timeout_s, interfaces=known)
    if connection is not None:
        connection.close()
    return result


async def connect_to(
    target: protocol.Target, nonce: str, *, timeout_s: float, interfaces: Sequence[Interface]
) -> tuple[protocol.ReachResult, socket.socket | None]:
    """Try one target; return the result, and the open connection on success."""
    begun = time.monotonic()
    local = connection = None
    problem = ""
    try:
        async with asyncio.timeout(timeout_s):
            connection = await _connected(target)
            own = str(connection.getsockname()[0])
            interface = network_interfaces.interface_of(own, interfaces) or ""
            local = protocol.Address(address=own, interface=interface)
            if not await _knows(connection, nonce):
                problem = "impostor"
    except TimeoutError:
        problem = "timeout"
    except socket.gaierror:
        problem = "no-name"
    except OSError as error:
        problem = _PROBLEMS.get(error.errno or 0, "unreachable")
    except asyncio.CancelledError:
        if connection is not None:
            connection.close()
        raise
    if problem == "refused" and network_interfaces.is_local(target.address, interfaces):
        # An address that every host has (docker0): we connected to ourselves.
        problem = "impostor"
    if problem and connection is not None:
        connection.close()
        connection = None
    result = protocol.ReachResult(
        target=target, problem=problem, seconds=time.monotonic() - begun, local=local
    )
    return result, connection


async def _connected(target: protocol.Target) -> socket.socket:
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (target.address, target.port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _knows(connection: socket.socket, nonce: str) -> bool:
    """Return whether the other side answers with the nonce."""
    loop = asyncio.get_running_loop()
    wanted, answer = nonce.encode() + b"\n", b""
    with contextlib.suppress(ConnectionError):  # it closed the connection
        await loop.sock_sendall(connection, request_line(nonce))
        while len(answer) < len(wanted):
            piece = await loop.sock_recv(connection, len(wanted) - len(answer))
            if not piece:
                break
            answer += piece
    return hmac.compare_digest(answer, wanted)


def local_end(reached: protocol.Reached, address: str) -> protocol.Address | None:
    """Return the address and interface through which a host reached the chosen address."""
    return next(
        (
            result.local
            for result in reached.results
            if result.target.address == address and not result.problem
        ),
        None,
    )


def check_not_loopback(
    head: str,
    listening: protocol.Listening,
    requested: str | None,
    others: Sequence[protocol.Address],
) -> None:
    """Raise ``Impossible`` if the head host listens only at loopback addresses.

    ``asked`` is the requested address, ``others`` are the addresses of the host.
    """
    if not all(
        ipaddress.ip_address(candidate.address).is_loopback for candidate in listening.addresses
    ):
        return
    if requested is None:
        raise Impossible(
            f"{head} has no address that other hosts can reach",
            why="it has only a loopback address: its other interfaces are down or have no address",
            fix=f"ip address  # on {head}: bring an interface up; or list another host first",
        )
    own = ", ".join(f"{candidate.address} ({candidate.interface})" for candidate in others)
    found = ", ".join(candidate.address for candidate in listening.addresses)
    meaning = "this is" if found == requested else f"on {head} this resolves to {found},"
    raise Impossible(
        f"the other hosts cannot reach {head} at {requested}",
        why=f"{meaning} a loopback address, which always means the local host; "
        f"{head} has {own or 'no other address'}",
        fix="omit launch.address to use an address that all other hosts reach",
    )


def choose_address(
    head: str,
    system: str,
    listening: protocol.Listening,
    answers: Answers,
    *,
    timeout_s: float = Limits.reach_s,
) -> Decision[str]:
    """Return the first address of the head host that all other hosts reach.

    ``head`` is its display name and ``system`` its ``sys.platform``. Raises ``Impossible``
    if there is no such address.
    """
    troubles = {
        candidate: _troubles(candidate.address, listening.port, answers)
        for candidate in listening.addresses
    }
    chosen = next((candidate for candidate, found in troubles.items() if not found), None)
    if chosen is None:
        raise _no_common_address(listening, troubles, answers, head, system, timeout_s)
    who = f"all {len(answers)} other hosts reach it"
    if len(answers) == 1:
        who = f"{answers[0][0]} reaches it"
    elif not answers:
        who = "no other hosts"
    reason = f"{chosen.address} ({chosen.interface} of {head}): {who}"
    return Decision(value=chosen.address, reason=reason)


def problem_at(reached: protocol.Reached, target: protocol.Target) -> str:
    """Return why a host could not reach a target; "" if it did."""
    return next(
        (result.problem for result in reached.results if result.target == target), "not-tried"
    )


def _troubles(address: str, port: int, answers: Answers) -> dict[str, list[str]]:
    """Return the hosts that do not reach an address, by problem."""
    target = protocol.Target(address=address, port=port)
    found: dict[str, list[str]] = {}
    for node, reached in answers:
        problem = problem_at(reached, target)
        if problem:
            found.setdefault(problem, []).append(node)
    return found


def _no_common_address(
    listening: protocol.Listening,
    troubles: Mapping[protocol.Address, Mapping[str, Sequence[str]]],
    answers: Answers,
    head: str,
    system: str,
    timeout_s: float,
) -> Impossible:
    problems = {problem for found in troubles.values() for problem in found}
    lines = [
        f"{candidate.address} ({candidate.interface}): {_problems_text(found, timeout_s)}"
        for candidate, found in troubles.items()
    ]
    failing = [{node for nodes in found.values() for node in nodes} for found in troubles.values()]
    everywhere = [node for node, _ in answers if all(node in some for some in failing)]
    if everywhere:
        verb = "does" if len(everywhere) == 1 else "do"
        what = f"{name_several(everywhere)} {verb} not reach {head} on port {listening.port}"
    else:
        what = f"no address of {head} is reachable from all of {name_several([node for node, _ in answers])}"
    fixes = []
    if problems & {"timeout", "refused", "unreachable", "not-tried"}:
        command = firewall.open_command(system, listening.port)
        fixes.append(f"allow connections on {head}:\n{command}")
        fixes.append(
            "the ranks also connect to each other on ephemeral ports: each host must allow connections "
            "to these ports from the other hosts"
        )
    if not fixes or not everywhere:
        fixes.append(f"pass an address of {head} that all hosts reach: --set launch.address=ADDR")
    return Impossible(what, why="\n".join(lines), fix="\n".join(fixes))


def _problems_text(found: Mapping[str, Sequence[str]], timeout_s: float) -> str:
    return "; ".join(
        f"{name_several(nodes)}: {meaning_of_errno(problem, timeout_s)}"
        for problem, nodes in found.items()
    )


def meaning_of_errno(problem: str, timeout_s: float) -> str:
    """Return the meaning of a problem."""
    meanings = {
        "timeout": f"no answer in {timeout_s:g} s: a firewall drops the packets or the link is down",
        "refused": "refused: a firewall rejects the connection, or the address belongs to another host",
        "unreachable": "unreachable: a firewall or router rejects the connection",
        "no-route": "no route: the host is not connected to this network",
        "impostor": "another host answered: the same address is in use there too (docker0, a "
        "bridge, a copied virtual machine)",
        "no-name": "the name does not resolve there",
        "not-tried": "not tried",
    }
    return meanings.get(problem, problem)

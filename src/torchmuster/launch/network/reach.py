"""Try to reach the first host at each of its addresses, and choose the one that all hosts can reach."""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import socket
import time
from collections.abc import Sequence

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
_MEANINGS = {
    "timeout": "no answer in {timeout_s:g} s: a firewall drops the packets or the link is down",
    "refused": "refused: a firewall rejects the connection, or the address belongs to another host",
    "unreachable": "unreachable: a firewall or router rejects the connection",
    "no-route": "no route: the host is not connected to this network",
    "impostor": "another host answered: the same address is in use there too (docker0, a "
    "bridge, a copied virtual machine)",
    "no-name": "the name does not resolve there",
    "not-tried": "not tried",
}
_OF_A_FIREWALL = {"timeout", "refused", "unreachable", "not-tried"}


async def try_all_calls(
    reach: protocol.Reach, *, interfaces: Sequence[Interface] | None = None
) -> protocol.Reached:
    """Try all targets at the same time, each with the given timeout."""
    known = network_interfaces.read_interfaces() if interfaces is None else interfaces
    tries = []
    for target in reach.targets:
        tries.append(connect_to(target, reach.nonce, timeout_s=reach.timeout_s, interfaces=known))
    results = []
    for result, connection in await asyncio.gather(*tries):
        results.append(result)
        if connection is not None:
            connection.close()
    return protocol.Reached(results=tuple(results))


async def connect_to(
    target: protocol.Target, nonce: str, *, timeout_s: float, interfaces: Sequence[Interface]
) -> tuple[protocol.ReachResult, socket.socket | None]:
    """Try one target; return the result, and the open connection on success."""
    begun = time.monotonic()
    local = None
    problem = ""
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connection, (target.address, target.port))
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
        if problem == "refused" and network_interfaces.is_local(target.address, interfaces):
            # An address that every host has (docker0): we connected to ourselves.
            problem = "impostor"
        result = protocol.ReachResult(
            target=target, problem=problem, seconds=time.monotonic() - begun, local=local
        )
        if problem:
            return result, None
        undo.pop_all()
        return result, connection


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
    for result in reached.results:
        if result.target.address == address and not result.problem:
            return result.local
    return None


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
    addresses = listening.addresses
    if answers and all(ipaddress.ip_address(own.address).is_loopback for own in addresses):
        raise Impossible(
            f"the other hosts cannot reach {head} at {addresses[0].address}",
            why="this is a loopback address, which always means the local host",
            fix="omit launch.address to use an address that all other hosts reach\n"
            f"ip address  # on {head}: if it has no other address, bring an interface up",
        )
    lines: list[str] = []
    seen_problems: set[str] = set()
    unreached_by = {name for name, _ in answers}  # at every address
    for candidate in addresses:
        by_problem = _hosts_by_problem(candidate.address, listening.port, answers)
        if not by_problem:
            place = f"{candidate.address} ({candidate.interface} of {head})"
            reason = f"{place}: reached by {name_several([name for name, _ in answers])}"
            return Decision(value=candidate.address, reason=reason)
        seen_problems.update(by_problem)
        unreached_by &= set().union(*by_problem.values())
        texts = []
        for problem, names in by_problem.items():
            texts.append(f"{name_several(names)}: {meaning_of_errno(problem, timeout_s)}")
        lines.append(f"{candidate.address} ({candidate.interface}): {'; '.join(texts)}")
    names = [name for name, _ in answers if name in unreached_by]
    what = f"{name_several(names)} {'does' if len(names) == 1 else 'do'} not reach {head}"
    if not names:
        what = f"no address of {head} is reached by all other hosts"
    fixes = []
    if seen_problems & _OF_A_FIREWALL:
        fixes.append(
            f"allow connections on {head}:\n{firewall.open_command(system, listening.port)}\n"
            "the ranks also connect to each other on ephemeral ports: each host must allow connections "
            "to these ports from the other hosts"
        )
    if not fixes or not names:
        fixes.append(f"pass an address of {head} that all hosts reach: --set launch.address=ADDR")
    raise Impossible(f"{what} on port {listening.port}", why="\n".join(lines), fix="\n".join(fixes))


def _hosts_by_problem(address: str, port: int, answers: Answers) -> dict[str, list[str]]:
    """Return the hosts that do not reach an address, by problem."""
    target = protocol.Target(address=address, port=port)
    by_problem: dict[str, list[str]] = {}
    for name, reached in answers:
        problem = "not-tried"
        for result in reached.results:
            if result.target == target:
                problem = result.problem
        if problem:
            by_problem.setdefault(problem, []).append(name)
    return by_problem


def meaning_of_errno(problem: str, timeout_s: float) -> str:
    """Return the meaning of a problem."""
    return _MEANINGS.get(problem, problem).format(timeout_s=timeout_s)

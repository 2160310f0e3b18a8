"""Try to reach the first host at each of its addresses, and choose the one that all hosts can reach."""

import asyncio
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
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

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
            connection[1].close()
    return protocol.Reached(results=tuple(results))


async def connect_to(
    target: protocol.Target, nonce: str, *, timeout_s: float, interfaces: Sequence[Interface]
) -> tuple[protocol.ReachResult, Connection | None]:
    """Try one target; return the result, and the open connection on success."""
    began_s = time.monotonic()
    connection: Connection | None = None
    local = None
    problem = ""
    try:
        async with asyncio.timeout(timeout_s):
            connection = await asyncio.open_connection(target.address, target.port)
            reader, writer = connection
            own = str(writer.get_extra_info("sockname")[0])
            interface = network_interfaces.interface_of(own, interfaces) or ""
            local = protocol.Address(address=own, interface=interface)
            writer.write(request_line(nonce))
            answer = await reader.readline()
            if not hmac.compare_digest(answer, nonce.encode() + b"\n"):
                problem = "impostor"
    except TimeoutError:
        problem = "timeout"
    except socket.gaierror:
        problem = "no-name"
    except (OSError, ValueError) as error:  # ValueError: a line that is too long
        problem = "impostor"
        if connection is None:
            problem = _PROBLEMS.get(getattr(error, "errno", None) or 0, "unreachable")
    if problem == "refused" and network_interfaces.is_local(target.address, interfaces):
        # An address that every host has (docker0): we connected to ourselves.
        problem = "impostor"
    if problem and connection is not None:
        connection[1].close()
        connection = None
    result = protocol.ReachResult(
        target=target, problem=problem, seconds=time.monotonic() - began_s, local=local
    )
    return result, connection


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
    names = [name for name, _ in answers]
    lines: list[str] = []
    unreached_by = set(names)  # at every address
    for own in listening.addresses:
        by_problem: dict[str, list[str]] = {}
        for name, reached in answers:
            problems = {result.target.address: result.problem for result in reached.results}
            problem = problems.get(own.address, "not-tried")
            if problem:
                by_problem.setdefault(problem, []).append(name)
            else:
                unreached_by.discard(name)
        label = f"{own.address} ({own.interface} of {head})"
        if not by_problem:
            reason = f"{label}: reached by {name_several(names)}"
            return Decision(value=own.address, reason=reason)
        for problem, hosts in by_problem.items():
            lines.append(f"{label}, {name_several(hosts)}: {meaning_of(problem, timeout_s)}")
    if all(ipaddress.ip_address(own.address).is_loopback for own in listening.addresses):
        raise Impossible(
            f"the other hosts cannot reach {head} at {listening.addresses[0].address}",
            why="this is a loopback address, which always means the local host",
            fix="omit launch.address to use an address that all other hosts reach\n"
            f"ip address  # on {head}: if it has no other address, bring an interface up",
        )
    who = [name for name in names if name in unreached_by]
    what = f"no address of {head} is reached by all other hosts"
    if who:
        what = f"{head} is not reached by {name_several(who)}"
    raise Impossible(
        f"{what} on port {listening.port}",
        why="\n".join(lines),
        fix=f"allow connections on {head}:\n{firewall.open_command(system, listening.port)}\n"
        "the ranks also connect to each other on ephemeral ports: each host must allow connections "
        f"to these ports from the other hosts\nor pass an address of {head} that all hosts reach: "
        "--set launch.address=ADDR",
    )


def meaning_of(problem: str, timeout_s: float) -> str:
    """Return the meaning of a problem, such as ``refused``."""
    return _MEANINGS.get(problem, problem).format(timeout_s=timeout_s)

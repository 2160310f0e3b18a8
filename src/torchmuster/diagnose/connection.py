"""One direction of one port: can this machine reach that one there, and if not, why not."""

import errno
import socket
import time

from torchmuster.finding import Finding, Status
from torchmuster.launch.network import firewall
from torchmuster.launch.network.reach import meaning_of_errno

# An absent machine is given up by the network after about 3 s; a firewall's answer comes at once.
_AT_ONCE_S = 1.0

_CAUSES = {
    "timeout": "connection-times-out",
    "refused": "connection-refused",
    "prohibited": "connection-prohibited",
    "absent": "host-absent",
    "no-route": "no-route",
    "no-name": "name-unknown",
}


def check_connection(address: str, port: int, timeout_s: float) -> Finding:
    """Connect to a TCP port of another machine, and say how that went."""
    here = socket.gethostname()
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            local = connection.getsockname()[0]
    except OSError as error:
        problem = problem_of(error, time.monotonic() - began)
        return Finding(
            name=_CAUSES[problem],
            status=Status.FAILURE,
            what=f"{here} does not reach port {port} of {address}",
            why=_why(problem, address, port, timeout_s),
            fix=_fix_connection(problem, address, port),
            evidence=f"{type(error).__name__}: {error}",
        )
    took_ms = (time.monotonic() - began) * 1e3
    return Finding(
        name="connection",
        status=Status.OK,
        what=f"{here} reaches port {port} of {address}",
        evidence=f"from {local} in {took_ms:.1f} ms; try the other direction from {address} too",
    )


def problem_of(error: OSError, seconds: float) -> str:
    """Return what an error of connecting means, which came after so many seconds."""
    if isinstance(error, socket.gaierror):
        return "no-name"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if error.errno == errno.EHOSTUNREACH:
        return "prohibited" if seconds < _AT_ONCE_S else "absent"
    return "no-route"


def _why(problem: str, address: str, port: int, timeout_s: float) -> str:
    words = {
        "refused": f"{address} is there, but no program listens at port {port}, or a firewall rejects "
        "the call; other ports may work",
        "prohibited": "a firewall, there or on the way, answers at once that this is not allowed",
        "absent": "nobody answers at that address: the machine is off, or on another network",
    }
    return words.get(problem) or meaning_of_errno(problem, timeout_s)


def _fix_connection(problem: str, address: str, port: int) -> str:
    if problem in ("timeout", "prohibited", "refused"):
        start = f"start the program that listens there first, or on {address} open the port\n"
        opened = f"on {address} open the port\n"
        return (start if problem == "refused" else opened) + firewall.open_command_anywhere(port)
    if problem == "no-name":
        return f"use the address instead of the name, or add it to /etc/hosts: … {address}"
    return f"compare the networks of both machines\nip route get {address}"

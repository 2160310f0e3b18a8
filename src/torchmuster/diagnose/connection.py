"""Test whether this host can connect to a TCP port of another one, and if not, why."""

import errno
import socket
import time

from torchmuster.finding import Finding, Status
from torchmuster.launch.network import firewall
from torchmuster.launch.network.reach import meaning_of

# The kernel reports an absent host after about 3 s; a firewall rejects at once.
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
    """Connect to a TCP port of another host, and return the result as a finding."""
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
            fix=_fix(problem, address, port),
            evidence=f"{type(error).__name__}: {error}",
        )
    took_ms = (time.monotonic() - began) * 1e3
    return Finding(
        name="connection",
        status=Status.OK,
        what=f"{here} reaches port {port} of {address}",
        evidence=f"from {local} in {took_ms:.1f} ms; test the other direction from {address} too",
    )


def problem_of(error: OSError, seconds: float) -> str:
    """Return the problem that a connection error means, if it came after ``seconds``."""
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
    texts = {
        "refused": f"{address} is up, but no program listens on port {port}, or a firewall rejects "
        "the connection; other ports may work",
        "prohibited": "a firewall on that host or on the path prohibits the connection (ICMP)",
        "absent": "no reply from that address: the host is off, or on another network",
    }
    return texts.get(problem) or meaning_of(problem, timeout_s)


def _fix(problem: str, address: str, port: int) -> str:
    if problem in ("timeout", "prohibited", "refused"):
        start = f"first start the program that listens on it, or open the port on {address}\n"
        opened = f"open the port on {address}\n"
        return (start if problem == "refused" else opened) + firewall.open_command_anywhere(port)
    if problem == "no-name":
        return f"use the IP address instead of the name, or add the name to /etc/hosts: … {address}"
    return f"compare the networks of both hosts\nip route get {address}"

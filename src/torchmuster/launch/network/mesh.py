"""Whether the ranks of different machines will reach each other, tried before they start.

The meeting port is not all: ranks connect at ports that the system gives out, and a firewall that
lets only the meeting port through leaves them waiting for many minutes without a word. So each machine
opens any port for a moment and some of the others call it.

Which directions are needed depends on the library. NCCL needs both. With gloo of each two machines the
one with the greater address calls the other, and nobody calls back.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmuster.errors import Impossible
from torchmuster.launch.network import firewall
from torchmuster.launch.network.reach import meaning, several

# Each machine is called by so many others: among thousands not all can try all.
CALLERS = 8
_LINES_SHOWN = 4
# Where most systems take the ports from that they give out; else any that is not the system's own.
_USUAL_PORTS, _ALL_PORTS = (32768, 60999), (1024, 65535)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine of the run: its name, its ``sys.platform``, and its address towards the others."""

    name: str
    system: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """One machine's try to reach another at any port; ``problem`` is "" if it did (see ``wire``)."""

    caller: Place
    called: Place
    port: int
    problem: str


def called_by(place: int, count: int) -> list[int]:
    """Return the places that one place calls: those that follow it, but not the first."""
    following = ((place + step) % count for step in range(1, min(count, CALLERS + 1)))
    return [one for one in following if one != 0]


def check(calls: Sequence[Call], *, both_ways: bool, port: int, timeout_s: float) -> str:
    """Raise ``Impossible`` if ranks that have to could not connect; return what is to be said else.

    ``both_ways`` is for NCCL. ``port`` is the meeting port, at which all have reached the first.
    """
    failed = [one for one in calls if one.problem]
    fatal = [one for one in failed if both_ways or gloo_calls(one.caller, one.called)]
    if fatal:
        raise _blocked(fatal, port, timeout_s)
    if failed:
        callers, called = _names(one.caller for one in failed), _names(one.called for one in failed)
        verb = "does" if len(callers) == 1 else "do"
        return (
            f"{several(callers)} {verb} not reach {several(called)} at the ports at which ranks talk; "
            "gloo does not need that direction, NCCL would"
        )
    return ""


def gloo_calls(caller: Place, called: Place) -> bool:
    """Say whether, of two machines, gloo's connection is made by this one."""
    mine, theirs = (ipaddress.ip_address(one.address) for one in (caller, called))
    return mine.version != theirs.version or mine.packed > theirs.packed


def _blocked(fatal: Sequence[Call], port: int, timeout_s: float) -> Impossible:
    callers, called = _names(one.caller for one in fatal), _names(one.called for one in fatal)
    verb = "does" if len(callers) == 1 else "do"
    lines = [
        f"{one.caller.name} to {one.called.name} ({one.called.address}, at port {one.port} to try it): "
        f"{meaning(one.problem, timeout_s)}"
        for one in fatal[:_LINES_SHOWN]
    ]
    if len(fatal) > _LINES_SHOWN:
        lines.append(f"and {len(fatal) - _LINES_SHOWN:,} more")
    lines.append(f"ranks connect at ports that the system gives out; port {port} is not enough")
    fixes = []
    for one in fatal[:_LINES_SHOWN]:
        usual = _USUAL_PORTS[0] <= one.port <= _USUAL_PORTS[1]
        ports = _USUAL_PORTS if usual else _ALL_PORTS
        command = firewall.open_command(one.called.system, ports, source=one.caller.address)
        fixes.append(f"let {one.caller.name} in at {one.called.name}:\n{command}")
    return Impossible(
        f"{several(callers)} {verb} not reach {several(called)} at the ports at which ranks talk",
        why="\n".join(lines),
        fix="\n".join(fixes),
    )


def _names(places: Iterable[Place]) -> list[str]:
    return list(dict.fromkeys(one.name for one in places))

"""Test which hosts reach each other, and at which of their addresses."""

import asyncio
import contextlib
import ipaddress
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchmuster.diagnose.links.call import LIMIT_S as MEASURED_WITHIN_S
from torchmuster.diagnose.links.messages import (
    Call,
    Called,
    Interface,
    Result,
    Serve,
    Served,
    Target,
    encode_message,
    read_message,
)
from torchmuster.diagnose.links.model import NOT_TRIED, End, Link
from torchmuster.diagnose.rounds import Pair
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import USUAL_PORT

_ANSWER_WITHIN_S = 20.0
# The request takes effect even if the answer is late; a lost host must not delay the others.
_DONE_WITHIN_S = 2.0
# Ranks the problems of an address that no host reaches: lower means that packets got closer to it.
_NEARNESS = {"": 0, "refused": 1, "prohibited": 1, "timeout": 2, "absent": 3, "no-route": 4}
_FARTHEST = 5
# Dials in parallel per host, as each needs a socket at both ends.
_AT_ONCE = 200
# The host may have been busy, and of very many dials, one fails by chance.
_TRIES = 3


class LinkProbe(Protocol):
    """A host that accepts requests; see ``HostProbe`` in ``diagnose/probing.py``."""

    name: str
    place: int
    record: protocol.NodeRecord

    async def ask(self, verb: str, argument: Any = None, *, within_s: float) -> Any:
        """Return the host's answer."""


@dataclass(frozen=True, kw_only=True)
class OpenedListeners:
    """The ports that a host has opened, or the findings that explain why it did not."""

    examiner: LinkProbe
    served: Served | None = None
    findings: tuple[Finding, ...] = ()


async def serve_all(
    examiners: Sequence[LinkProbe], nonce: str, port: int | None, address: str | None
) -> list[OpenedListeners]:
    """Make every host open its ports; the first one also opens the rendezvous port."""
    first = Serve(nonce=nonce, meeting=True, port=port, address=address)
    others = Serve(nonce=nonce, port=port)
    requests = [first, *(others for _ in examiners[1:])]
    return list(await asyncio.gather(*map(_serve, examiners, requests)))


async def _serve(examiner: LinkProbe, asked: Serve) -> OpenedListeners:
    try:
        told = await examiner.ask("serve", encode_message(asked), within_s=_ANSWER_WITHIN_S)
        served = read_message(Served, told)
    except MusterError as error:
        own = [replace(one, hosts=(examiner.name,)) for one in from_error(error)]
        return OpenedListeners(examiner=examiner, findings=tuple(own))
    down = _without_link(examiner.name, served)
    if down is not None:  # no host can reach it, and it can reach none
        down = replace(down, hosts=(examiner.name,))
        return OpenedListeners(examiner=examiner, findings=(down,))
    own = [
        replace(one, hosts=(examiner.name,)) for one in _own_findings(examiner.name, asked, served)
    ]
    return OpenedListeners(examiner=examiner, served=served, findings=tuple(own))


def _own_findings(name: str, asked: Serve, served: Served) -> Iterable[Finding]:
    trouble = served.meeting_trouble
    if trouble is not None:
        yield Finding(
            name="meeting-port-taken",
            status=Status.FAILURE,
            what=f"{name}: {trouble.what}",
            why=trouble.why,
            fix=trouble.fix,
        )
    elif asked.meeting and asked.port is None and served.meeting_port != USUAL_PORT:
        yield Finding(
            name="meeting-port-taken",
            status=Status.NOTE,
            what=f"{name}: port {USUAL_PORT} is in use; Muster uses {served.meeting_port} instead",
            why=f"{served.meeting_reason}. torchrun itself would hang without a message",
            fix=f"find the process that uses it, on {name}:\nss -ltnp 'sport = :{USUAL_PORT}'",
        )


def _without_link(name: str, served: Served) -> Finding | None:
    """Return the finding for a host without a working interface; None if it has one."""
    if not all(ipaddress.ip_address(one.address).is_loopback for one in served.addresses):
        return None
    idle = [one for one in served.interfaces if one.networks and not _is_loopback(one)]
    if not idle:
        return Finding(
            name="link-down",
            status=Status.FAILURE,
            what=f"{name} is not connected: its only address is 127.0.0.1",
            why="no interface has an address that other hosts can reach",
            fix=f"assign one, on {name}:\nip -br address",
        )
    first = idle[0]
    where = f"{first.name} ({first.networks[0]})"
    if first.up:
        return Finding(
            name="link-down",
            status=Status.FAILURE,
            what=f"{name} is not connected: {where} has no carrier",
            why="the interface is up but has no link: the cable is disconnected or broken, or the "
            "switch port is off",
            fix="connect the cable, or try another cable and switch port; "
            f"the link works when this prints yes, on {name}:\n"
            f"sudo ethtool {first.name} | grep -i 'link detected'",
        )
    return Finding(
        name="link-down",
        status=Status.FAILURE,
        what=f"{name} is not connected: {where} is down",
        why="the interface has an address but is down",
        fix=f"bring it up, on {name}:\nsudo ip link set dev {first.name} up",
    )


def _is_loopback(interface: Interface) -> bool:
    return any(ipaddress.ip_interface(one).is_loopback for one in interface.networks)


async def close_listeners(examiner: LinkProbe, nonce: str) -> None:
    """Make a host close its ports; otherwise it closes them after a timeout."""
    with contextlib.suppress(MusterError):
        await examiner.ask("close", {"nonce": nonce}, within_s=_DONE_WITHIN_S)


async def ask_to_call(examiner: LinkProbe, call: Call) -> list[Result]:
    """Return the results of a host's calls; ``NOT_TRIED`` for all if it does not answer."""
    within_s = call.timeout_s + _ANSWER_WITHIN_S
    if call.measure:
        within_s += (2 * call.timeout_s + MEASURED_WITHIN_S) * len(call.targets)
    try:
        told = await examiner.ask("call", encode_message(call), within_s=within_s)
        results = read_message(Called, told).results
    except MusterError:
        results = ()
    if len(results) != len(call.targets):
        return [Result(problem=NOT_TRIED, seconds=0.0) for _ in call.targets]
    return list(results)


@dataclass(kw_only=True)
class Tried:
    """The results of one host's calls to another, by the other's addresses."""

    results: dict[str, Result] = field(default_factory=dict)
    meeting: dict[str, Result] = field(default_factory=dict)


async def dial_everyone(
    opened: Sequence[OpenedListeners], nonce: str, timeout_s: float
) -> dict[Pair, Tried]:
    """Make every host dial every other at all its addresses; return the results by direction."""
    dialed: dict[Pair, Tried] = {}
    callers = [position for position, host in enumerate(opened) if host.served is not None]
    await asyncio.gather(
        *(_dial_from(caller, opened, nonce, timeout_s, dialed) for caller in callers)
    )
    return dialed


async def _dial_from(
    caller: int,
    opened: Sequence[OpenedListeners],
    nonce: str,
    timeout_s: float,
    dialed: dict[Pair, Tried],
) -> None:
    targets: list[tuple[int, bool, Target]] = []
    # Each caller starts with its neighbour, so that no host is dialed by all at once.
    for step in range(1, len(opened)):
        called = (caller + step) % len(opened)
        served = opened[called].served
        if served is None:
            continue
        for own in served.addresses:
            targets.append((called, False, Target(address=own.address, port=served.port)))
            if served.meeting_port is not None:
                target = Target(address=own.address, port=served.meeting_port)
                targets.append((called, True, target))
    left = targets
    for _ in range(_TRIES):
        silent = []
        for start in range(0, len(left), _AT_ONCE):
            batch = left[start : start + _AT_ONCE]
            call = Call(
                nonce=nonce, targets=tuple(target for *_, target in batch), timeout_s=timeout_s
            )
            results = await ask_to_call(opened[caller].examiner, call)
            for entry, result in zip(batch, results, strict=True):
                called, is_meeting, target = entry
                tried = dialed.setdefault((caller, called), Tried())
                by_address = tried.meeting if is_meeting else tried.results
                by_address[target.address] = result
                if result.problem == "timeout":
                    silent.append(entry)
        left = silent


def ends_of(found: Sequence[OpenedListeners], tried: dict[Pair, Tried]) -> list[End]:
    """Return each host with the address at which most others reach it."""
    ends = []
    for position, one in enumerate(found):
        calls = [entry for (_, called), entry in tried.items() if called == position]
        own = one.served.addresses if one.served is not None else ()
        chosen = min(own, key=lambda at: _distance(at.address, calls), default=None)
        end = _end(one, chosen)
        notes = tuple(_passed_over(end, own, calls))
        ends.append(replace(end, findings=(*end.findings, *notes)))
    return ends


def _passed_over(
    end: End, own: Sequence[protocol.Address], calls: Sequence[Tried]
) -> Iterable[Finding]:
    """Yield a note for each preferred address that no other host reaches."""
    for one in own:
        if one.address == end.address or end.address is None or any(_problems(end.address, calls)):
            return
        problems = _problems(one.address, calls)
        # The address of a local container bridge leads each host to itself, which is normal.
        if all(problems) and "impostor" not in problems:
            yield Finding(
                name="address-passed-over",
                status=Status.NOTE,
                what=f"{end.name} is reached at {end.address} ({end.interface}), but not at "
                f"{one.address} ({one.interface})",
                why=f"the others cannot connect to {one.address} "
                f"({', '.join(dict.fromkeys(problems))}), which Muster would have preferred",
            )


def _problems(address: str, calls: Sequence[Tried]) -> list[str]:
    return [entry.results[address].problem for entry in calls if address in entry.results]


def _distance(address: str, calls: Sequence[Tried]) -> tuple[int, int]:
    """Return how many hosts do not reach an address, and a score of how far off they are."""
    problems = _problems(address, calls)
    farness = sum(_NEARNESS.get(problem, _FARTHEST) for problem in problems)
    return sum(map(bool, problems)), farness


def _end(found: OpenedListeners, chosen: protocol.Address | None) -> End:
    examiner, served = found.examiner, found.served
    end = End(
        name=examiner.name,
        place=examiner.place,
        system=examiner.record.system,
        findings=found.findings,
    )
    if chosen is None or served is None:
        return end
    interface = next((one for one in served.interfaces if one.name == chosen.interface), None)
    return replace(
        end,
        address=chosen.address,
        interface=chosen.interface,
        network=_network(chosen.address, interface),
        mtu_bytes=interface.mtu_bytes if interface else None,
        speed_mbits=interface.speed_mbits if interface else None,
        given_out_ports=served.given_out_ports,
        meeting_port=served.meeting_port,
    )


def _network(address: str, interface: Interface | None) -> str | None:
    for word in interface.networks if interface else ():
        known = ipaddress.ip_interface(word)
        if known.ip == ipaddress.ip_address(address):
            return str(known.network)
    return None


def links_of(
    ends: Sequence[End], found: Sequence[OpenedListeners], tried: dict[Pair, Tried]
) -> dict[Pair, Link]:
    """Return both directions of all pairs, each with its problem, if any."""
    links = {}
    for caller, called in itertools.permutations(range(len(ends)), 2):
        entry = tried.get((caller, called), Tried())
        address, served = ends[called].address or "", found[called].served
        data, meeting = entry.results.get(address), entry.meeting.get(address)
        links[caller, called] = Link(
            source=ends[caller],
            target=ends[called],
            problem=data.problem if data else NOT_TRIED,
            meeting_problem=meeting.problem if meeting else None,
            local=data.local.address if data and data.local else None,
            port=served.port if served else None,
            seconds=data.seconds if data else 0.0,
        )
    return links

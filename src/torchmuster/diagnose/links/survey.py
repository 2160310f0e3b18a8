"""Test and measure the links between hosts, run by the launcher.

Every host opens ports and dials every other host at all its addresses, which shows who reaches whom
and at which address. Then the hosts measure the links of a ring, in rounds in which no host takes
part twice. Links that look bad are measured again: the best try counts.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from torchmuster.diagnose.links import judge
from torchmuster.diagnose.links.call import LIMIT_S as MEASURED_WITHIN_S
from torchmuster.diagnose.links.model import (
    Call,
    Called,
    End,
    Figures,
    Interface,
    Link,
    Problem,
    Result,
    Serve,
    Served,
    Target,
    read_message,
)
from torchmuster.diagnose.rounds import Pair, disjoint
from torchmuster.diagnose.texts import finding
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import USUAL_PORT, Limits

_ANSWER_WITHIN_S = 20.0
# The request takes effect even if the answer is late; a lost host must not delay the others.
_DONE_WITHIN_S = 2.0
# Ranks the problems of an address: lower means that packets got closer to it.
_NEARNESS = (
    Problem.NONE,
    Problem.REFUSED,
    Problem.PROHIBITED,
    Problem.TIMEOUT,
    Problem.ABSENT,
    Problem.NO_ROUTE,
    Problem.IMPOSTOR,
    Problem.NOT_TRIED,
)
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
class Listener:
    """A host with the ports that it has opened, or the findings that explain why it did not."""

    host: LinkProbe
    served: Served | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Dials:
    """The results of one host's calls to another, by the other's addresses."""

    results: dict[str, Result] = field(default_factory=dict)
    meeting: dict[str, Result] = field(default_factory=dict)  # at the rendezvous port


async def survey_links(
    hosts: Sequence[LinkProbe],
    *,
    port: int | None = None,
    address: str | None = None,
    timeout_s: float = Limits.reach_s,
) -> list[Link]:
    """Return both directions of every pair of hosts; those of the ring have figures.

    The first host has the rendezvous port. ``port`` and ``address`` are as in a job.
    """
    if len(hosts) < 2:
        return []
    nonce = os.urandom(16).hex()
    first = Serve(nonce=nonce, meeting=True, port=port, address=address)
    requests = [first, *itertools.repeat(Serve(nonce=nonce, port=port), len(hosts) - 1)]
    try:
        listeners = await asyncio.gather(*map(_listen, hosts, requests))
        dials: dict[Pair, Dials] = {}
        callers = [place for place, listener in enumerate(listeners) if listener.served]
        await asyncio.gather(
            *(_dial_others(caller, listeners, nonce, timeout_s, dials) for caller in callers)
        )
        links = _links(listeners, dials)
        await _measure_ring(listeners, links, nonce, timeout_s)
        return list(links.values())
    finally:
        await asyncio.gather(*(_close(host, nonce) for host in hosts))


# ---- open ports


async def _listen(host: LinkProbe, request: Serve) -> Listener:
    try:
        answer = await host.ask("serve", msgspec.to_builtins(request), within_s=_ANSWER_WITHIN_S)
        served = read_message(Served, answer)
    except MusterError as error:
        return Listener(host=host, findings=_about(host, *from_error(error)))
    if all(ipaddress.ip_address(own.address).is_loopback for own in served.addresses):
        return Listener(host=host, findings=_about(host, _not_connected(host.name, served)))
    findings = _meeting_findings(host.name, request, served)
    return Listener(host=host, served=served, findings=_about(host, *findings))


def _about(host: LinkProbe, *findings: Finding) -> tuple[Finding, ...]:
    return tuple(replace(finding, hosts=(host.name,)) for finding in findings)


def _meeting_findings(name: str, request: Serve, served: Served) -> Iterator[Finding]:
    trouble = served.meeting_trouble
    if trouble is not None:
        yield finding(
            "meeting-port-taken", host=name, what=trouble.what, why=trouble.why, fix=trouble.fix
        )
    elif request.meeting and request.port is None and served.meeting_port != USUAL_PORT:
        yield finding(
            "meeting-port-taken:next",
            host=name,
            usual_port=USUAL_PORT,
            meeting_port=served.meeting_port,
            meeting_reason=served.meeting_reason,
        )


def _not_connected(name: str, served: Served) -> Finding:
    """Return the finding for a host whose only address is loopback."""
    state = "its only address is 127.0.0.1"
    fix = f"assign an address, on {name}:\nip -br address"
    for interface in served.interfaces:
        if not interface.networks or ipaddress.ip_interface(interface.networks[0]).is_loopback:
            continue
        where = f"{interface.name} ({interface.networks[0]})"
        if interface.up:
            state = f"{where} has no carrier"
            fix = (
                "connect the cable, or try another cable and switch port; "
                f"the link works when this prints yes, on {name}:\n"
                f"sudo ethtool {interface.name} | grep -i 'link detected'"
            )
        else:
            state = f"{where} is down"
            fix = f"bring it up, on {name}:\nsudo ip link set dev {interface.name} up"
        break
    return finding("link-down", subject=name, state=state, fix=fix)


async def _close(host: LinkProbe, nonce: str) -> None:
    """Make a host close its ports; otherwise it closes them after a timeout."""
    with contextlib.suppress(MusterError):
        await host.ask("close", {"nonce": nonce}, within_s=_DONE_WITHIN_S)


# ---- dial


async def _call(host: LinkProbe, call: Call) -> Sequence[Result]:
    """Return the results of a host's calls; ``NOT_TRIED`` for all if it does not answer."""
    within_s = call.timeout_s + _ANSWER_WITHIN_S
    if call.measure:
        within_s += (2 * call.timeout_s + MEASURED_WITHIN_S) * len(call.targets)
    results: Sequence[Result] = ()
    with contextlib.suppress(MusterError):
        answer = await host.ask("call", msgspec.to_builtins(call), within_s=within_s)
        results = read_message(Called, answer).results
    if len(results) != len(call.targets):
        return [Result(problem=Problem.NOT_TRIED, seconds=0.0)] * len(call.targets)
    return results


async def _dial_others(
    caller: int,
    listeners: Sequence[Listener],
    nonce: str,
    timeout_s: float,
    dials: dict[Pair, Dials],
) -> None:
    """Dial all addresses of all other hosts, and those that do not reply up to three times."""
    targets: list[tuple[dict[str, Result], Target]] = []
    # Each caller starts with its neighbour, so that no host is dialed by all at once.
    for step in range(1, len(listeners)):
        called = (caller + step) % len(listeners)
        served = listeners[called].served
        if served is None:
            continue
        dialed = dials.setdefault((caller, called), Dials())
        for own in served.addresses:
            targets.append((dialed.results, Target(address=own.address, port=served.port)))
            if served.meeting_port is not None:
                target = Target(address=own.address, port=served.meeting_port)
                targets.append((dialed.meeting, target))
    for _ in range(_TRIES):
        silent = []
        for start in range(0, len(targets), _AT_ONCE):
            batch = targets[start : start + _AT_ONCE]
            addresses = tuple(target for _, target in batch)
            call = Call(nonce=nonce, targets=addresses, timeout_s=timeout_s)
            results = await _call(listeners[caller].host, call)
            for (by_address, target), result in zip(batch, results, strict=True):
                by_address[target.address] = result
                if result.problem is Problem.TIMEOUT:
                    silent.append((by_address, target))
        targets = silent


def _links(listeners: Sequence[Listener], dials: dict[Pair, Dials]) -> dict[Pair, Link]:
    """Return both directions of all pairs, each with its problem, if any."""
    ends = []
    for position, listener in enumerate(listeners):
        calls = [dialed for (_, called), dialed in dials.items() if called == position]
        ends.append(_end(listener, calls))
    links = {}
    for caller, called in itertools.permutations(range(len(ends)), 2):
        dialed, served = dials.get((caller, called), Dials()), listeners[called].served
        data = dialed.results.get(ends[called].address or "")
        meeting = dialed.meeting.get(ends[called].address or "")
        links[caller, called] = Link(
            source=ends[caller],
            target=ends[called],
            problem=Problem.NOT_TRIED if data is None else data.problem,
            meeting_problem=None if meeting is None else meeting.problem,
            port=None if served is None else served.port,
            seconds=0.0 if data is None else data.seconds,
        )
    return links


def _end(listener: Listener, calls: Sequence[Dials]) -> End:
    """Return a host with the address at which most others reach it."""
    host, served = listener.host, listener.served
    end = End(
        name=host.name, place=host.place, system=host.record.system, findings=listener.findings
    )
    if served is None:
        return end

    def distance(own: protocol.Address) -> tuple[int, int]:
        results = [dialed.results.get(own.address) for dialed in calls]
        problems = [result.problem for result in results if result is not None]
        return sum(map(bool, problems)), sum(map(_NEARNESS.index, problems))

    chosen = min(served.addresses, key=distance)
    end = replace(
        end,
        address=chosen.address,
        interface=chosen.interface,
        given_out_ports=served.given_out_ports,
        meeting_port=served.meeting_port,
    )
    for interface in served.interfaces:
        if interface.name == chosen.interface:
            network = _network_of(chosen.address, interface)
            end = replace(end, network=network, mtu_bytes=interface.mtu_bytes)
    return end


def _network_of(address: str, interface: Interface) -> str | None:
    for text in interface.networks:
        known = ipaddress.ip_interface(text)
        if known.ip == ipaddress.ip_address(address):
            return str(known.network)
    return None


# ---- measure


async def _measure_ring(
    listeners: Sequence[Listener], links: dict[Pair, Link], nonce: str, timeout_s: float
) -> None:
    positions = {listener.host.place: position for position, listener in enumerate(listeners)}
    count = len(listeners)
    neighbours = {tuple(sorted((host, (host + 1) % count))) for host in range(count)}
    pairs = [(low, high) for low, high in sorted(neighbours)]
    for _ in range(_TRIES):
        for batch in disjoint(pairs):
            await asyncio.gather(
                *(_measure(listeners, links, pair, nonce, timeout_s) for pair in batch)
            )
        pairs = []
        for source, target in judge.suspects(list(links.values())):
            pairs.append((positions[source], positions[target]))


async def _measure(
    listeners: Sequence[Listener],
    links: dict[Pair, Link],
    pair: Pair,
    nonce: str,
    timeout_s: float,
) -> None:
    """Measure a link from the host that reaches the other one."""
    caller, called = pair
    if links[caller, called].problem:
        caller, called = called, caller
    link, served = links[caller, called], listeners[called].served
    if link.problem or served is None or link.target.address is None:
        return
    target = Target(address=link.target.address, port=served.port)
    call = Call(nonce=nonce, targets=(target,), timeout_s=timeout_s, measure=True)
    (result,) = await _call(listeners[caller].host, call)
    # It was reached before: a refusal now means a closed port, not a bad link.
    if result.problem in (Problem.NOT_TRIED, Problem.REFUSED):
        return
    back = links[called, caller]
    links[caller, called] = replace(link, figures=_best(link, result.there), tries=link.tries + 1)
    links[called, caller] = replace(back, figures=_best(back, result.back), tries=back.tries + 1)


def _best(link: Link, figures: Figures | None) -> Figures | None:
    if link.figures is None or figures is None:
        return link.figures or figures
    return link.figures.best_with(figures)

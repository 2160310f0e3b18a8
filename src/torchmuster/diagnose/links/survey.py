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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from torchmuster.diagnose.links import judge
from torchmuster.diagnose.links.call import LIMIT_S as MEASURED_WITHIN_S
from torchmuster.diagnose.links.model import (
    Call,
    End,
    Figures,
    Link,
    Problem,
    Result,
    Serve,
    Served,
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
# Problems of an address, ordered by how close packets got to it.
_NEAREST = (
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
_NOT_TRIED = Result(problem=Problem.NOT_TRIED)

# By the position of the called host and the target: what a caller has found.
Dials = dict[tuple[int, protocol.Target], Result]


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

    def targets(self) -> list[protocol.Target]:
        """Return all addresses with all ports that it has opened."""
        if self.served is None:
            return []
        targets = []
        for own in self.served.addresses:
            for port in (self.served.port, self.served.rendezvous_port):
                if port is not None:
                    targets.append(protocol.Target(address=own.address, port=port))
        return targets


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
    first = Serve(nonce=nonce, rendezvous=True, port=port, address=address)
    requests = itertools.chain([first], itertools.repeat(Serve(nonce=nonce)))
    try:
        listeners = await asyncio.gather(*map(_listen, hosts, requests))
        call = Call(nonce=nonce, targets=(), timeout_s=timeout_s)
        dials = await asyncio.gather(
            *(_dial_others(caller, listeners, call) for caller in range(len(listeners)))
        )
        links = _links(listeners, dials)
        await _measure_ring(listeners, links, call)
        return list(links.values())
    finally:
        await asyncio.gather(*(_close(host, nonce) for host in hosts))


async def _listen(host: LinkProbe, request: Serve) -> Listener:
    served, findings = None, []
    try:
        answer = await host.ask("serve", msgspec.to_builtins(request), within_s=_ANSWER_WITHIN_S)
        served = read_message(Served, answer)
    except MusterError as error:
        findings = from_error(error)
    else:
        if all(ipaddress.ip_address(own.address).is_loopback for own in served.addresses):
            findings, served = [_not_connected(host.name, served)], None
        elif request.rendezvous:
            findings = _rendezvous_findings(host.name, request, served)
    about = tuple(replace(finding, hosts=(host.name,)) for finding in findings)
    return Listener(host=host, served=served, findings=about)


def _rendezvous_findings(name: str, request: Serve, served: Served) -> list[Finding]:
    trouble = served.rendezvous_trouble
    if trouble is not None:
        return [
            finding(
                "rendezvous-port-taken",
                host=name,
                what=trouble.what,
                why=trouble.why,
                fix=trouble.fix,
            )
        ]
    if request.port is not None or served.rendezvous_port == USUAL_PORT:
        return []
    return [
        finding(
            "rendezvous-port-taken:next",
            host=name,
            usual_port=USUAL_PORT,
            rendezvous_port=served.rendezvous_port,
            rendezvous_reason=served.rendezvous_reason,
        )
    ]


def _not_connected(name: str, served: Served) -> Finding:
    """Return the finding for a host whose only address is loopback."""
    for interface in served.interfaces:
        if not interface.networks or ipaddress.ip_interface(interface.networks[0]).is_loopback:
            continue
        network = interface.networks[0]
        if interface.up:
            return finding(
                "link-down:no-carrier", host=name, interface=interface.name, network=network
            )
        return finding("link-down:down", host=name, interface=interface.name, network=network)
    return finding("link-down", host=name)


async def _close(host: LinkProbe, nonce: str) -> None:
    """Make a host close its ports."""
    with contextlib.suppress(MusterError):
        await host.ask("close", {"nonce": nonce}, within_s=_DONE_WITHIN_S)


# ---- dial


async def _call(host: LinkProbe, call: Call) -> Sequence[Result]:
    """Return the results of a host's calls; ``NOT_TRIED`` for all if it does not answer."""
    within_s = call.timeout_s + MEASURED_WITHIN_S + _ANSWER_WITHIN_S
    results: Sequence[Result] = ()
    with contextlib.suppress(MusterError):
        answer = await host.ask("call", msgspec.to_builtins(call), within_s=within_s)
        results = read_message(list[Result], answer)
    if len(results) != len(call.targets):
        return [_NOT_TRIED] * len(call.targets)
    return results


async def _dial_others(caller: int, listeners: Sequence[Listener], call: Call) -> Dials:
    """Dial all addresses of all other hosts, and those that do not reply up to three times."""
    left: list[tuple[int, protocol.Target]] = []
    # Each caller starts with its neighbour, so that no host is dialed by all at once.
    for step in range(1, len(listeners)):
        called = (caller + step) % len(listeners)
        left += [(called, target) for target in listeners[called].targets()]
    dials: Dials = {}
    if listeners[caller].served is None:
        return dials
    for _ in range(_TRIES):
        for start in range(0, len(left), _AT_ONCE):
            batch = left[start : start + _AT_ONCE]
            targets = tuple(target for _, target in batch)
            request = msgspec.structs.replace(call, targets=targets)
            results = await _call(listeners[caller].host, request)
            dials |= zip(batch, results, strict=True)
        left = [dialed for dialed in left if dials[dialed].problem is Problem.TIMEOUT]
    return dials


def _links(listeners: Sequence[Listener], dials: Sequence[Dials]) -> dict[Pair, Link]:
    """Return both directions of all pairs, each with its problem, if any."""
    ends = [_end(called, listener, dials) for called, listener in enumerate(listeners)]
    links = {}
    for caller, called in itertools.permutations(range(len(ends)), 2):
        link = Link(source=ends[caller], target=ends[called], problem=Problem.NOT_TRIED)
        served, address = listeners[called].served, ends[called].address
        if served is not None and address is not None:
            target = protocol.Target(address=address, port=served.port)
            dialed = dials[caller].get((called, target), _NOT_TRIED)
            link = replace(link, problem=dialed.problem, port=served.port, seconds=dialed.seconds)
            if served.rendezvous_port is not None:
                target = protocol.Target(address=address, port=served.rendezvous_port)
                dialed = dials[caller].get((called, target), _NOT_TRIED)
                link = replace(link, rendezvous_problem=dialed.problem)
        links[caller, called] = link
    return links


def _end(called: int, listener: Listener, dials: Sequence[Dials]) -> End:
    """Return a host with the address at which most others reach it."""
    host, served = listener.host, listener.served
    end = End(
        name=host.name, place=host.place, system=host.record.system, findings=listener.findings
    )
    if served is None:
        return end

    def distance(own: protocol.Address) -> tuple[int, int]:
        target = protocol.Target(address=own.address, port=served.port)
        problems = [
            caller[called, target].problem for caller in dials if (called, target) in caller
        ]
        return sum(map(bool, problems)), sum(map(_NEAREST.index, problems))

    chosen = min(served.addresses, key=distance)
    end = replace(
        end,
        address=chosen.address,
        interface=chosen.interface,
        given_out_ports=served.given_out_ports,
        rendezvous_port=served.rendezvous_port,
    )
    for interface in served.interfaces:
        for network in map(ipaddress.ip_interface, interface.networks):
            if interface.name == chosen.interface and str(network.ip) == chosen.address:
                end = replace(end, network=str(network.network), mtu_bytes=interface.mtu_bytes)
    return end


# ---- measure


async def _measure_ring(listeners: Sequence[Listener], links: dict[Pair, Link], call: Call) -> None:
    """Measure the pairs of a ring, and those that look bad up to three times."""
    count = len(listeners)
    ring = [(host, (host + 1) % count) for host in range(count)]
    pairs = sorted({(min(pair), max(pair)) for pair in ring})
    for _ in range(_TRIES):
        for batch in disjoint(pairs):
            await asyncio.gather(*(_measure(listeners, links, pair, call) for pair in batch))
        faults = judge.faults_of(list(links.values()))
        pairs = [pair for pair in pairs if links[pair].places in faults]


async def _measure(
    listeners: Sequence[Listener], links: dict[Pair, Link], pair: Pair, call: Call
) -> None:
    """Measure a link from the host that reaches the other one."""
    caller, called = pair
    if links[caller, called].problem:
        caller, called = called, caller
    link = links[caller, called]
    if link.problem or link.target.address is None or link.port is None:
        return
    target = protocol.Target(address=link.target.address, port=link.port)
    request = msgspec.structs.replace(call, targets=(target,), measure=True)
    (result,) = await _call(listeners[caller].host, request)
    # It was reached before: a refusal now means a closed port, not a bad link.
    if result.problem in (Problem.NOT_TRIED, Problem.REFUSED):
        return
    figures = result.figures or Figures()
    if link.figures is not None:
        figures = link.figures.best_with(figures)
    for direction in ((caller, called), (called, caller)):
        links[direction] = replace(links[direction], figures=figures)

"""Test and measure the links between hosts, run by the launcher.

Every host opens ports and dials every other host at all its addresses. Then the hosts measure the links of a
ring, in rounds in which no host takes part twice. Links that look bad are measured again: the best try counts.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from torchmuster.diagnose.links import judge
from torchmuster.diagnose.links.dial import LIMIT_S
from torchmuster.diagnose.links.model import (
    Dial,
    Dialed,
    Link,
    LinkHost,
    Open,
    Opened,
    Problem,
    Speed,
)
from torchmuster.diagnose.rounds import Pair, disjoint
from torchmuster.errors import MusterError
from torchmuster.launch import protocol
from torchmuster.launch.job import Limits

_ANSWER_WITHIN_S = 20.0
# The request takes effect even if the answer is late; a lost host must not delay the others.
_DONE_WITHIN_S = 2.0
# Dials in parallel per host, as each needs a socket at both ends.
_AT_ONCE = 200
# The host may have been busy, and of very many dials, one fails by chance.
_TRIES = 3
_NOT_TRIED = Dialed(problem=Problem.NOT_TRIED)
_NEARNESS = list(Problem)

Answer = TypeVar("Answer")
# The results of one host: by the position of the dialed host and the target.
Dials = Mapping[tuple[int, protocol.Target], Dialed]


class LinkProbe(Protocol):
    """A host that accepts requests; see ``HostProbe`` in ``diagnose/probing.py``."""

    name: str
    place: int
    record: protocol.NodeRecord

    async def ask(self, verb: str, argument: Any, kind: type[Answer], *, within_s: float) -> Answer:
        """Return the host's answer."""


async def survey_links(
    probes: Sequence[LinkProbe],
    *,
    port: int | None = None,
    address: str | None = None,
    timeout_s: float = Limits.reach_s,
) -> list[Link]:
    """Return both directions of every pair of hosts; those of the ring have a speed.

    The first host has the rendezvous port. ``port`` and ``address`` are as in a job.
    """
    nonce = os.urandom(16).hex()
    first = Open(nonce=nonce, rendezvous=True, port=port, address=address)
    requests = itertools.chain([first], itertools.repeat(Open(nonce=nonce)))
    request = Dial(nonce=nonce, timeout_s=timeout_s)
    try:
        hosts = await asyncio.gather(*map(_open, probes, requests))
        positions = range(len(hosts))
        calls = [_dial_hosts(caller, probes[caller], hosts, request) for caller in positions]
        dials = await asyncio.gather(*calls)
        links = {}
        for caller, called in itertools.permutations(positions, 2):
            links[caller, called] = _link(hosts[caller], hosts[called], called, dials[caller])
        await _measure_ring(probes, links, request)
        return list(links.values())
    finally:
        await asyncio.gather(*(_close(probe, nonce) for probe in probes))


def links_not_tried(links: Sequence[Link]) -> list[str]:
    """Return which links were not tested, and why."""
    reasons: dict[str, str] = {}
    for link in links:
        if link.problem is Problem.NOT_TRIED:
            host = link.target if link.target.trouble else link.source
            reasons[host.name] = host.trouble or "it did not report"
    return [f"the links of {name}: {reason}" for name, reason in reasons.items()]


async def _open(probe: LinkProbe, request: Open) -> LinkHost:
    host = LinkHost(name=probe.name, place=probe.place, system=probe.record.system)
    try:
        opened = await probe.ask("open", request, Opened, within_s=_ANSWER_WITHIN_S)
    except MusterError as error:
        return msgspec.structs.replace(host, trouble=error.what)
    addresses = []
    for own in opened.addresses:
        if not ipaddress.ip_address(own.address).is_loopback:
            addresses.append(own)
    return msgspec.structs.replace(
        host,
        addresses=tuple(addresses),
        port=opened.port,
        rendezvous_port=opened.rendezvous_port,
        ephemeral_ports=opened.ephemeral_ports,
    )


async def _close(probe: LinkProbe, nonce: str) -> None:
    with contextlib.suppress(MusterError):
        await probe.ask("close", nonce, type(None), within_s=_DONE_WITHIN_S)


# ---- dial


async def _dial(probe: LinkProbe, request: Dial) -> Sequence[Dialed]:
    """Return a host's results; ``NOT_TRIED`` for all targets if it does not answer."""
    within_s = request.timeout_s + LIMIT_S + _ANSWER_WITHIN_S
    results: Sequence[Dialed] = ()
    with contextlib.suppress(MusterError):
        results = await probe.ask("dial", request, list[Dialed], within_s=within_s)
    if len(results) != len(request.targets):
        return [_NOT_TRIED] * len(request.targets)
    return results


async def _dial_hosts(
    caller: int, probe: LinkProbe, hosts: Sequence[LinkHost], request: Dial
) -> Dials:
    """Dial all addresses of all other hosts, and those that do not reply up to three times."""
    left: list[tuple[int, protocol.Target]] = []
    # Each caller starts with its neighbour, so that no host is dialed by all at once.
    for step in range(1, len(hosts)):
        called = (caller + step) % len(hosts)
        host = hosts[called]
        for own, port in itertools.product(host.addresses, (host.port, host.rendezvous_port)):
            if port is not None:
                left.append((called, protocol.Target(address=own.address, port=port)))
    dials: dict[tuple[int, protocol.Target], Dialed] = {}
    for _ in range(_TRIES):
        for start in range(0, len(left), _AT_ONCE):
            batch = left[start : start + _AT_ONCE]
            targets = tuple(target for _, target in batch)
            results = await _dial(probe, msgspec.structs.replace(request, targets=targets))
            dials |= zip(batch, results, strict=True)
        left = [dialed for dialed in left if dials[dialed].problem is Problem.TIMEOUT]
    return dials


def _link(source: LinkHost, target: LinkHost, called: int, dials: Dials) -> Link:
    """Return a link at the first address that was reached, else at the one to which packets got closest."""
    link = Link(source=source, target=target, problem=Problem.NOT_TRIED)
    if source.trouble or target.trouble:
        return link
    if not target.addresses:
        return msgspec.structs.replace(link, problem=Problem.ABSENT)

    def dialed(own: protocol.Address, port: int) -> Dialed:
        return dials.get((called, protocol.Target(address=own.address, port=port)), _NOT_TRIED)

    def nearness(own: protocol.Address) -> tuple[bool, int]:
        problem = dialed(own, target.port).problem
        return not problem, _NEARNESS.index(problem)

    address = max(target.addresses, key=nearness)
    result = dialed(address, target.port)
    rendezvous_problem = None
    if target.rendezvous_port is not None:
        rendezvous_problem = dialed(address, target.rendezvous_port).problem
    return msgspec.structs.replace(
        link,
        problem=result.problem,
        rendezvous_problem=rendezvous_problem,
        address=address,
        source_address=result.source_address,
        seconds=result.seconds,
    )


# ---- measure


async def _measure_ring(
    probes: Sequence[LinkProbe], links: dict[Pair, Link], request: Dial
) -> None:
    """Measure the pairs of a ring, and those that look bad up to three times."""
    count = len(probes)
    ring = [(host, (host + 1) % count) for host in range(count)]
    pairs = sorted({(min(pair), max(pair)) for pair in ring})
    for _ in range(_TRIES):
        for batch in disjoint(pairs):
            await asyncio.gather(*(_measure(probes, links, pair, request) for pair in batch))
        faults = judge.faults_of(list(links.values()))
        pairs = [pair for pair in pairs if links[pair].places in faults]


async def _measure(
    probes: Sequence[LinkProbe], links: dict[Pair, Link], pair: Pair, request: Dial
) -> None:
    """Measure a link from the host that reaches the other one."""
    caller, called = pair
    if links[pair].problem:
        caller, called = called, caller
    link = links[caller, called]
    if link.problem or link.address is None:
        return
    target = protocol.Target(address=link.address.address, port=link.target.port)
    measuring = msgspec.structs.replace(request, targets=(target,), measure=True)
    (result,) = await _dial(probes[caller], measuring)
    # It was reached before: a refusal now means a closed port, not a bad link.
    if result.problem in (Problem.NOT_TRIED, Problem.REFUSED):
        return
    speed = result.speed or Speed()
    if link.speed is not None:
        speed = link.speed.best_with(speed)
    for direction in ((caller, called), (called, caller)):
        links[direction] = msgspec.structs.replace(links[direction], speed=speed)

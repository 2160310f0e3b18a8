"""Test and measure the links between hosts, run by the launcher.

Every host opens ports and dials every other host at all its addresses, which shows who reaches whom
and at which address. Then the hosts measure the links of a ring, in rounds in which no host takes
part twice. Links that look bad are measured again: the best try counts.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from torchmuster.diagnose.links import quality
from torchmuster.diagnose.links.messages import Call, Result, Target
from torchmuster.diagnose.links.model import NOT_TRIED, Figures, Link
from torchmuster.diagnose.links.reaching import (
    LinkProbe,
    OpenedListeners,
    ask_to_call,
    close_listeners,
    dial_everyone,
    ends_of,
    links_of,
    serve_all,
)
from torchmuster.diagnose.rounds import Pair, disjoint
from torchmuster.launch.job import Limits

TRIES = 3


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
    try:
        opened = await serve_all(hosts, nonce, port, address)
        dialed = await dial_everyone(opened, nonce, timeout_s)
        links = links_of(ends_of(opened, dialed), opened, dialed)
        await _measure_ring(opened, links, nonce, timeout_s)
        return list(links.values())
    finally:
        await asyncio.gather(*(close_listeners(host, nonce) for host in hosts))


async def _measure_ring(
    opened: Sequence[OpenedListeners], links: dict[Pair, Link], nonce: str, timeout_s: float
) -> None:
    positions = {host.examiner.place: position for position, host in enumerate(opened)}
    count = len(opened)
    neighbours = {tuple(sorted((host, (host + 1) % count))) for host in range(count)}
    pairs = [(low, high) for low, high in sorted(neighbours)]
    for _ in range(TRIES):
        for batch in disjoint(pairs, lambda pair: pair):
            await asyncio.gather(
                *(_measure(opened, links, pair, nonce, timeout_s) for pair in batch)
            )
        pairs = []
        for source, target in quality.suspects(list(links.values())):
            pairs.append((positions[source], positions[target]))
        if not pairs:
            return


async def _measure(
    opened: Sequence[OpenedListeners],
    links: dict[Pair, Link],
    pair: Pair,
    nonce: str,
    timeout_s: float,
) -> None:
    """Measure a link from the host that reaches the other one."""
    caller, called = pair
    if links[caller, called].problem:
        caller, called = called, caller
    link, served = links[caller, called], opened[called].served
    if link.problem or served is None or link.target.address is None:
        return
    target = Target(address=link.target.address, port=served.port)
    call = Call(nonce=nonce, targets=(target,), timeout_s=timeout_s, measure=True)
    (result,) = await ask_to_call(opened[caller].examiner, call)
    for direction, figures in (
        ((caller, called), result.there),
        ((called, caller), result.back),
    ):
        links[direction] = _with_figures(links[direction], result, figures)


def _with_figures(link: Link, result: Result, figures: Figures | None) -> Link:
    # It was reached before: a refusal now means a closed port, not a bad link.
    if result.problem in (NOT_TRIED, "refused"):
        return link
    best = link.figures or figures
    if link.figures is not None and figures is not None:
        best = link.figures.best_with(figures)
    # A timeout may be caused by a busy host.
    lost = result.problem not in ("", "timeout")
    return replace(link, figures=best, tries=link.tries + 1, dropped=link.dropped + lost)

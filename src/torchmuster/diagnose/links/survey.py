"""Trying and measuring the links between machines: the course of it, seen from the launcher.

Every machine opens ports; every machine tries all addresses of the others, which shows who reaches whom
and at which address; then pairs of machines measure the link between them, in rounds in which nobody
is in two pairs, so that no measurement disturbs another. What looks bad is tried again. In a large group
only the links that collectives use are measured; the others are called.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torchmuster.diagnose.links import quality
from torchmuster.diagnose.links.elsewhere import dead_elsewhere
from torchmuster.diagnose.links.messages import Call, Result, Target
from torchmuster.diagnose.links.model import NOT_TRIED, Figures, Link
from torchmuster.diagnose.links.opening import (
    Examiner,
    Found,
    ask_to_call,
    close,
    keep_open,
    serve_all,
)
from torchmuster.diagnose.links.reaching import ends_of, links_of, try_all
from torchmuster.diagnose.rounds import ALL_PAIRS_UP_TO, Pair, disjoint, survey_rounds
from torchmuster.launch.job import Limits

_TRIES = 3
_MORE_DATAGRAMS = 500
# Ports close by themselves after a few minutes, and many rounds take longer.
_KEEP_OPEN_EVERY_S = 60.0


async def survey(
    examiners: Sequence[Examiner],
    *,
    rounds: Iterable[Sequence[Pair]] | None = None,
    port: int | None = None,
    address: str | None = None,
    timeout_s: float = Limits.reach_s,
    say: Callable[[str], None] = lambda line: None,
) -> list[Link]:
    """Return both directions of every pair in ``rounds``, by default as in ``survey_rounds``.

    By default those of every other dead link are among them as well. Pairs are of positions in ``examiners``; the first of them has the meeting port. ``port`` and
    ``address`` are as in a job.
    """
    if len(examiners) < 2:
        return []
    order = [list(one) for one in (survey_rounds(len(examiners)) if rounds is None else rounds)]
    nonce = os.urandom(16).hex()
    try:
        found = await serve_all(examiners, nonce, port, address)
        say(f"trying who reaches whom: {sum(map(len, order)):,} pairs of machines")
        tried = await try_all(found, order, nonce, timeout_s)
        ends = ends_of(found, tried)
        links = links_of(ends, found, tried, order)
        if rounds is None and len(examiners) > ALL_PAIRS_UP_TO:
            say("calling at the links that are not measured")
            links |= await dead_elsewhere(found, ends, links, nonce, timeout_s)
        say(f"measuring the links, in {len(order):,} rounds")
        return await _measure_all(found, links, order, nonce, timeout_s, say)
    finally:
        await asyncio.gather(*(close(one, nonce) for one in examiners))


async def _measure_all(
    found: Sequence[Found],
    links: dict[Pair, Link],
    order: Sequence[Sequence[Pair]],
    nonce: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[Link]:
    datagrams = Call(nonce=nonce, targets=()).datagrams
    kept_open_s = -math.inf
    for attempt in range(_TRIES):
        for pairs in order:
            if time.monotonic() - kept_open_s >= _KEEP_OPEN_EVERY_S:
                await keep_open(found, nonce)
                kept_open_s = time.monotonic()
            await asyncio.gather(
                *(_measure(found, links, pair, nonce, timeout_s, datagrams) for pair in pairs)
            )
        suspects = quality.suspects(list(links.values()))
        positions = {one.examiner.place: position for position, one in enumerate(found)}
        again = [(positions[one], positions[other]) for one, other in suspects]
        order = disjoint(again, lambda pair: pair)
        datagrams = _MORE_DATAGRAMS
        if not suspects:
            break
        if attempt + 1 < _TRIES:
            say(f"measuring again what looked bad: {len(suspects):,} of the pairs")
    return list(links.values())


async def _measure(
    found: Sequence[Found],
    links: dict[Pair, Link],
    pair: Pair,
    nonce: str,
    timeout_s: float,
    datagrams: int,
) -> None:
    """Let that one of two machines measure which reaches the other."""
    directions = [pair, (pair[1], pair[0])]
    way = next((one for one in directions if not links[one].problem), None)
    if way is None:
        return
    caller, called = way
    served, end = found[called].served, links[way].target
    assert served is not None
    assert end.address is not None
    interface = next((one for one in served.interfaces if one.name == end.interface), None)
    target = Target(
        address=end.address,
        port=served.port,
        udp_port=served.udp_ports.get(end.address),
        frame_bytes=interface.frame_bytes if interface else None,
    )
    call = Call(
        nonce=nonce, targets=(target,), timeout_s=timeout_s, measure=True, datagrams=datagrams
    )
    (result,) = await ask_to_call(found[caller].examiner, call)
    links[way] = _with(links[way], result, result.there)
    back = (called, caller)
    links[back] = _with(links[back], result, result.back)


def _with(link: Link, result: Result, figures: Figures | None) -> Link:
    # It was reached before: that it refuses now says that its port is closed, not how the link is.
    if result.problem in (NOT_TRIED, "refused"):
        return link
    known = link.figures
    best = known.best_with(figures) if known and figures else figures or known
    # That it takes too long may be the fault of a busy machine.
    lost = result.problem not in ("", "timeout")
    return replace(link, figures=best, tries=link.tries + 1, dropped=link.dropped + lost)

"""Test and measure the links between hosts, run by the launcher.

Every host opens ports, then tries all addresses of the others, which shows who reaches whom and at
which address. Then pairs of hosts measure the link between them, in rounds in which no host is in
two pairs, so that measurements do not disturb each other. Bad results are measured again. In a
large group only the links that collectives use are measured; for the others only a connection is
tested.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from torchmuster.diagnose.group_testing import (
    USUAL,
    LinkSearch,
    ProbeGroup,
    ProbeOutcome,
    ProbeResult,
    SuspectedFault,
    find_bad,
)
from torchmuster.diagnose.links import quality
from torchmuster.diagnose.links.messages import Call, Result, Target
from torchmuster.diagnose.links.model import NOT_TRIED, End, Figures, Link
from torchmuster.diagnose.links.reaching import (
    LinkProbe,
    OpenedListeners,
    ask_to_call,
    close_listeners,
    ends_of,
    keep_open,
    links_of,
    serve_all,
    try_all,
    try_directions,
)
from torchmuster.diagnose.rounds import ALL_PAIRS_UP_TO, Pair, disjoint, survey_rounds
from torchmuster.launch.job import Limits

# In large groups an unanswered call is repeated: of very many calls, one fails by chance.
TRIES = 3
# Calls in parallel per host, as each needs a socket at both ends.
MOST_CALLS = 200


class CallingTester:
    """A tester that detects links without a connection in either direction; it measures nothing.

    ``addresses`` are the addresses to connect to, in the order of ``found``. The links in
    ``left_out`` are known to be bad.
    """

    def __init__(
        self,
        found: Sequence[OpenedListeners],
        addresses: Sequence[str | None],
        *,
        nonce: str,
        timeout_s: float,
        left_out: frozenset[Pair] = frozenset(),
    ) -> None:
        self._found = found
        self._addresses = addresses
        self._nonce = nonce
        self._timeout_s = timeout_s
        self._left_out = left_out

    async def test(
        self, meetings: Sequence[ProbeGroup], *, without: frozenset[Pair]
    ) -> Sequence[ProbeOutcome]:
        """Test one round of groups in parallel."""
        left_out = without | self._left_out
        return await asyncio.gather(*(self._hold(meeting, left_out) for meeting in meetings))

    async def _hold(self, meeting: ProbeGroup, left_out: frozenset[Pair]) -> ProbeOutcome:
        pairs = [_pair(link) for link in product(*meeting) if _pair(link) not in left_out]
        calls = [call for one, other in pairs for call in ((one, other), (other, one))]
        for _ in range(1 if len(pairs) == 1 else TRIES):
            calls = await self._unanswered(calls)
            if not calls:
                return ProbeOutcome()
        return ProbeOutcome(seen=ProbeResult.FAILED, blamed=frozenset(map(_pair, calls)))

    async def _unanswered(self, calls: Sequence[Pair]) -> list[Pair]:
        """Make calls, and return the unanswered ones."""
        by_caller: dict[int, list[int]] = {}
        for caller, called in calls:
            by_caller.setdefault(caller, []).append(called)
        unanswered = await asyncio.gather(*(self._call(*item) for item in by_caller.items()))
        return [call for of_caller in unanswered for call in of_caller]

    async def _call(self, caller: int, called: Collection[int]) -> list[Pair]:
        # Each caller starts with a different host, so that none is called by all at once.
        ahead = sorted(called, key=lambda one: (one - caller) % len(self._found))
        unanswered: list[Pair] = []
        for start in range(0, len(ahead), MOST_CALLS):
            some = ahead[start : start + MOST_CALLS]
            call = Call(
                nonce=self._nonce,
                targets=tuple(map(self._target, some)),
                timeout_s=self._timeout_s,
            )
            results = await ask_to_call(self._found[caller].examiner, call)
            unanswered += [
                (caller, one) for one, result in zip(some, results, strict=True) if result.problem
            ]
        return unanswered

    def _target(self, place: int) -> Target:
        served, address = self._found[place].served, self._addresses[place]
        assert served is not None
        assert address is not None
        return Target(address=address, port=served.port)


def _pair(link: tuple[int, int]) -> Pair:
    return min(link), max(link)


# Enough for one retransmission. Links that fail are tried again with a longer timeout.
_PATIENCE_S = 2.0


async def dead_elsewhere(
    found: Sequence[OpenedListeners],
    ends: Sequence[End],
    links: Mapping[Pair, Link],
    nonce: str,
    timeout_s: float,
) -> dict[Pair, Link]:
    """Return both directions of dead links that are not in ``links``.

    If more than ``most_bad`` dead links are known already, no search is made.
    """
    working = [pair for pair, link in links.items() if not link.problem]
    # Hosts that reach none, or that none reaches, are already known to be bad.
    able = sorted({caller for caller, _ in working} & {called for _, called in working})
    number = {place: position for position, place in enumerate(able)}
    known = frozenset(
        (number[min(pair)], number[max(pair)])
        for pair, link in links.items()
        if link.problem and number.keys() >= set(pair)
    )
    if len(able) < 2 or len(known) > USUAL.most_bad:
        return {}
    tester = CallingTester(
        [found[place] for place in able],
        [ends[place].address for place in able],
        nonce=nonce,
        timeout_s=min(timeout_s, _PATIENCE_S),
        left_out=known,
    )
    diagnosis = await find_bad(
        tester, len(able), links=LinkSearch.EVERY, faults=[SuspectedFault.DEAD]
    )
    dead = {able[position] for position in diagnosis.bad_nodes}
    pairs = [(able[one], able[other]) for one, other in diagnosis.bad_links]
    pairs += [pair for pair in links if not dead.isdisjoint(pair)]  # dead since the first test
    directions = {way for one, other in pairs for way in ((one, other), (other, one))}
    tried = await try_directions(found, directions, nonce, timeout_s)
    return links_of(ends, found, tried, [pairs])


_TRIES = 3
_MORE_DATAGRAMS = 500
# The hosts close their ports after a few minutes, and many rounds take longer.
_KEEP_OPEN_EVERY_S = 60.0


async def survey_links(
    examiners: Sequence[LinkProbe],
    *,
    rounds: Iterable[Sequence[Pair]] | None = None,
    port: int | None = None,
    address: str | None = None,
    timeout_s: float = Limits.reach_s,
    say: Callable[[str], None] = lambda line: None,
) -> list[Link]:
    """Return both directions of every pair in ``rounds``, by default as in ``survey_rounds``.

    By default, all other dead links are included as well. Pairs are positions in ``examiners``; the
    first has the rendezvous port. ``port`` and ``address`` are as in a job.
    """
    if len(examiners) < 2:
        return []
    order = [list(one) for one in (survey_rounds(len(examiners)) if rounds is None else rounds)]
    nonce = os.urandom(16).hex()
    try:
        found = await serve_all(examiners, nonce, port, address)
        say(f"testing connections: {sum(map(len, order)):,} pairs of hosts")
        tried = await try_all(found, order, nonce, timeout_s)
        ends = ends_of(found, tried)
        links = links_of(ends, found, tried, order)
        if rounds is None and len(examiners) > ALL_PAIRS_UP_TO:
            say("testing connections of the links that are not measured")
            links |= await dead_elsewhere(found, ends, links, nonce, timeout_s)
        say(f"measuring the links, in {len(order):,} rounds")
        return await _measure_all(found, links, order, nonce, timeout_s, say)
    finally:
        await asyncio.gather(*(close_listeners(one, nonce) for one in examiners))


async def _measure_all(
    found: Sequence[OpenedListeners],
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
            say(f"measuring bad links again: {len(suspects):,} pairs")
    return list(links.values())


async def _measure(
    found: Sequence[OpenedListeners],
    links: dict[Pair, Link],
    pair: Pair,
    nonce: str,
    timeout_s: float,
    datagrams: int,
) -> None:
    """Measure a link from the host that reaches the other one."""
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
    # It was reached before: a refusal now means a closed port, not a bad link.
    if result.problem in (NOT_TRIED, "refused"):
        return link
    known = link.figures
    best = known.best_with(figures) if known and figures else figures or known
    # A timeout may be caused by a busy host.
    lost = result.problem not in ("", "timeout")
    return replace(link, figures=best, tries=link.tries + 1, dropped=link.dropped + lost)

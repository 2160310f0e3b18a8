"""The links of a large group that are not measured: which machines do not reach each other there.

Only the links that collectives use are measured in a large group. Those between all other pairs are
called, in a number of rounds that grows as log N, and who gets no answer is looked at once more.
"""

from collections.abc import Mapping, Sequence

from torchmuster.diagnose.links.model import End, Link
from torchmuster.diagnose.links.opening import Found
from torchmuster.diagnose.links.reaching import links_of, try_directions
from torchmuster.diagnose.rounds import Pair
from torchmuster.diagnose.search.calling import CallingTester
from torchmuster.diagnose.search.find import USUAL, Links, find_bad
from torchmuster.diagnose.search.model import Fault

# Enough for a first packet that was lost to be sent again. What is found is tried again for longer.
_PATIENCE_S = 2.0


async def dead_elsewhere(
    found: Sequence[Found],
    ends: Sequence[End],
    links: Mapping[Pair, Link],
    nonce: str,
    timeout_s: float,
) -> dict[Pair, Link]:
    """Return both directions of the links that turn out to be dead, besides those known in ``links``.

    Where more links are known to be dead than a search is meant for, they tell enough: none is made.
    """
    working = [pair for pair, link in links.items() if not link.problem]
    # Who reaches nobody, or is reached by nobody, is known for that.
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
    diagnosis = await find_bad(tester, len(able), links=Links.EVERY, faults=[Fault.DEAD])
    dead = {able[position] for position in diagnosis.bad_nodes}
    pairs = [(able[one], able[other]) for one, other in diagnosis.bad_links]
    pairs += [pair for pair in links if not dead.isdisjoint(pair)]  # they died since
    directions = {way for one, other in pairs for way in ((one, other), (other, one))}
    tried = await try_directions(found, directions, nonce, timeout_s)
    return links_of(ends, found, tried, [pairs])

"""Finding bad machines: everybody in one pair, then the suspects with machines that are proven good."""

from collections.abc import Collection, Sequence

from torchmuster.diagnose.rounds import Pair
from torchmuster.diagnose.search.course import Course
from torchmuster.diagnose.search.model import Fault

# A machine is bad only if it is so with two good ones: with one, it could be the link to it.
WITNESSES = 2


async def find_nodes(
    course: Course, nodes: Sequence[int], faults: Collection[Fault]
) -> tuple[int, ...]:
    """Add the bad machines among these to the course, and links met that are bad between good ones.

    Returns the machines that cannot be judged: if there are as many bad ones as pairs, there may be
    no pair of two good ones to begin with.
    """
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    doubtful = await course.screen(pairs, faults)
    suspects = [one for pair in doubtful for one in pair]
    trusted = sorted({one for pair in pairs for one in pair}.difference(suspects))
    if len(nodes) % 2:
        suspects.append(nodes[-1])
    if not trusted:
        return tuple(suspects)
    await _ask_witnesses(course, suspects, trusted, faults)
    links = [pair for pair in doubtful if course.bad_nodes.keys().isdisjoint(pair)]
    course.bad_links.update(await course.prove(links, faults, candidates=len(nodes)))
    return ()


async def _ask_witnesses(
    course: Course, suspects: Sequence[int], trusted: Sequence[int], faults: Collection[Fault]
) -> None:
    # The second witness is another one, and if it can be one that no other suspect asks.
    shift = len(suspects) if len(suspects) % len(trusted) else 1
    accused: dict[int, Fault] = {}
    bad: dict[Pair, Fault] = {}
    for turn in range(WITNESSES):
        pairs: dict[Pair, int] = {}
        for place, suspect in enumerate(suspects):
            if turn == 0 or suspect in accused:
                witness = trusted[(place + turn * shift) % len(trusted)]
                pairs[min(suspect, witness), max(suspect, witness)] = suspect
        proven = await course.prove(pairs, faults, candidates=len(suspects) + len(trusted))
        accused = {pairs[pair]: fault for pair, fault in proven.items()}
        bad |= proven
    course.bad_nodes.update(accused)
    course.bad_links.update(
        {pair: fault for pair, fault in bad.items() if accused.keys().isdisjoint(pair)}
    )

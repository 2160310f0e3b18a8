"""The whole search: dead machines, then slow and corrupting ones, then links between good ones."""

import enum
from collections.abc import Collection

from torchmuster.diagnose.search.course import Course
from torchmuster.diagnose.search.evidence import Assumptions
from torchmuster.diagnose.search.links import SEEN_IN_MEETINGS, find_any_link, find_collective_links
from torchmuster.diagnose.search.model import Diagnosis, Fault, Tester
from torchmuster.diagnose.search.nodes import find_nodes

USUAL = Assumptions()


class Links(enum.Enum):
    """Which links are looked at, besides those that are met while machines are."""

    NONE = "none"
    COLLECTIVES = "collectives"  # those that collectives use: a few for each machine
    EVERY = "every"  # these, and all others for what shows where many meet: dead or corrupting


async def find_bad(
    tester: Tester,
    count: int,
    *,
    assumptions: Assumptions = USUAL,
    links: Links = Links.COLLECTIVES,
    faults: Collection[Fault] = tuple(Fault),
) -> Diagnosis:
    """Find the bad ones among the machines ``range(count)``, and the bad links between good ones.

    Machines are found as long as there are fewer bad ones than pairs. A good machine with several bad
    links may be taken for a bad one. Ranks are taken to be in the order of the machines.
    """
    course = Course(tester, assumptions)
    good: list[int] = list(range(count))
    undecided: tuple[int, ...] = ()
    stages = 0
    for together in ((Fault.DEAD,), (Fault.SLOW, Fault.CORRUPTING)):
        wanted = [fault for fault in together if fault in faults]
        if not wanted:
            continue
        stages += 1
        undecided += await find_nodes(course, good, wanted)
        left_out = course.bad_nodes.keys() | set(undecided)
        good = [one for one in good if one not in left_out]
    shown_by_many = [fault for fault in SEEN_IN_MEETINGS if fault in faults]
    # Where every link is met, only what does not show there is left to be looked for in pairs.
    if links is Links.COLLECTIVES or (links is Links.EVERY and Fault.SLOW in faults):
        stages += 1
        await find_collective_links(course, good, faults)
    if links is Links.EVERY:
        stages += 1
        await find_any_link(course, good, shown_by_many)
    return Diagnosis(
        bad_nodes=course.bad_nodes,
        bad_links=course.bad_links,
        undecided=undecided,
        rounds=course.rounds,
        tests=course.tests,
        confidence=1 - stages * (assumptions.accused_wrongly + assumptions.missed),
    )

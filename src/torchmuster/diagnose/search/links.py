"""Finding bad links between good machines: the links that collectives use in pairs, all others by halves."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from torchmuster.diagnose.rounds import Pair, collective_rounds, disjoint
from torchmuster.diagnose.search.course import Course
from torchmuster.diagnose.search.model import Fault, Meeting, Seen

# In a meeting of many only these can be told; the slowest of many links is slow by chance.
SEEN_IN_MEETINGS = {Fault.DEAD: Seen.FAILED, Fault.CORRUPTING: Seen.WRONG}


async def find_collective_links(
    course: Course, nodes: Sequence[int], faults: Collection[Fault]
) -> None:
    """Add the bad links to the course among those that collectives use (see ``collective_rounds``)."""
    doubtful: list[Pair] = []
    tried = 0
    for turn in collective_rounds(len(nodes)):
        pairs = [(nodes[one], nodes[other]) for one, other in turn]
        pairs = [pair for pair in pairs if pair not in course.bad_links]
        doubtful += await course.screen(pairs, faults)
        tried += len(pairs)
    course.bad_links.update(await course.prove(doubtful, faults, candidates=tried))


async def find_any_link(course: Course, nodes: Sequence[int], faults: Collection[Fault]) -> None:
    """Add the links with faults that are ``SEEN_IN_MEETINGS`` to the course, wherever they are.

    Ends when nothing new has shown for so long that nothing is likely to be left, or when there are
    more bad links than a search is meant for.
    """
    quiet = 0
    spoiling = {SEEN_IN_MEETINGS[fault] for fault in faults}
    most = course.assumptions.most_bad
    while quiet < course.assumptions.repeats(faults) and len(course.bad_links) <= most:
        spoilt = []
        doubtful: set[Pair] = set()
        for meetings in halvings(nodes):
            for meeting, outcome in zip(meetings, await course.hold(meetings), strict=True):
                if outcome.seen in spoiling:
                    doubtful |= outcome.blamed
                    spoilt += [] if outcome.blamed else [meeting]
        doubtful |= await _narrow(course, spoilt, faults)
        every = len(nodes) * (len(nodes) - 1) // 2
        found = await course.prove(sorted(doubtful)[: 2 * most], faults, candidates=every)
        course.bad_links.update(found)
        quiet = 0 if found else quiet + 1


def halvings(nodes: Sequence[int]) -> Iterator[list[Meeting]]:
    """Yield rounds of meetings in which every two meet exactly once, in ⌈log2 of their number⌉ rounds.

    First one half meets the other, then in each half its halves do, and so on.
    """
    blocks = [nodes]
    while blocks := [block for block in blocks if len(block) > 1]:
        halves = [_halves(block) for block in blocks]
        yield [Meeting(left, right) for left, right in halves]
        blocks = [half for pair in halves for half in pair]


async def _narrow(
    course: Course, spoilt: Iterable[Meeting], faults: Collection[Fault]
) -> set[Pair]:
    """Cut spoilt meetings in four, until pairs are left. What spoils a meeting may not show each time."""
    tries = course.assumptions.repeats(faults)
    spoiling = {SEEN_IN_MEETINGS[fault] for fault in faults}
    pairs: set[Pair] = set()
    left = [(meeting, tries) for meeting in spoilt]
    while left:
        pairs |= {_pair(meeting) for meeting, _ in left if _is_pair(meeting)}
        left = [one for one in left if not _is_pair(one[0])]
        parts = [
            (place, part) for place, (meeting, _) in enumerate(left) for part in _quarters(meeting)
        ]
        shown: dict[int, list[Meeting]] = {}
        for turn in disjoint(parts, members=lambda numbered: chain(*numbered[1])):
            outcomes = await course.hold([part for _, part in turn])
            for (place, part), outcome in zip(turn, outcomes, strict=True):
                if outcome.seen in spoiling:
                    shown.setdefault(place, []).append(part)
        again = [
            (meeting, tries_left - 1)
            for place, (meeting, tries_left) in enumerate(left)
            if place not in shown and tries_left > 1
        ]
        left = again + [(part, tries) for parts_shown in shown.values() for part in parts_shown]
    return pairs


def _is_pair(meeting: Meeting) -> bool:
    return len(meeting.callers) == len(meeting.called) == 1


def _pair(meeting: Meeting) -> Pair:
    (one,), (other,) = meeting
    return min(one, other), max(one, other)


def _quarters(meeting: Meeting) -> list[Meeting]:
    (first, second), (third, fourth) = _halves(meeting.callers), _halves(meeting.called)
    # In this order, so that two of the four can be held at a time.
    cut = [Meeting(first, third), Meeting(second, fourth)]
    cut += [Meeting(first, fourth), Meeting(second, third)]
    return [part for part in cut if part.callers and part.called]


def _halves(nodes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]

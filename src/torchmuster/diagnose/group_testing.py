"""Group testing: find dead hosts, then slow and corrupting ones, then bad links."""

import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from torchmuster.diagnose.rounds import Pair, collective_rounds, disjoint


class ProbeGroup(NamedTuple):
    """Every host in ``callers`` exchanges data with every host in ``called``."""

    callers: Sequence[int]
    called: Sequence[int]


class ProbeResult(enum.Enum):
    """The result of testing a group. One bad link is enough to fail it."""

    OK = "ok"
    FAILED = "failed"  # a host got no answer within the deadline
    WRONG = "wrong"  # a host received other values than were sent


class ProbeOutcome(NamedTuple):
    """The outcome of testing a group.

    ``ratio`` is the measured time divided by the expected time. It counts for pairs only: of very
    many links the slowest is always slow, by chance. ``blamed`` are the links that failed, if the
    tester knows them.
    """

    seen: ProbeResult = ProbeResult.OK
    ratio: float = 1.0
    blamed: frozenset[Pair] = frozenset()


class GroupTester(Protocol):
    """Tests groups, on real hosts or in a simulation."""

    async def test(
        self, meetings: Sequence[ProbeGroup], *, without: frozenset[Pair]
    ) -> Sequence[ProbeOutcome]:
        """Test one round of groups in parallel, without the links in ``without``.

        No host is in two groups. The outcomes are in the order of the groups. In large groups, a
        call counts as failed after three attempts: of very many calls, one fails by chance.
        """
        ...


class SuspectedFault(enum.Enum):
    """A possible fault of a host or a link."""

    DEAD = "dead"
    SLOW = "slow"
    CORRUPTING = "corrupting"


@dataclass(frozen=True, kw_only=True)
class GroupDiagnosis:
    """The bad hosts and links, and the cost of the search.

    ``undecided`` are hosts about which nothing could be proven, because too few good hosts were
    left to test them with. ``confidence`` is a lower bound on the probability that no tested fault
    was missed and nothing good was accused, as long as the ``Assumptions`` hold.
    """

    bad_nodes: Mapping[int, SuspectedFault] = field(default_factory=dict)
    bad_links: Mapping[Pair, SuspectedFault] = field(default_factory=dict)
    undecided: tuple[int, ...] = ()
    rounds: int
    tests: int
    confidence: float


# A bad host can be missed during screening, and with each of its two witnesses.
WAYS_TO_MISS = 3
# A good pair can appear dead or slow by chance, but not corrupting.
FAULTS_BY_CHANCE = 2
CERTAIN = 1e12  # nats
LEAST_NOISE = 1e-3
NATS_OF_SUSPICION = 5.0  # fewer than 1 in 100 good pairs ever get there


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The assumptions about the tests, and the allowed error probabilities.

    There is no guarantee for hosts that are less slow or corrupt less often, nor if there are
    more bad ones than ``most_bad``.
    """

    slow_ratio: float = 1.25  # a fifth less speed takes a quarter more time
    noise: float = 0.05  # the standard deviation of the ratio of a good pair
    seen_chance: float = 0.9  # probability that one test of a pair shows a corrupting host or link
    chance_failure: float = 1e-4  # probability that a good pair fails one test
    most_bad: int = 20
    accused_wrongly: float = 0.01  # the probability that anything good is accused
    missed: float = 0.01  # the probability that anything bad is missed

    @property
    def nats_to_clear(self) -> float:
        """The evidence against a fault that clears a pair."""
        return math.log(WAYS_TO_MISS * self.most_bad / self.missed)

    def nats_to_accuse(self, candidates: int) -> float:
        """Return the evidence that proves a fault, given the number of candidates."""
        return math.log(FAULTS_BY_CHANCE * max(1, candidates) / self.accused_wrongly)

    @property
    def nats_per_ratio(self) -> float:
        """The average evidence of one measured ratio."""
        return ((self.slow_ratio - 1) / max(self.noise, LEAST_NOISE)) ** 2 / 2

    def repeats(self, faults: Collection[SuspectedFault]) -> int:
        """Return how many tests clear nearly all good pairs."""
        needed = 1.0
        if SuspectedFault.CORRUPTING in faults and self.seen_chance < 1:
            needed = max(needed, self.nats_to_clear / -math.log(1 - self.seen_chance))
        if SuspectedFault.SLOW in faults:
            needed = max(needed, 1.5 * self.nats_to_clear / self.nats_per_ratio)
        return math.ceil(needed - 1e-9)


class Scales:
    """The weight of each outcome, computed once because there are very many outcomes."""

    def __init__(self, faults: Collection[SuspectedFault], assumptions: Assumptions) -> None:
        self.start = {fault: 0.0 if fault in faults else -math.inf for fault in SuspectedFault}
        self.failed = -math.log(assumptions.chance_failure)
        self.slow_from = (1 + assumptions.slow_ratio) / 2
        self.slow_step = (assumptions.slow_ratio - 1) / max(assumptions.noise, LEAST_NOISE) ** 2
        self.passed = math.log(max(1 - assumptions.seen_chance, 1e-9))
        self.clears = -assumptions.nats_to_clear


class Evidence:
    """The evidence about one pair, for each fault of the search."""

    __slots__ = ("_corrupting", "_dead", "_scales", "_slow")

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self._dead = scales.start[SuspectedFault.DEAD]
        self._slow = scales.start[SuspectedFault.SLOW]
        self._corrupting = scales.start[SuspectedFault.CORRUPTING]

    def add(self, outcome: ProbeOutcome) -> None:
        """Add the weight of one more outcome."""
        scales = self._scales
        if outcome.seen is ProbeResult.FAILED:
            self._dead += scales.failed
            return
        self._dead -= CERTAIN  # it answered
        self._slow += scales.slow_step * (outcome.ratio - scales.slow_from)
        self._corrupting += scales.passed if outcome.seen is ProbeResult.OK else CERTAIN

    @property
    def nats(self) -> float:
        """The evidence for the most likely fault."""
        return max(self._dead, self._slow, self._corrupting)

    @property
    def likeliest(self) -> SuspectedFault:
        """The fault with the most evidence."""
        by_fault = zip((self._dead, self._slow, self._corrupting), SuspectedFault, strict=True)
        return max(by_fault, key=lambda item: item[0])[1]

    @property
    def cleared(self) -> bool:
        """Whether every fault is ruled out."""
        return self.nats <= self._scales.clears


# Limit for a borderline pair that neither clears nor proves.
MOST_TESTS_OF_A_PAIR = 60


class ProbeRounds:
    """Runs and counts the rounds of one search."""

    def __init__(self, tester: GroupTester, assumptions: Assumptions) -> None:
        self.assumptions = assumptions
        self.bad_nodes: dict[int, SuspectedFault] = {}
        self.bad_links: dict[Pair, SuspectedFault] = {}
        self.rounds = 0
        self.tests = 0
        self._tester = tester

    async def hold(self, meetings: Sequence[ProbeGroup]) -> Sequence[ProbeOutcome]:
        """Test one round of groups, without the links that are known to be bad."""
        self.rounds += 1
        self.tests += len(meetings)
        return await self._tester.test(meetings, without=frozenset(self.bad_links))

    async def _hold_pairs(self, pairs: Sequence[Pair]) -> Sequence[ProbeOutcome]:
        return await self.hold([ProbeGroup((one,), (other,)) for one, other in pairs])

    async def screen(self, pairs: Sequence[Pair], faults: Collection[SuspectedFault]) -> list[Pair]:
        """Test disjoint pairs a few times; return those that are not cleared of the faults.

        A pair that fails is not tested again here: each failure costs a full deadline.
        """
        scales = Scales(faults, self.assumptions)
        evidence = {pair: Evidence(scales) for pair in pairs}
        asked = list(pairs)
        for _ in range(self.assumptions.repeats(faults)):
            if not asked:
                break
            for pair, outcome in zip(asked, await self._hold_pairs(asked), strict=True):
                evidence[pair].add(outcome)
            asked = [pair for pair in asked if evidence[pair].nats < NATS_OF_SUSPICION]
        return [pair for pair in pairs if not evidence[pair].cleared]

    async def prove(
        self, pairs: Iterable[Pair], faults: Collection[SuspectedFault], *, candidates: int
    ) -> dict[Pair, SuspectedFault]:
        """Test pairs until each is cleared or proven bad; return the bad ones.

        ``candidates`` is how many were screened: more candidates need stronger evidence.
        """
        limit = self.assumptions.nats_to_accuse(candidates)
        scales = Scales(faults, self.assumptions)
        evidence = {pair: Evidence(scales) for pair in pairs}
        bad: dict[Pair, SuspectedFault] = {}
        for turn in disjoint(evidence, members=tuple):
            asked = turn
            for _ in range(MOST_TESTS_OF_A_PAIR):
                for pair, outcome in zip(asked, await self._hold_pairs(asked), strict=True):
                    evidence[pair].add(outcome)
                    if evidence[pair].nats >= limit:
                        bad[pair] = evidence[pair].likeliest
                asked = [pair for pair in asked if pair not in bad and not evidence[pair].cleared]
                if not asked:
                    break
        return bad


# Large groups show only these faults; the slowest of many links is slow by chance.
SEEN_IN_MEETINGS = {
    SuspectedFault.DEAD: ProbeResult.FAILED,
    SuspectedFault.CORRUPTING: ProbeResult.WRONG,
}


async def find_collective_links(
    course: ProbeRounds, nodes: Sequence[int], faults: Collection[SuspectedFault]
) -> None:
    """Add the bad links among those that collectives use to ``course``."""
    doubtful: list[Pair] = []
    tried = 0
    for turn in collective_rounds(len(nodes)):
        pairs = [(nodes[one], nodes[other]) for one, other in turn]
        pairs = [pair for pair in pairs if pair not in course.bad_links]
        doubtful += await course.screen(pairs, faults)
        tried += len(pairs)
    course.bad_links.update(await course.prove(doubtful, faults, candidates=tried))


async def find_any_link(
    course: ProbeRounds, nodes: Sequence[int], faults: Collection[SuspectedFault]
) -> None:
    """Add all links with faults in ``SEEN_IN_MEETINGS`` to ``course``.

    Stops after enough rounds without a new bad link, or when there are more than ``most_bad``.
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


def halvings(nodes: Sequence[int]) -> Iterator[list[ProbeGroup]]:
    """Yield rounds of groups in which every two hosts meet exactly once, in ⌈log2 N⌉ rounds.

    First one half meets the other, then the halves of each half meet, and so on.
    """
    blocks = [nodes]
    while blocks := [block for block in blocks if len(block) > 1]:
        halves = [_halves(block) for block in blocks]
        yield [ProbeGroup(left, right) for left, right in halves]
        blocks = [half for pair in halves for half in pair]


async def _narrow(
    course: ProbeRounds, spoilt: Iterable[ProbeGroup], faults: Collection[SuspectedFault]
) -> set[Pair]:
    """Split failed groups in four until pairs are left; retry, as faults may be intermittent."""
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
        shown: dict[int, list[ProbeGroup]] = {}
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


def _is_pair(meeting: ProbeGroup) -> bool:
    return len(meeting.callers) == len(meeting.called) == 1


def _pair(meeting: ProbeGroup) -> Pair:
    (one,), (other,) = meeting
    return min(one, other), max(one, other)


def _quarters(meeting: ProbeGroup) -> list[ProbeGroup]:
    (first, second), (third, fourth) = _halves(meeting.callers), _halves(meeting.called)
    # In this order, two of the four can run in parallel.
    cut = [ProbeGroup(first, third), ProbeGroup(second, fourth)]
    cut += [ProbeGroup(first, fourth), ProbeGroup(second, third)]
    return [part for part in cut if part.callers and part.called]


def _halves(nodes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]


# A host counts as bad only if it fails with two good hosts: with one, the link may be the cause.
WITNESSES = 2


async def find_nodes(
    course: ProbeRounds, nodes: Sequence[int], faults: Collection[SuspectedFault]
) -> tuple[int, ...]:
    """Add the bad hosts among these to ``course``, and bad links found between good hosts.

    Return the hosts that cannot be judged: if there are as many bad hosts as pairs, there may be no
    pair of two good hosts to start with.
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
    course: ProbeRounds,
    suspects: Sequence[int],
    trusted: Sequence[int],
    faults: Collection[SuspectedFault],
) -> None:
    # The second witness is a different host, if possible one that no other suspect uses.
    shift = len(suspects) if len(suspects) % len(trusted) else 1
    accused: dict[int, SuspectedFault] = {}
    bad: dict[Pair, SuspectedFault] = {}
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


USUAL = Assumptions()


class LinkSearch(enum.Enum):
    """Which links to test, besides those used while testing hosts."""

    NONE = "none"
    COLLECTIVES = "collectives"  # those that collectives use: a few per host
    EVERY = "every"  # these, and all others for faults that large groups show: dead or corrupting


async def find_bad(
    tester: GroupTester,
    count: int,
    *,
    assumptions: Assumptions = USUAL,
    links: LinkSearch = LinkSearch.COLLECTIVES,
    faults: Collection[SuspectedFault] = tuple(SuspectedFault),
) -> GroupDiagnosis:
    """Find the bad hosts of ``range(count)``, and the bad links between good hosts.

    The search works as long as there are fewer bad hosts than pairs. It may report a good host with
    several bad links as bad. It assumes that ranks are in the order of the hosts.
    """
    course = ProbeRounds(tester, assumptions)
    good: list[int] = list(range(count))
    undecided: tuple[int, ...] = ()
    stages = 0
    for together in ((SuspectedFault.DEAD,), (SuspectedFault.SLOW, SuspectedFault.CORRUPTING)):
        wanted = [fault for fault in together if fault in faults]
        if not wanted:
            continue
        stages += 1
        undecided += await find_nodes(course, good, wanted)
        left_out = course.bad_nodes.keys() | set(undecided)
        good = [one for one in good if one not in left_out]
    shown_by_many = [fault for fault in SEEN_IN_MEETINGS if fault in faults]
    # If every link is tested in groups, pairs only need to show what groups do not: slow links.
    if links is LinkSearch.COLLECTIVES or (
        links is LinkSearch.EVERY and SuspectedFault.SLOW in faults
    ):
        stages += 1
        await find_collective_links(course, good, faults)
    if links is LinkSearch.EVERY:
        stages += 1
        await find_any_link(course, good, shown_by_many)
    return GroupDiagnosis(
        bad_nodes=course.bad_nodes,
        bad_links=course.bad_links,
        undecided=undecided,
        rounds=course.rounds,
        tests=course.tests,
        confidence=1 - stages * (assumptions.accused_wrongly + assumptions.missed),
    )

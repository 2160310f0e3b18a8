"""A group of machines that does not exist, with chosen faults: what ``search`` is tried on.

It also tells how long the tests would take, by a plain model (``Clock``).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.diagnose.group_testing import ProbeGroup, ProbeOutcome, ProbeResult, SuspectedFault
from torchmuster.diagnose.rounds import Pair

# In a meeting of many, who gets no answer asks again before it counts: else there is always one.
TRIES_IN_A_MEETING = 3


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What a round takes: what its slowest meeting takes, and telling everybody about it.

    All but the deadline are what ``tests/hosts/check_clock.py`` measures between two hosts on one busy
    machine with two cores.
    """

    telling_s: float = 0.001  # one machine's orders out and its answer back
    pair_s: float = 0.4  # connect, pings, datagrams, a burst each way
    call_s: float = 0.0006  # one short exchange with one of many
    deadline_s: float = 5.0  # until somebody who does not answer is given up

    def round_s(self, largest: int, *, told: int, failed: bool) -> float:
        """Return the seconds of a round with so many in a side of a meeting, and in all meetings."""
        working = self.pair_s if largest == 1 else largest * self.call_s
        return told * self.telling_s + max(working, self.deadline_s if failed else 0.0)


@dataclass(kw_only=True)
class SimulatedGroup:
    """A tester. A meeting shows each fault that takes part in it; good ones are noisy and fail by chance.

    As with real machines, it is told who got no answer from whom; but not who got wrong values.
    """

    bad_nodes: Mapping[int, SuspectedFault] = field(default_factory=dict)
    bad_links: Mapping[Pair, SuspectedFault] = field(default_factory=dict)
    seed: int = 0
    slow_ratio: float = 1.25
    noise: float = 0.05
    seen_chance: float = 0.9
    chance_failure: float = 1e-4
    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._nodes = frozenset(self.bad_nodes)
        self._ends: frozenset[int] = frozenset().union(*self.bad_links)
        self._touched = self._nodes | self._ends

    async def test(
        self, meetings: Sequence[ProbeGroup], *, without: frozenset[Pair]
    ) -> Sequence[ProbeOutcome]:
        """Hold a round of meetings, and let the time pass that it takes."""
        outcomes = [self._outcome(meeting, without) for meeting in meetings]
        sizes = [len(side) for meeting in meetings for side in meeting]
        self.seconds += self.clock.round_s(
            max(sizes),
            told=sum(sizes),
            failed=any(outcome.seen is ProbeResult.FAILED for outcome in outcomes),
        )
        return outcomes

    def _outcome(self, meeting: ProbeGroup, without: frozenset[Pair]) -> ProbeOutcome:
        links: dict[Pair, SuspectedFault] = {}
        faults: list[SuspectedFault] = []
        if not all(map(self._touched.isdisjoint, meeting)):  # which is seldom, and takes long
            links = self._bad_links(meeting, without)
            faults = [*self._bad_nodes(meeting), *links.values()]
        if SuspectedFault.DEAD in faults:
            dead = frozenset(link for link, fault in links.items() if fault is SuspectedFault.DEAD)
            return ProbeOutcome(seen=ProbeResult.FAILED, blamed=dead)
        if self._random.random() < self._fails_by_chance(meeting):
            one, other = map(self._random.choice, meeting)
            return ProbeOutcome(
                seen=ProbeResult.FAILED, blamed=frozenset({(min(one, other), max(one, other))})
            )
        ratio = self._random.gauss(1.0, self.noise)
        if not faults:
            return ProbeOutcome(ratio=ratio)
        wrong = any(
            self._random.random() < self.seen_chance
            for fault in faults
            if fault is SuspectedFault.CORRUPTING
        )
        slow = self.slow_ratio if SuspectedFault.SLOW in faults else 1.0
        return ProbeOutcome(seen=ProbeResult.WRONG if wrong else ProbeResult.OK, ratio=ratio * slow)

    def _bad_nodes(self, meeting: ProbeGroup) -> list[SuspectedFault]:
        return [self.bad_nodes[one] for side in meeting for one in self._nodes.intersection(side)]

    def _bad_links(
        self, meeting: ProbeGroup, without: frozenset[Pair]
    ) -> dict[Pair, SuspectedFault]:
        callers, called = (self._ends.intersection(side) for side in meeting)
        if not callers or not called:
            return {}
        return {
            (one, other): fault
            for (one, other), fault in self.bad_links.items()
            if (one in callers and other in called) or (one in called and other in callers)
            if (one, other) not in without
        }

    def _fails_by_chance(self, meeting: ProbeGroup) -> float:
        links = len(meeting.callers) * len(meeting.called)
        if links == 1:
            return self.chance_failure
        return min(1.0, links * self.chance_failure**TRIES_IN_A_MEETING)

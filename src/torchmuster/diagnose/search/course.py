"""The course of a search: who is left out, what has been tested, and the two ways of testing pairs."""

from collections.abc import Collection, Iterable, Sequence

from torchmuster.diagnose.rounds import Pair, disjoint
from torchmuster.diagnose.search.evidence import NATS_OF_SUSPICION, Assumptions, Evidence, Scales
from torchmuster.diagnose.search.model import Fault, Meeting, Outcome, Tester

# A pair between good and bad may take long to judge, but has to be judged at some time.
MOST_TESTS_OF_A_PAIR = 60


class Course:
    """Holds the rounds of one search, and counts them."""

    def __init__(self, tester: Tester, assumptions: Assumptions) -> None:
        self.assumptions = assumptions
        self.bad_nodes: dict[int, Fault] = {}
        self.bad_links: dict[Pair, Fault] = {}
        self.rounds = 0
        self.tests = 0
        self._tester = tester

    async def hold(self, meetings: Sequence[Meeting]) -> Sequence[Outcome]:
        """Hold one round of meetings, without the links that are known to be bad."""
        self.rounds += 1
        self.tests += len(meetings)
        return await self._tester.test(meetings, without=frozenset(self.bad_links))

    async def _hold_pairs(self, pairs: Sequence[Pair]) -> Sequence[Outcome]:
        return await self.hold([Meeting((one,), (other,)) for one, other in pairs])

    async def screen(self, pairs: Sequence[Pair], faults: Collection[Fault]) -> list[Pair]:
        """Test disjoint pairs a few times; return those that are not cleared of the faults.

        A pair that fails is not asked again: whether it will answer costs a whole deadline.
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
        self, pairs: Iterable[Pair], faults: Collection[Fault], *, candidates: int
    ) -> dict[Pair, Fault]:
        """Test pairs until each is either cleared or proven to be bad; return the bad ones.

        ``candidates`` is how many were screened: the more, the stronger the proof has to be.
        """
        limit = self.assumptions.nats_to_accuse(candidates)
        scales = Scales(faults, self.assumptions)
        evidence = {pair: Evidence(scales) for pair in pairs}
        bad: dict[Pair, Fault] = {}
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

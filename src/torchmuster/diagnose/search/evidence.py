"""Weighing what was seen of a pair: sequential probability ratio tests (Wald), in nats.

For each fault the evidence is the logarithm of how much likelier the outcomes are with that fault than
without any. A good pair ever reaches ``L`` nats with a probability of at most ``exp(-L)``, and a bad one
ever falls to ``-L`` with the same; so the limits follow from the errors that are allowed.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from torchmuster.diagnose.search.model import Fault, Outcome, Seen

# A bad machine can be missed when it is screened, and with each of its two witnesses.
WAYS_TO_MISS = 3
# Only these can be seen of a good pair by chance; a wrong value cannot.
FAULTS_BY_CHANCE = 2
CERTAIN = 1e12  # nats
LEAST_NOISE = 1e-3
NATS_OF_SUSPICION = 5.0  # fewer than 1 in 100 good pairs ever get there


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is taken to be true of the tests, and the errors that are allowed.

    Nothing is promised about machines that are less slow or corrupt more seldom, nor if there are
    more bad ones than ``most_bad``.
    """

    slow_ratio: float = 1.25  # a fifth less speed takes a quarter more time
    noise: float = 0.05  # the standard deviation of the ratio of a good pair
    seen_chance: float = 0.9  # that a corrupting machine or link shows in one test of a pair
    chance_failure: float = 1e-4  # that a good pair fails one test
    most_bad: int = 20
    accused_wrongly: float = 0.01  # the probability that anything good is accused
    missed: float = 0.01  # the probability that anything bad is missed

    @property
    def nats_to_clear(self) -> float:
        """How much evidence against a fault clears a pair of it."""
        return math.log(WAYS_TO_MISS * self.most_bad / self.missed)

    def nats_to_accuse(self, candidates: int) -> float:
        """How much evidence for a fault proves it, with so many that could be accused wrongly."""
        return math.log(FAULTS_BY_CHANCE * max(1, candidates) / self.accused_wrongly)

    @property
    def nats_per_ratio(self) -> float:
        """How much evidence one measured ratio is, on average."""
        return ((self.slow_ratio - 1) / max(self.noise, LEAST_NOISE)) ** 2 / 2

    def repeats(self, faults: Collection[Fault]) -> int:
        """Return how often good pairs are tested so that nearly all of them are cleared."""
        needed = 1.0
        if Fault.CORRUPTING in faults and self.seen_chance < 1:
            needed = max(needed, self.nats_to_clear / -math.log(1 - self.seen_chance))
        if Fault.SLOW in faults:
            needed = max(needed, 1.5 * self.nats_to_clear / self.nats_per_ratio)
        return math.ceil(needed - 1e-9)


class Scales:
    """How much each outcome weighs; made once, since very many outcomes are weighed."""

    def __init__(self, faults: Collection[Fault], assumptions: Assumptions) -> None:
        self.start = {fault: 0.0 if fault in faults else -math.inf for fault in Fault}
        self.failed = -math.log(assumptions.chance_failure)
        self.slow_from = (1 + assumptions.slow_ratio) / 2
        self.slow_step = (assumptions.slow_ratio - 1) / max(assumptions.noise, LEAST_NOISE) ** 2
        self.passed = math.log(max(1 - assumptions.seen_chance, 1e-9))
        self.clears = -assumptions.nats_to_clear


class Evidence:
    """The evidence about one pair, for each fault that is looked for."""

    __slots__ = ("_corrupting", "_dead", "_scales", "_slow")

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self._dead = scales.start[Fault.DEAD]
        self._slow = scales.start[Fault.SLOW]
        self._corrupting = scales.start[Fault.CORRUPTING]

    def add(self, outcome: Outcome) -> None:
        """Weigh one more outcome."""
        scales = self._scales
        if outcome.seen is Seen.FAILED:
            self._dead += scales.failed
            return
        self._dead -= CERTAIN  # it answered
        self._slow += scales.slow_step * (outcome.ratio - scales.slow_from)
        self._corrupting += scales.passed if outcome.seen is Seen.OK else CERTAIN

    @property
    def nats(self) -> float:
        """The evidence for the likeliest fault."""
        return max(self._dead, self._slow, self._corrupting)

    @property
    def likeliest(self) -> Fault:
        """The fault that there is most evidence for."""
        by_fault = zip((self._dead, self._slow, self._corrupting), Fault, strict=True)
        return max(by_fault, key=lambda item: item[0])[1]

    @property
    def cleared(self) -> bool:
        """Whether every fault is ruled out."""
        return self.nats <= self._scales.clears

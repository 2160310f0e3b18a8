"""Which rank the others wait for, and what it does longer than they do.

With DDP every rank's backward takes equally long: whoever has its gradients first waits in it for the last one. So it
is not the phase's length that tells, but how long each rank waited in it: the rank that all wait for waits least. That
needs no clock that machines would have to share.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.measure.profile.usual_steps import PHASES, RanksStep, own_s, step_s, waited_s

_SAME_RANK_FROM = 0.75
_MATTERS_FROM = 0.08


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that comes last to the ranks' communication."""

    rank: int
    phase: str  # what it does longer than the others
    longer_s: float  # in that phase, a step
    late_s: float  # after the rank that comes before it, a step
    last_in: int  # of so many steps
    of_steps: int
    step_s: float

    @property
    def matters(self) -> bool:
        """Whether it is always the same rank, and by enough to be worth mending."""
        steady = self.last_in >= _SAME_RANK_FROM * self.of_steps
        return steady and self.late_s >= _MATTERS_FROM * self.step_s


def find(steps: Sequence[RanksStep]) -> SlowRank | None:
    """Return the rank that came last most often; None with one rank, or where nothing was waited for."""
    if not steps or len(steps[0]) < 2:
        return None
    if not any(waited_s(one) for step in steps for one in step.values()):
        return None
    last = Counter(min(step, key=lambda rank: waited_s(step[rank])) for step in steps)
    rank, times = last.most_common(1)[0]
    late = []
    for step in steps:
        before = min(waited_s(one) for other, one in step.items() if other != rank)
        late.append(before - waited_s(step[rank]))
    phase, longer_s = _phase(rank, steps)
    return SlowRank(
        rank=rank,
        phase=phase,
        longer_s=longer_s,
        late_s=max(statistics.fmean(late), 0.0),
        last_in=times,
        of_steps=len(steps),
        step_s=step_s(steps),
    )


def _phase(rank: int, steps: Sequence[RanksStep]) -> tuple[str, float]:
    """Return the phase in which the rank is most behind the others' median, and by how much."""
    behind = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        own = own_s(step[rank])
        others = [own_s(one) for other, one in step.items() if other != rank]
        for phase in PHASES:
            typical = statistics.median(one[phase] for one in others)
            behind[phase] += (own[phase] - typical) / len(steps)
    phase = max(behind, key=lambda name: behind[name])
    return phase, behind[phase]

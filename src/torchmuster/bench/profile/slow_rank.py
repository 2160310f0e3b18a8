"""Which rank the others wait for, and what it does longer than they do.

With DDP every rank's backward takes equally long: whoever has its gradients first waits in it for the last one. So it
is not the phase's length that tells, but how long each rank waited in it: the rank that all wait for waits least. That
needs no clock that machines would have to share.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.bench.profile.gains import PHASES, RanksStep, own_s, usual_step_s, waited_s
from torchmuster.bench.profile.shares import Shares

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
    def gain(self) -> float:
        """How many times as many steps there would be if it were as fast as the rank before it."""
        return self.step_s / max(self.step_s - self.late_s, 1e-9)

    @property
    def matters(self) -> bool:
        """Whether it is always the same rank, and by enough to be worth mending."""
        steady = self.last_in >= _SAME_RANK_FROM * self.of_steps
        return steady and self.late_s >= _MATTERS_FROM * self.step_s


def find_slow_rank(steps: Sequence[RanksStep]) -> SlowRank | None:
    """Return the rank that came last most often; None with one rank, or where nothing was waited for."""
    waited = [{rank: waited_s(one) for rank, one in step.items()} for step in steps]
    last = _last(waited)
    if last is None:
        return None
    phase, longer_s = _slow_rank_phase(last[0], steps)
    return _slow_rank_slow(waited, last, phase=phase, longer_s=longer_s, step_s=usual_step_s(steps))


def on_devices(
    sent_s: Mapping[int, Sequence[float]], shares: Mapping[int, Shares]
) -> SlowRank | None:
    """Return the same for devices, by how long each one's collectives took, step by step.

    A device waits inside of a collective for the others, and its host goes on meanwhile.
    """
    waited = [dict(zip(sent_s, step, strict=True)) for step in zip(*sent_s.values(), strict=False)]
    last = _last(waited)
    if last is None:
        return None
    others = [one for rank, one in shares.items() if rank != last[0]]
    behind = {
        name: shares[last[0]].by_name()[name]
        - statistics.median(one.by_name()[name] for one in others)
        for name in ("data", "compute")
    }
    phase = max(behind, key=lambda name: behind[name])
    whole_s = max(one.total_s for one in shares.values())
    return _slow_rank_slow(waited, last, phase=phase, longer_s=behind[phase], step_s=whole_s)


def _last(waited: Sequence[Mapping[int, float]]) -> tuple[int, int] | None:
    """Return the rank that waited least in most steps, and in how many."""
    if not waited or len(waited[0]) < 2 or not any(any(step.values()) for step in waited):
        return None
    found = Counter(min(step, key=lambda rank: step[rank]) for step in waited)
    return found.most_common(1)[0]


def _slow_rank_slow(
    waited: Sequence[Mapping[int, float]],
    last: tuple[int, int],
    *,
    phase: str,
    longer_s: float,
    step_s: float,
) -> SlowRank:
    rank, times = last
    late = [min(step[one] for one in step if one != rank) - step[rank] for step in waited]
    return SlowRank(
        rank=rank,
        phase=phase,
        longer_s=longer_s,
        late_s=max(statistics.fmean(late), 0.0),
        last_in=times,
        of_steps=len(waited),
        step_s=step_s,
    )


def _slow_rank_phase(rank: int, steps: Sequence[RanksStep]) -> tuple[str, float]:
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

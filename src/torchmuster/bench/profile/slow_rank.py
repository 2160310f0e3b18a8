"""Find the straggler, and the phase in which it is slower.

With DDP every rank's backward takes equally long: the first ranks wait in it for the last one. So
the length of the phase does not identify the straggler, but the waiting time does: the straggler
waits least. This needs no synchronized clocks.
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
    """A rank that is last at the ranks' communication."""

    rank: int
    phase: str  # in which it is slower than the others
    longer_s: float  # in that phase, per step
    late_s: float  # after the second to last rank, per step
    last_in: int  # number of steps in which it was last
    of_steps: int
    step_s: float

    @property
    def gain(self) -> float:
        """The gain in steps/s if it were as fast as the second to last rank."""
        return self.step_s / max(self.step_s - self.late_s, 1e-9)

    @property
    def matters(self) -> bool:
        """Whether it is consistently the same rank, with a relevant delay."""
        steady = self.last_in >= _SAME_RANK_FROM * self.of_steps
        return steady and self.late_s >= _MATTERS_FROM * self.step_s


def find_slow_rank(steps: Sequence[RanksStep]) -> SlowRank | None:
    """Return the rank that was last most often; None with one rank, or without waiting."""
    waited = [{rank: waited_s(one) for rank, one in step.items()} for step in steps]
    last = _last(waited)
    if last is None:
        return None
    phase, longer_s = _slow_rank_phase(last[0], steps)
    return _slow_rank_slow(waited, last, phase=phase, longer_s=longer_s, step_s=usual_step_s(steps))


def on_devices(
    sent_s: Mapping[int, Sequence[float]], shares: Mapping[int, Shares]
) -> SlowRank | None:
    """Return the straggler among devices, by the duration of their collectives in each step.

    A device waits for the others inside a collective, while its host continues.
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

"""A profile evaluated: usual steps, shares of each rank, expected gains and the straggler.

A step takes the work of its slowest rank plus the transfer for which all wait. So a saving on one
rank helps only until another rank is the slowest, and a gain applies to the whole step, not to the
part.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchmuster.profile.facts import RankFacts, Step

PHASES = ("data", "forward", "backward", "optimizer", "save", "reads", "other")
SHARES: Mapping[str, str] = {
    "compute": "compute",
    "overlapped": "compute during communication",
    "exposed": "waiting for communication",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "reads": "reading values to host",
    "save": "saving",
    "copies": "copies",
    "idle": "other code, or idle",
}
_UNUSUAL_FROM = 1.5  # times the median step
_STRAGGLER_LATE = 0.08  # of the step, in the median of the steps
_WORKER_HEADROOM = 1.25
_MOST_WORKERS = 16

RanksStep = Mapping[int, Step]  # one step, by rank


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    phase: str  # in which it is slower than the others
    longer_s: float  # in that phase, per step
    late_s: float  # after the second to last rank, in the median of the steps
    last_in: int  # number of steps in which it was last
    of_steps: int
    gain: float  # in steps/s, if it were as fast as the second to last rank


def slowest(step: RanksStep, seconds: Callable[[Step], float]) -> float:
    """Return the most seconds of any rank in a step."""
    return max(map(seconds, step.values()))


def took_s(step: Step) -> float:
    """Return how long a step took on its rank."""
    return step.took_s


@dataclass(frozen=True)
class Profile:
    """The facts of all ranks, in the order of the ranks."""

    facts: Sequence[RankFacts]

    @cached_property
    def steps(self) -> list[RanksStep]:
        """The steps to evaluate: recorded by all ranks, and without the profiler if possible.

        Steps delayed from outside are left out; saves are not from outside.
        """
        by_number: defaultdict[int, dict[int, Step]] = defaultdict(dict)
        for facts in self.facts:
            for step in facts.steps:
                by_number[step.number][facts.rank] = step
        complete = [step for step in by_number.values() if len(step) == len(self.facts)]
        unprofiled = [step for step in complete if not step[0].profiled]
        steps = unprofiled or complete
        if not steps:
            return []

        def length_s(step: RanksStep) -> float:
            return slowest(step, lambda own: own.took_s - own.own_s("save"))

        longest_s = _UNUSUAL_FROM * statistics.median(map(length_s, steps))
        return [step for step in steps if length_s(step) <= longest_s]

    @cached_property
    def step_s(self) -> float:
        """The step time: the mean over the steps, of the slowest rank."""
        longest_s = [slowest(step, took_s) for step in self.steps]
        return statistics.fmean(longest_s) if longest_s else 0.0

    def mean_s(self, phase: str) -> float:
        """Return the seconds of a phase, averaged over steps and ranks, without waiting."""
        seconds: list[float] = []
        for step in self.steps:
            seconds += [own.own_s(phase) for own in step.values()]
        return statistics.fmean(seconds)

    def most_times(self, phase: str) -> int:
        """Return how often a phase occurs in a step, on the rank where it occurs most."""
        times = [0]
        for step in self.steps:
            times += [own.times.get(phase, 0) for own in step.values()]
        return max(times)

    @cached_property
    def transfer_s(self) -> float:
        """How long even the last rank waits per step: the time of the transfer itself."""
        if len(self.facts) < 2:
            return 0.0
        return statistics.fmean(-slowest(step, lambda own: -own.waited_s) for step in self.steps)

    @cached_property
    def shares(self) -> list[dict[str, float]]:
        """The seconds of a step by share, for each rank; a device's timeline counts more than the host's."""
        return [self._shares(facts) for facts in self.facts]

    def _shares(self, facts: RankFacts) -> dict[str, float]:
        shares = dict.fromkeys(SHARES, 0.0)
        if facts.trace is not None and facts.trace.shares:
            return shares | facts.trace.shares
        if self.steps:
            own = [step[facts.rank] for step in self.steps]
            means = {}
            for phase in PHASES:
                means[phase] = statistics.fmean(step.own_s(phase) for step in own)
            shares["compute"] = means["forward"] + means["backward"]
            shares["exposed"] = statistics.fmean(step.waited_s for step in own)
            shares["idle"] = means["other"]
            for name in ("optimizer", "data", "reads", "save"):
                shares[name] = means[name]
        return shares

    def part(self, rank: int, share: str) -> float:
        """Return a share of a rank's step, from 0 to 1."""
        shares = self.shares[rank]
        whole_s = sum(shares.values())
        return shares[share] / whole_s if whole_s else 0.0

    @cached_property
    def on_device(self) -> bool:
        """Whether the ranks compute on devices, whose timelines count."""
        return bool(self.facts) and all(facts.on_device for facts in self.facts)

    def gain(
        self, saved_s: Callable[[Step], float] = lambda _: 0.0, transfer_saved_s: float = 0.0
    ) -> float:
        """Return the gain in steps/s if each rank's own work gets shorter by these seconds."""
        before_s = after_s = 0.0
        for step in self.steps:
            work_s = slowest(step, lambda own: own.took_s - own.waited_s)
            left_s = slowest(step, lambda own: own.took_s - own.waited_s - saved_s(own))
            before_s += slowest(step, took_s)
            after_s += max(slowest(step, took_s) - (work_s - left_s) - transfer_saved_s, 1e-9)
        return before_s / after_s if before_s else 1.0

    def gain_of_phase(self, phase: str, left: float = 0.0) -> float:
        """Return the gain if a phase took only a part of its time on every rank."""
        if self.on_device:
            least = min(self.part(facts.rank, phase) for facts in self.facts)
            return 1 / (1 - least * (1 - left))
        return self.gain(lambda own: own.own_s(phase) * (1 - left))

    def workers_needed(self, workers: int) -> int:
        """Return how many loader workers are needed to hide data loading."""
        data_s = self.mean_s("data")
        # Without workers, the training waits for each batch; workers load batches in parallel.
        batch_s = workers * self.step_s if workers else data_s
        rest_s = max(self.step_s - data_s, 1e-9)
        needed = max(math.ceil(_WORKER_HEADROOM * batch_s / rest_s), workers + 1, 2)
        return min(needed, _MOST_WORKERS)

    @property
    def messages(self) -> int | None:
        """The number of gradient messages of a rank, given DDP's bucket size."""
        facts = self.facts[0]
        if facts.strategy != "ddp" or not facts.bucket_bytes or not facts.gradient_bytes:
            return None
        return max(math.ceil(facts.gradient_bytes / facts.bucket_bytes), 1)

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank that waits least, if the others wait for it; this needs no synchronized clocks.

        With DDP every rank's backward takes equally long, since the first ranks wait in it for the
        last one. A device waits in its collectives.
        """
        waits = self._waits()
        if len(self.facts) < 2 or not waits:
            return None
        late_s = {}
        for facts in self.facts:
            late = []
            for step in waits:
                rest = [waited_s for rank, waited_s in step.items() if rank != facts.rank]
                late.append(min(rest) - step[facts.rank])
            late_s[facts.rank] = statistics.median(late)
        rank = max(late_s, key=lambda rank: late_s[rank])
        step_s = statistics.median(slowest(step, took_s) for step in self.steps)
        if self.on_device:
            step_s = max(sum(shares.values()) for shares in self.shares)
        if late_s[rank] < _STRAGGLER_LATE * step_s:  # other load delays any rank at times
            return None
        behind = self._behind(rank)
        phase = max(behind, key=lambda name: behind[name])
        return Straggler(
            rank=rank,
            phase=phase,
            longer_s=behind[phase],
            late_s=late_s[rank],
            last_in=sum(min(step.values()) == step[rank] for step in waits),
            of_steps=len(waits),
            gain=step_s / max(step_s - late_s[rank], 1e-9),
        )

    def _waits(self) -> list[dict[int, float]]:
        """Return how long each rank waited for the others, in each step."""
        waits = []
        if not self.on_device:
            for step in self.steps:
                waits.append({rank: own.waited_s for rank, own in step.items()})
            return waits
        sent = {facts.rank: facts.trace.sent_s for facts in self.facts if facts.trace}
        for times_s in zip(*sent.values(), strict=False):
            waits.append(dict(zip(sent, times_s, strict=True)))
        return waits

    def phase_s(self, rank: int, phase: str) -> float:
        """Return the usual time of a phase on a rank, without waiting for other ranks."""
        if self.on_device:
            return self.shares[rank][phase]
        return statistics.median(step[rank].own_s(phase) for step in self.steps)

    def _behind(self, rank: int) -> dict[str, float]:
        """Return by phase how much longer a rank takes than the median of the other ranks."""
        phases = ("data", "compute") if self.on_device else PHASES
        rest = [facts.rank for facts in self.facts if facts.rank != rank]
        behind = {}
        for phase in phases:
            usual_s = statistics.median(self.phase_s(other, phase) for other in rest)
            behind[phase] = self.phase_s(rank, phase) - usual_s
        return behind

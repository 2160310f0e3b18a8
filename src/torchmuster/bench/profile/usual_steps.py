"""The steps that are judged: those that all ranks have, without the profiler, and nothing from outside in them."""

import statistics
from collections.abc import Mapping, Sequence

from torchmuster.bench.profile.recording_words import RankFacts, Step

RanksStep = Mapping[int, Step]  # one step, by rank

PHASES = ("data", "forward", "backward", "optimizer", "save", "reads", "other")
_UNUSUAL_FROM = 1.5  # times the median step


def usual_steps(ranks: Sequence[RankFacts]) -> list[RanksStep]:
    """Return the steps to judge by; where every step was profiled, these."""
    by_rank = {one.rank: {step.number: step for step in one.steps} for one in ranks}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    found = [{rank: steps[at] for rank, steps in by_rank.items()} for at in sorted(common)]
    plain = [step for step in found if not any(one.profiled for one in step.values())] or found
    # What holds a step up from outside is left out; a save is not outside.
    lengths = [max(one.took_s - one.save_s for one in step.values()) for step in plain]
    longest = _UNUSUAL_FROM * statistics.median(lengths) if lengths else 0.0
    return [step for step, length in zip(plain, lengths, strict=True) if length <= longest]


def waited_s(step: Step) -> float:
    """Return how long a rank waited for communication with nothing beside it."""
    return step.waiting_s + step.communication_s


def own_s(step: Step) -> dict[str, float]:
    """Return what a rank took by phase, without the waiting for other ranks."""
    named: dict[str, float] = {phase: getattr(step, f"{phase}_s") for phase in PHASES}
    named["backward"] -= step.waiting_s
    return named


def mean_s(steps: Sequence[RanksStep], phase: str) -> float:
    """Return a phase's seconds, the mean of steps and ranks."""
    return statistics.fmean(own_s(one)[phase] for step in steps for one in step.values())


def step_s(steps: Sequence[RanksStep]) -> float:
    """Return what a step takes: the mean over the steps, of the rank that took longest."""
    return statistics.fmean(max(one.took_s for one in step.values()) for step in steps)


def transfer_s(steps: Sequence[RanksStep]) -> float:
    """Return how long even the rank that comes last waits, a step: that is what the transfer itself takes."""
    if not steps or len(steps[0]) < 2:
        return 0.0
    return statistics.fmean(min(waited_s(one) for one in step.values()) for step in steps)

"""Where the time of a step on several ranks goes, beyond what it would be if n ranks were n times as fast.

Every part is a difference between two things that were timed, so they add up to the step:

===================  =========================================================================================
ideal                one rank's step with the whole (weak), or that over n (strong)
smaller portions     one rank's step with the portion, less the ideal: what does not shrink with the samples
computing beside     computing without sending anything, all ranks at once, less the same on one rank
data                 reading while all ranks read, less the same on one rank
imbalance            the slowest rank's step without sending, less the ranks' mean: waiting for the slowest
communication        the step, less the slowest rank's without sending: what no computing hides
===================  =========================================================================================

A difference that noise makes negative is 0; the other losses are then reduced so that all add up to the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.bench.scaling import Mode, OnRanks, Study
from torchmuster.bench.statistics import Estimate, estimate

IDEAL = "ideal"
SMALLER, BESIDE, DATA = "smaller portions", "computing beside others", "data"
IMBALANCE, COMMUNICATION = "imbalance", "exposed communication"
LOSSES = (SMALLER, BESIDE, DATA, IMBALANCE, COMMUNICATION)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One number of ranks in one mode, held against one rank."""

    ranks: int
    mode: Mode
    portion: int  # samples of each rank
    step_s: Estimate
    throughput: Estimate  # samples a second of all ranks
    speed_up: Estimate  # in throughput, over one rank
    parts_s: Mapping[str, float]  # of the step: the ideal and the losses; they add up to it

    @property
    def efficiency(self) -> Estimate:
        """The speed-up over the number of ranks."""
        return _times(self.speed_up, 1 / self.ranks)

    @property
    def worst_loss(self) -> str | None:
        """The loss that takes most; None where nothing is lost."""
        losses = {name: self.parts_s[name] for name in LOSSES}
        worst = max(losses, key=lambda name: losses[name])
        return worst if losses[worst] > 0 else None


def scaled(study: Study, measured: Mapping[int, OnRanks], ranks: int, mode: Mode) -> Scaled:
    """Hold what was measured with so many ranks against one rank."""
    portion = study.portion(ranks, mode)
    one = measured[1].by_portion
    step = estimate(measured[ranks].by_portion[portion].step_s)
    throughput = _over(portion * ranks, step)
    alone = _over(study.whole, estimate(one[study.whole].step_s))
    return Scaled(
        ranks=ranks,
        mode=mode,
        portion=portion,
        step_s=step,
        throughput=throughput,
        speed_up=Estimate(
            median=throughput.median / alone.median,
            low=throughput.low / alone.high,
            high=throughput.high / alone.low,
            count=min(throughput.count, alone.count),
        ),
        parts_s=_parts(study, measured, ranks, mode),
    )


def _parts(
    study: Study, measured: Mapping[int, OnRanks], ranks: int, mode: Mode
) -> dict[str, float]:
    portion = study.portion(ranks, mode)
    one, many = measured[1].by_portion, measured[ranks].by_portion[portion]
    whole_s, portion_s = _median(one[study.whole].step_s), _median(one[portion].step_s)
    read_s = many.read_s - one[portion].read_s
    parts = {
        IDEAL: whole_s if mode == "weak" else whole_s / ranks,
        SMALLER: 0.0 if mode == "weak" else portion_s - whole_s / ranks,
        BESIDE: _median(many.alone_s) - portion_s - read_s,
        DATA: read_s,
        IMBALANCE: _median(many.alone_slowest_s) - _median(many.alone_s),
        COMMUNICATION: _median(many.step_s) - _median(many.alone_slowest_s),
    }
    return settled(parts, _median(many.step_s))


def settled(parts: Mapping[str, float], whole_s: float) -> dict[str, float]:
    """Return parts of which none is negative and which add up to the whole, the ideal as it is if it can be."""
    ideal_s = min(parts[IDEAL], whole_s)
    losses = {name: max(0.0, parts[name]) for name in LOSSES}
    total_s = sum(losses.values())
    share = (whole_s - ideal_s) / total_s if total_s else 0.0
    if not total_s:
        ideal_s = whole_s
    return {IDEAL: ideal_s, **{name: value * share for name, value in losses.items()}}


def _median(samples: tuple[float, ...]) -> float:
    return estimate(samples).median


def _over(amount: float, time: Estimate) -> Estimate:
    return Estimate(
        median=amount / time.median,
        low=amount / time.high,
        high=amount / time.low,
        count=time.count,
    )


def _times(one: Estimate, factor: float) -> Estimate:
    return Estimate(
        median=one.median * factor, low=one.low * factor, high=one.high * factor, count=one.count
    )
